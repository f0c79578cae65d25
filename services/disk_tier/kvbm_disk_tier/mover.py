"""The disk tier's mover: bytes between the mapped arena and the file, over NIXL POSIX."""

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
from kvbm_common.loop import monotonic_ms
from kvbm_common.nixl import MoverThread, Spans, TransferError
from kvbm_common.wire.verbs import FILL_GRACE_MS

from kvbm_disk_tier.messages import (
    ReadDone,
    ReadFailed,
    ReadSlots,
    WriteFailed,
    WriteSlots,
    Written,
)

CHECKSUM_THREADS = 1
WRITE_DEADLINE_S = 30.0
"""A disk that takes longer for one batch is as good as broken."""


class NotSettled(KvbmError):
    """A read may still land in an arena that is not ours: this process must end."""

    code = "not_settled"


class DiskMover:
    """One NIXL agent between one file and the arena that is mapped now."""

    def __init__(self, *, name: str, counters: Counters) -> None:
        self._mover = MoverThread(name, backends=("POSIX",))
        self._summer = ThreadPoolExecutor(CHECKSUM_THREADS, thread_name_prefix="checksum")
        self._arena: Arena | None = None
        self._retired: list[Arena] = []
        self._fd = -1
        self._flying = 0
        self._seconds = counters.histogram(
            "kvbm_transfer_seconds", "How long transfers took, by path.", labels=("path",)
        )
        self._bytes = counters.histogram(
            "kvbm_transfer_bytes",
            "How large transfers were, by path.",
            labels=("path",),
            bounds=BYTES_BUCKETS,
        )

    def close(self) -> None:
        """End both threads and unmap."""
        self._summer.shutdown(wait=True, cancel_futures=True)
        self._mover.close()
        for arena in (*self._retired, *([self._arena] if self._arena else [])):
            arena.close()

    def use_arena(self, path: str) -> None:
        """Map another arena. The old one stays mapped until nothing flies over it."""
        arena = Arena.attach(path)
        self._mover.register_memory(arena.address, arena.bytes)
        if self._arena is not None:
            self._retired.append(self._arena)
        self._arena = arena
        self._unmap_retired()

    def _unmap_retired(self) -> None:
        if self._flying == 0:
            for arena in self._retired:
                self._mover.deregister_memory(arena.address, arena.bytes)
                arena.close()
            self._retired.clear()

    def use_file(self, fd: int, size: int) -> None:
        """Read and write this file from now on; nothing may fly."""
        assert self._flying == 0
        if self._fd >= 0:
            self._mover.deregister_file(self._fd)
        self._mover.register_file(fd, size)
        self._fd = fd

    def drop_file(self) -> None:
        """The file is about to be closed; nothing may fly."""
        assert self._flying == 0
        if self._fd >= 0:
            self._mover.deregister_file(self._fd)
            self._fd = -1

    async def write(self, effect: WriteSlots) -> Written | WriteFailed:
        """Arena to file."""
        started = time.perf_counter()
        memory = self._memory(effect.sources, effect.slot_bytes)
        file = _file(effect.targets, effect.slot_bytes)
        self._flying += 1
        try:
            future = self._mover.write_file(self._fd, memory, file, deadline_s=WRITE_DEADLINE_S)
            await asyncio.wrap_future(future)
        except KvbmError as error:
            return WriteFailed(effect.write, error.code)
        finally:
            self._flying -= 1
            self._unmap_retired()
        self._observe("h2disk", started, len(effect.sources) * effect.slot_bytes)
        return Written(effect.write)

    async def read(self, effect: ReadSlots) -> ReadDone | ReadFailed:
        """File to arena, and every checksum compared."""
        started = time.perf_counter()
        memory = self._memory(effect.targets, effect.slot_bytes)
        file = _file(effect.sources, effect.slot_bytes)
        left_s = (effect.until_ms - monotonic_ms()) / 1000
        arena = self._arena
        assert arena is not None
        self._flying += 1
        try:
            future = self._mover.read_file(self._fd, memory, file, deadline_s=max(left_s, 0.01))
            await asyncio.wrap_future(future)
            sums = await asyncio.get_running_loop().run_in_executor(
                self._summer, _sums, arena, effect
            )
        except TransferError as error:
            if not error.settled:
                raise NotSettled(f"a read has not ended {FILL_GRACE_MS} ms late") from error
            return ReadFailed(effect.read, error.code)
        except KvbmError as error:
            return ReadFailed(effect.read, error.code)
        finally:
            self._flying -= 1
            self._unmap_retired()
        self._observe("disk2h", started, len(effect.targets) * effect.slot_bytes)
        intact = tuple(
            found == block.checksum for found, block in zip(sums, effect.blocks, strict=True)
        )
        return ReadDone(effect.read, intact)

    def _memory(self, slots: Sequence[int], slot_bytes: int) -> Spans:
        assert self._arena is not None
        starts = np.asarray(slots, dtype=np.uint64) * np.uint64(slot_bytes)
        return Spans.of(np.uint64(self._arena.address) + starts, slot_bytes)

    def _observe(self, path: str, started: float, size: int) -> None:
        self._seconds.observe(time.perf_counter() - started, path=path)
        self._bytes.observe(size, path=path)


def _file(slots: Sequence[int], slot_bytes: int) -> Spans:
    return Spans.of(np.asarray(slots, dtype=np.uint64) * np.uint64(slot_bytes), slot_bytes)


def _sums(arena: Arena, effect: ReadSlots) -> list[int]:
    sums: list[int] = []
    for slot, block in zip(effect.targets, effect.blocks, strict=True):
        offset = np.asarray([slot * effect.slot_bytes], dtype=np.uint64)
        sums += checksums(arena.array, offset, block.bytes)
    return sums
