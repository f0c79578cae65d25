"""The disk tier's mover: bytes between the mapped arena and the file, over NIXL POSIX."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from kvbm_common.arena import Arena
from kvbm_common.checksum import checksums
from kvbm_common.counters import BYTES_BUCKETS, Counters
from kvbm_common.errors import KvbmError
from kvbm_common.loop import monotonic_ms
from kvbm_common.nixl import Moved, MoverThread, Registration, Spans, TransferError
from kvbm_common.wire.verbs import FILL_GRACE_MS

from kvbm_disk_tier.messages import (
    STALE_ARENA,
    ReadDone,
    ReadFailed,
    ReadSlots,
    WriteFailed,
    WriteSlots,
    Written,
)

CHECKSUM_THREADS = 1
CALL_DEADLINE_S = 10.0
"""Registrations take milliseconds; a machine in trouble gets some more."""
SETTLE_DEADLINE_S = 0.8 * FILL_GRACE_MS / 1000
"""Soon the host tier will reuse the slots of a late fill: end this process before."""
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
        self._arena_known: Registration | None = None
        self._arena_epoch = 0
        self._retired: list[tuple[Arena, Registration]] = []
        self._file: Registration | None = None
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
        for arena, _ in self._retired:
            arena.close()
        if self._arena is not None:
            self._arena.close()

    def use_arena(self, path: str, epoch: int) -> None:
        """Map the arena of another life. The old one stays mapped until nothing flies over it."""
        if self._arena is not None and epoch == self._arena_epoch:
            return
        arena = Arena.attach(path)
        arena.populate()
        known = self._mover.register_memory(arena.address, arena.bytes).result(CALL_DEADLINE_S)
        if self._arena is not None and self._arena_known is not None:
            self._retired.append((self._arena, self._arena_known))
        self._arena, self._arena_known, self._arena_epoch = arena, known, epoch
        self._unmap_retired()

    def _unmap_retired(self) -> None:
        if self._flying == 0:
            for arena, known in self._retired:
                self._mover.deregister(known).result(CALL_DEADLINE_S)
                arena.close()
            self._retired.clear()

    def use_file(self, fd: int, size: int) -> None:
        """Read and write this file from now on; nothing may fly."""
        assert self._flying == 0
        self.drop_file()
        self._file = self._mover.register_file(fd, size).result(CALL_DEADLINE_S)
        self._fd = fd

    def drop_file(self) -> None:
        """The file is about to be closed; nothing may fly."""
        assert self._flying == 0
        if self._file is not None:
            self._mover.deregister(self._file).result(CALL_DEADLINE_S)
        self._file, self._fd = None, -1

    async def write(self, effect: WriteSlots) -> Written | WriteFailed:
        """Arena to file."""
        arena = self._arena
        if arena is None or effect.epoch != self._arena_epoch:
            return WriteFailed(effect.write, STALE_ARENA)
        memory = _memory(arena, effect.sources, effect.slot_bytes)
        file = _file(effect.targets, effect.slot_bytes)
        self._flying += 1
        try:
            future = self._mover.write_file(self._fd, memory, file, deadline_s=WRITE_DEADLINE_S)
            moved = await asyncio.wrap_future(future)
        except TransferError as error:
            # A late write may meet its slot's next block; that block's checksum would tell.
            await _wait_settled(error)
            return WriteFailed(effect.write, error.code)
        finally:
            self._flying -= 1
            self._unmap_retired()
        self._observe("h2disk", moved)
        return Written(effect.write)

    async def read(self, effect: ReadSlots) -> ReadDone | ReadFailed:
        """File to arena, and every checksum compared."""
        arena = self._arena
        if arena is None or effect.epoch != self._arena_epoch:
            return ReadFailed(effect.read, STALE_ARENA)
        memory = _memory(arena, effect.targets, effect.slot_bytes)
        file = _file(effect.sources, effect.slot_bytes)
        left_s = (effect.until_ms - monotonic_ms()) / 1000
        self._flying += 1
        try:
            future = self._mover.read_file(self._fd, memory, file, deadline_s=max(left_s, 0.01))
            moved = await asyncio.wrap_future(future)
            sums = await asyncio.get_running_loop().run_in_executor(
                self._summer, _sums, arena, effect
            )
        except TransferError as error:
            await _wait_settled(error)
            return ReadFailed(effect.read, error.code)
        finally:
            self._flying -= 1
            self._unmap_retired()
        self._observe("disk2h", moved)
        intact = tuple(
            found == block.checksum for found, block in zip(sums, effect.blocks, strict=True)
        )
        return ReadDone(effect.read, intact)

    def _observe(self, path: str, moved: Moved) -> None:
        self._seconds.observe(moved.seconds, path=path)
        self._bytes.observe(moved.bytes, path=path)


async def _wait_settled(error: TransferError) -> None:
    """Wait until nothing of a failed transfer can land any more; raises NotSettled."""
    if error.settled or error.settling is None:
        return
    try:
        async with asyncio.timeout(SETTLE_DEADLINE_S):
            await asyncio.wrap_future(error.settling)
    except TimeoutError:
        raise NotSettled(f"a transfer has not ended {SETTLE_DEADLINE_S} s late") from error


def _memory(arena: Arena, slots: Sequence[int], slot_bytes: int) -> Spans:
    starts = np.asarray(slots, dtype=np.uint64) * np.uint64(slot_bytes)
    return Spans.of(np.uint64(arena.address) + starts, slot_bytes)


def _file(slots: Sequence[int], slot_bytes: int) -> Spans:
    return Spans.of(np.asarray(slots, dtype=np.uint64) * np.uint64(slot_bytes), slot_bytes)


def _sums(arena: Arena, effect: ReadSlots) -> list[int]:
    sums: list[int] = []
    for slot, block in zip(effect.targets, effect.blocks, strict=True):
        offset = np.asarray([slot * effect.slot_bytes], dtype=np.uint64)
        sums += checksums(arena.array, offset, block.bytes)
    return sums
