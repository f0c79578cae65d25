"""The puller: carries out pulls over NIXL, and sums up what has arrived."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from kvbm_common.arena import Arena
from kvbm_common.checksum import checksums
from kvbm_common.counters import BYTES_BUCKETS, Counters
from kvbm_common.errors import KvbmError
from kvbm_common.layout import device_pieces, slot_pieces
from kvbm_common.nixl import MoverThread, Spans, TransferError

from kvbm_host_tier.messages import (
    AttachPeer,
    PeerAttached,
    PeerFailed,
    PullDone,
    PullFailed,
    PullPart,
    StartPull,
)

CHECKSUM_THREADS = 1
"""xxh3 is faster than any pull; one thread keeps up and leaves the other cores to the engines."""


class Puller:
    """One NIXL agent over one arena. Its transfers run in its thread, its checksums in another."""

    def __init__(self, arena: Arena, *, name: str, counters: Counters) -> None:
        self.arena = arena
        self.mover = MoverThread(name)
        self.mover.register_memory(arena.address, arena.bytes)
        self._summer = ThreadPoolExecutor(CHECKSUM_THREADS, thread_name_prefix="checksum")
        self._seconds = counters.histogram(
            "kvbm_transfer_seconds", "How long transfers took, by path.", labels=("path",)
        )
        self._bytes = counters.histogram(
            "kvbm_transfer_bytes",
            "How large transfers were, by path.",
            labels=("path",),
            bounds=BYTES_BUCKETS,
        )

    def metadata(self) -> bytes:
        """What others need to read the arena."""
        return self.mover.metadata()

    def close(self) -> None:
        """End both threads."""
        self._summer.shutdown(wait=True, cancel_futures=True)
        self.mover.close()

    async def attach(self, effect: AttachPeer) -> PeerAttached | PeerFailed:
        """Learn where a worker's memory is."""
        loop = asyncio.get_running_loop()
        try:
            peer = await loop.run_in_executor(None, self.mover.add_peer, effect.agent)
        except KvbmError as error:
            return PeerFailed(effect.engine, effect.rank, str(error))
        return PeerAttached(effect.engine, effect.rank, peer)

    def detach(self, peer: str) -> None:
        """Forget a worker's memory."""
        self.mover.remove_peer(peer)

    async def pull(self, effect: StartPull, *, slot_bytes: int) -> PullDone | PullFailed:
        """Read every rank's part into the slots, then sum up the blocks."""
        started = time.perf_counter()
        reads = [self._read(part, effect, slot_bytes) for part in effect.parts]
        outcomes = await asyncio.gather(*reads, return_exceptions=True)
        errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        for error in errors:
            if not isinstance(error, KvbmError):
                raise error
        if errors:
            settled = all(not isinstance(e, TransferError) or e.settled for e in errors)
            return PullFailed(effect.pull, _reason(errors[0]), settled)
        sums = await asyncio.get_running_loop().run_in_executor(
            self._summer, self._sum, effect.slots, effect.block_bytes, slot_bytes
        )
        self._seconds.observe(time.perf_counter() - started, path="d2h")
        self._bytes.observe(len(effect.slots) * effect.block_bytes, path="d2h")
        return PullDone(effect.pull, tuple(sums))

    async def _read(self, part: PullPart, effect: StartPull, slot_bytes: int) -> None:
        source = device_pieces(part.regions, effect.blocks)
        target = slot_pieces(
            part.regions,
            effect.slots,
            arena_address=self.arena.address,
            slot_bytes=slot_bytes,
            part_offset=part.slot_offset,
        )
        future = self.mover.read(
            part.peer,
            Spans.of_pieces(target),
            Spans.of_pieces(source),
            deadline_s=effect.deadline_ms / 1000,
        )
        await asyncio.wrap_future(future)

    def _sum(self, slots: Sequence[int], block_bytes: int, slot_bytes: int) -> list[int]:
        offsets = np.asarray(slots, dtype=np.uint64) * np.uint64(slot_bytes)
        return checksums(self.arena.array, offsets, block_bytes)


def _reason(error: BaseException) -> str:
    return error.code if isinstance(error, KvbmError) else type(error).__name__
