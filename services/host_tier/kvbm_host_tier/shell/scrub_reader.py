"""The scrubber's reader: it sums up slots of the arena in a thread, in a mapping of its own."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable
from concurrent.futures import ThreadPoolExecutor

from kvbm_common.copying.block_sums import sums_of
from kvbm_common.errors import KvbmError
from kvbm_common.memory.arena import Arena
from kvbm_common.tier.layout import UNIT_BYTES

from kvbm_host_tier.core.scrub_messages import (
    ScrubDone,
    ScrubEffect,
    ScrubFailed,
    ScrubFound,
    ScrubSlots,
)

log = logging.getLogger(__name__)


class ScrubReader:
    """One thread and a read-only mapping, both made when the first batch comes."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="scrub")
        self._arena: Arena | None = None

    def close(self) -> None:
        """End the thread, then the mapping."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        if self._arena is not None:
            self._arena.close()
            self._arena = None

    def carry_out(self, effect: ScrubEffect) -> Awaitable[ScrubDone | ScrubFailed] | None:
        """Read a batch, or say what it has found."""
        match effect:
            case ScrubSlots():
                return self.read(effect)
            case ScrubFound(names):
                text = "the scrubber found %d blocks of host memory changed; they are dropped"
                log.error(text, len(names))
                return None

    async def read(self, effect: ScrubSlots) -> ScrubDone | ScrubFailed:
        """Compare a batch with its checksums."""
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._thread, self._read, effect)
        except KvbmError as error:
            return ScrubFailed(error.code)
        except OSError:  # No room in our address space.
            return ScrubFailed("arena_unavailable")

    def _read(self, effect: ScrubSlots) -> ScrubDone:
        started_ns = time.thread_time_ns()
        arena = self._mapped(effect.path)
        starts = [arena.address + slot * UNIT_BYTES for slot in effect.slots]
        found = sums_of(effect.blocks, starts)
        wrong = tuple(index for index, sums in enumerate(found) if sums is None)
        return ScrubDone(wrong, (time.thread_time_ns() - started_ns) // 1000)

    def _mapped(self, path: str) -> Arena:
        if self._arena is None or str(self._arena.path) != path:
            if self._arena is not None:
                self._arena.close()
                self._arena = None
            self._arena = Arena.attach(path, writable=False)
        return self._arena
