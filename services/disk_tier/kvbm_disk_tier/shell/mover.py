"""The disk tier's mover: bytes between the mapped arena and the file, over NIXL."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from kvbm_common.copying.block_sums import sums_of
from kvbm_common.errors import KvbmError
from kvbm_common.memory.arena import Arena
from kvbm_common.nixl.mover_thread import MoverThread, TransferError, Transferred
from kvbm_common.nixl.spans import Registration, Spans
from kvbm_common.runtime.loop import monotonic_ms
from kvbm_common.runtime.metrics import Metrics, TransferFigures
from kvbm_common.tier.block_columns import BlockColumns
from kvbm_common.tier.layout import UNIT_BYTES, Layout, rounded_up
from kvbm_common.tier.slots import Block
from kvbm_common.wire.verbs import FILL_GRACE_MS
from numpy.typing import NDArray

from kvbm_disk_tier.core.effects import ReadSlots, WriteSlots
from kvbm_disk_tier.core.messages import (
    STALE_ARENA,
    Depth,
    ReadDone,
    ReadFailed,
    WriteFailed,
    Written,
)

if TYPE_CHECKING:
    from kvbm_disk_tier.shell.queue_depth import Tuning

WORKER_THREADS = 1
CALL_DEADLINE_S = 10.0
"""Registrations take milliseconds; a machine in trouble gets some more."""
SETTLE_DEADLINE_S = 0.8 * FILL_GRACE_MS / 1000
"""Soon the host tier will reuse the slots of a late fill: end this process before."""
TRANSFER_BYTES = 16 * 1024 * 1024
"""No transfer of a write is larger, if it has several blocks: one ends, and the disk has the next,
and reads get between them."""
WRITE_DEADLINE_S = 30.0
"""A disk that takes longer for one batch is as good as broken."""
PIECE_BYTES_MAX = 512 * 1024
"""Longer pieces were not faster, and a lone batch has fewer of them side by side."""


Put = tuple[Transferred, tuple[int, ...]]
"""The transfer, and the blocks that had been lost before it."""
Sums = tuple[bytes | None, ...]
"""The packed checksums of each block's parts; None: its bytes are not those that were stored."""
E = TypeVar("E", WriteSlots, ReadSlots)
T = TypeVar("T")


class NotSettled(KvbmError):
    """A read may still land in an arena that is not ours: this process must end."""

    code = "not_settled"


class DiskMover:
    """One NIXL agent between one file and the arenas that are mapped now."""

    def __init__(self, *, mover: MoverThread, counters: Metrics) -> None:
        """Take over `mover`, which can move files; it is closed with this."""
        self._mover = mover
        self._worker = ThreadPoolExecutor(WORKER_THREADS, thread_name_prefix="worker")
        self._arenas: dict[int, tuple[Arena, Registration]] = {}
        """Epoch of the host tier → its arena."""
        self._epochs: dict[str, int] = {}
        """Host tier → the epoch of its arena."""
        self._retired: list[tuple[Arena, Registration]] = []
        self._file: Registration | None = None
        self._fd = -1
        self._in_flight = 0
        self._figures = TransferFigures(counters)
        self.on_landed: Callable[[int], None] = lambda _: None
        """Told of each read whose bytes are there."""

    def close(self) -> None:
        """End both threads and unmap."""
        self._worker.shutdown(wait=True, cancel_futures=True)
        self._mover.close()
        for arena, _ in [*self._retired, *self._arenas.values()]:
            arena.close()

    def use_arena(self, path: str, epoch: int, instance: str = "") -> None:
        """Map the arena of another life of a host tier. The old one stays mapped until nothing
        is in flight any more."""
        if epoch in self._arenas:
            return
        with ExitStack() as unless_kept:  # The core asks again: each failure would keep a mapping.
            arena = unless_kept.enter_context(Arena.attach(path))
            arena.populate()
            known = self._mover.register_memory(arena.address, arena.bytes).result(CALL_DEADLINE_S)
            unless_kept.pop_all()
        self._retire(instance)
        self._arenas[epoch], self._epochs[instance] = (arena, known), epoch
        self._unmap_retired()

    def drop_arena(self, instance: str) -> None:
        """Drop the arena of a host tier that has left or begun a new life."""
        self._retire(instance)
        self._unmap_retired()

    def _retire(self, instance: str) -> None:
        former = self._epochs.pop(instance, None)
        if former is not None:
            self._retired.append(self._arenas.pop(former))

    def _arena(self, epoch: int) -> Arena | None:
        found = self._arenas.get(epoch)
        return None if found is None else found[0]

    def _unmap_retired(self) -> None:
        if self._in_flight == 0:
            for arena, known in self._retired:
                self._mover.deregister(known).result(CALL_DEADLINE_S)
                arena.close()
            self._retired.clear()

    def use_file(self, fd: int, layout: Layout) -> None:
        """Read and write this file of slots from now on; nothing may be in flight."""
        assert self._in_flight == 0
        self.drop_file()
        self._file = self._mover.register_file(fd, layout.total_bytes).result(CALL_DEADLINE_S)
        self._fd = fd

    def depth(self, tuning: Tuning, layout: Layout, blocks: Mapping[int, Block]) -> Depth:
        """Set and return the queue depth that keeps the file busy; nothing may be in flight.

        `blocks`: what the file holds, by place.
        """
        assert self._in_flight == 0
        self._mover.limit_files(read_bytes=None, written_bytes=None)
        stride, taken = layout.slot_bytes, taken_slots(layout, blocks)
        found = tuning.depth(self._mover, self._fd, stride, taken)
        self._mover.limit_files(
            read_bytes=None if found.reads is None else found.reads * stride,
            written_bytes=None if found.writes is None else found.writes * stride,
        )
        return found

    def drop_file(self) -> None:
        """Release the file, which is about to be closed; nothing may be in flight."""
        assert self._in_flight == 0
        if self._file is not None:
            self._mover.deregister(self._file).result(CALL_DEADLINE_S)
        self._file, self._fd = None, -1

    async def write(self, effect: WriteSlots) -> Written | WriteFailed:
        """Write blocks from arena to file."""
        arena = self._arena(effect.epoch)
        if arena is None:
            return WriteFailed(effect.write, STALE_ARENA)
        self._in_flight += 1
        try:
            parts = [self._put(arena, part) for part in parts_of(effect)]
            outcomes = await asyncio.gather(*parts, return_exceptions=True)
            return await self._written(effect, outcomes)
        finally:
            self._in_flight -= 1
            self._unmap_retired()

    async def _written(
        self, effect: WriteSlots, outcomes: Sequence[Put | BaseException]
    ) -> Written | WriteFailed:
        """Combine the outcomes of all parts of a batch, which have ended."""
        failed: WriteFailed | None = None
        lost: list[int] = []
        before = 0
        for part, outcome in zip(parts_of(effect), outcomes, strict=True):
            if isinstance(outcome, TransferError):
                # A late write may meet its slot's next block; that block's checksum would tell.
                await wait_settled(outcome)
                failed = failed or WriteFailed(effect.write, outcome.code, str(outcome))
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                moved, lost_here = outcome
                self._observe("h2disk", moved)
                lost += [before + index for index in lost_here]
            before += len(part.targets)
        return failed or Written(effect.write, tuple(lost))

    async def _put(self, arena: Arena, effect: WriteSlots) -> Put:
        """Write a part of a batch; also which entries of it cannot be had again."""
        memory, file = pieces_of(
            arena.address, places(effect.sources, effect.unit_bytes), places(effect.targets),
            lengths(effect.blocks),
        )  # fmt: skip
        return await self._to_file(memory, file), ()

    async def _to_file(self, memory: Spans, file: Spans) -> Transferred:
        future = self._mover.write_file(self._fd, memory, file, deadline_s=WRITE_DEADLINE_S)
        return await asyncio.wrap_future(future)

    async def read(self, effect: ReadSlots) -> ReadDone | ReadFailed:
        """Copy blocks from the file to the arena and compare every checksum."""
        arena = self._arena(effect.epoch)
        if arena is None:
            return ReadFailed(effect.read, STALE_ARENA)
        self._in_flight += 1
        try:
            moved, sums = await self._get(arena, effect)
        except TransferError as error:
            await wait_settled(error)
            return ReadFailed(effect.read, error.code, str(error))
        finally:
            self._in_flight -= 1
            self._unmap_retired()
        self._observe("disk2h", moved)
        return _read_done(effect, sums)

    async def _get(self, arena: Arena, effect: ReadSlots) -> tuple[Transferred, Sums]:
        """Read a batch; also the checksums of its blocks' parts."""
        memory, file = pieces_of(
            arena.address, places(effect.targets, effect.unit_bytes), places(effect.sources),
            lengths(effect.blocks),
        )  # fmt: skip
        moved = await self._from_file(memory, file, left_s(effect))
        self.on_landed(effect.read)
        return moved, await self._in_thread(_sums, arena, effect)

    async def _from_file(self, memory: Spans, file: Spans, deadline_s: float) -> Transferred:
        future = self._mover.read_file(self._fd, memory, file, deadline_s=deadline_s)
        return await asyncio.wrap_future(future)

    async def _in_thread(self, work: Callable[[Arena, E], T], arena: Arena, effect: E) -> T:
        """Run work that takes processor time in a thread: it keeps off the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._worker, work, arena, effect)

    def _observe(self, path: str, moved: Transferred) -> None:
        self._figures.observe(path, moved.seconds, moved.bytes)


def parts_of(effect: E) -> list[E]:
    """Return a batch in parts of TRANSFER_BYTES at most, or of one block each."""
    count = max(1, TRANSFER_BYTES // max(lengths(effect.blocks)))
    if len(effect.targets) <= count:
        return [effect]
    return [
        replace(
            effect,
            sources=effect.sources[at : at + count],
            targets=effect.targets[at : at + count],
            blocks=effect.blocks[at : at + count],
        )
        for at in range(0, len(effect.targets), count)
    ]


async def wait_settled(error: TransferError) -> None:
    """Wait until nothing of a failed transfer can land any more; raises NotSettled."""
    if error.settled or error.settling is None:
        return
    try:
        async with asyncio.timeout(SETTLE_DEADLINE_S):
            await asyncio.wrap_future(error.settling)
    except TimeoutError:
        raise NotSettled(f"a transfer has not ended {SETTLE_DEADLINE_S} s late") from error


def left_s(effect: ReadSlots) -> float:
    """Return the seconds until a read's deadline; 0.01 where it has passed."""
    return max((effect.until_ms - monotonic_ms()) / 1000, 0.01)


def _sums(arena: Arena, effect: ReadSlots) -> Sums:
    starts = [arena.address + slot * effect.unit_bytes for slot in effect.targets]
    return sums_of(effect.blocks, starts)


def _read_done(effect: ReadSlots, sums: Sums) -> ReadDone:
    """Return how a read has ended, with the checksums of parts where blocks have several."""
    intact = tuple(parts is not None for parts in sums)
    if all(block.code == 1 for block in effect.blocks):
        return ReadDone(effect.read, intact)
    return ReadDone(effect.read, intact, sums=tuple(parts or b"" for parts in sums))


def places(slots: Sequence[int], unit_bytes: int = UNIT_BYTES) -> list[int]:
    """Return where slots begin, in bytes."""
    return [slot * unit_bytes for slot in slots]


def lengths(blocks: Sequence[Block]) -> list[int]:
    """Return how many bytes are moved of each block: whole units, as O_DIRECT wants."""
    return [rounded_up(block.bytes) for block in blocks]


def pieces_of(
    address: int, near: Sequence[int], far: Sequence[int], sizes: Sequence[int]
) -> tuple[Spans, Spans]:
    """Return the spans of both sides: bytes `near` of the memory at `address`, `far` in a file.

    Neighbours in the file and in memory become one piece: every piece costs the kernel a request.
    In plain Python: for a batch of 16, what numpy costs is more than what merging gains.
    """
    memory: list[tuple[int, int, int]] = []
    file: list[tuple[int, int, int]] = []
    first = begin = length = 0
    for far_byte, near_byte, size in sorted(zip(far, near, sizes, strict=True)):
        follows = far_byte == first + length and near_byte == begin + length
        if length and follows and length + size <= PIECE_BYTES_MAX:
            length += size
            memory[-1] = (memory[-1][0], length, 0)
            file[-1] = (file[-1][0], length, 0)
            continue
        first, begin, length = far_byte, near_byte, size
        memory.append((address + near_byte, size, 0))
        file.append((far_byte, size, 0))
    return Spans(np.array(memory, dtype=np.uint64)), Spans(np.array(file, dtype=np.uint64))


def taken_slots(layout: Layout, blocks: Mapping[int, Block]) -> NDArray[np.bool_]:
    """Return which slots of the first size, numbered through the file, blocks overlap with."""
    former = BlockColumns.of(blocks)
    begins = former.slots * UNIT_BYTES
    ends = begins + former.block_bytes + layout.extra_bytes
    slots, last = begins // layout.slot_bytes, (ends - 1) // layout.slot_bytes
    taken = np.zeros(layout.slot_count, bool)
    while len(slots):
        taken[slots] = True
        is_longer = slots < last
        slots, last = slots[is_longer] + 1, last[is_longer]
    return taken
