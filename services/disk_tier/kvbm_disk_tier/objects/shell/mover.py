"""The object tier's mover: bytes between the mapped arena and objects, through lanes.

What is written is compared with its checksum before it leaves the lane, so an object has the right
bytes whatever became of the lease on its source. What is read is compared in the lane, and copied
into the arena only before the fill's deadline. `packing` says how a block lies in a lane.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
from kvbm_common.errors import DeadlineExceeded, KvbmError
from kvbm_common.memory.arena import Arena
from kvbm_common.nixl.spans import Registration, Spans
from kvbm_common.nixl.transfers import TransferError, Transferred
from kvbm_common.runtime.loop import monotonic_ms
from kvbm_common.runtime.metrics import Metrics, TransferFigures
from kvbm_common.tier.slots import Block
from kvbm_common.wire.verbs import ArenaReply

from kvbm_disk_tier.core.messages import STALE_ARENA
from kvbm_disk_tier.objects.core.packing import Bytes, Packing, Plain
from kvbm_disk_tier.objects.shell.lanes import LaneMemory, Lanes
from kvbm_disk_tier.objects.shell.object_store import (
    CHANGED,
    CORRUPT,
    NO_LANE,
    OK,
    TOO_LATE,
    Sums,
)

COPY_THREADS = 2
TAIL_BYTES = 64
CALL_DEADLINE_S = 10.0
"""Registrations take milliseconds; a machine in trouble gets some more."""
CLOSE_S = 1.0
"""A request that hangs ends by itself within ten seconds; the process does not wait for it."""

T = TypeVar("T")


@dataclass(slots=True)
class _Taken:
    """A lane, and whether late bytes may still come into it."""

    lane: int
    is_late: bool = False


class Transport(Protocol):
    """The carrier of the bytes of objects: NIXL's mover, or threads for files."""

    def register_memory(self, address: int, length: int) -> Future[Registration]:
        """Register memory for transfers."""

    def read_object(self, name: str, memory: Spans, *, deadline_s: float) -> Future[Transferred]:
        """Read the beginning of an object into one span of memory."""

    def write_object(self, name: str, memory: Spans, *, deadline_s: float) -> Future[Transferred]:
        """Write one span of memory as an object, all of it or nothing."""

    def close(self, timeout_s: float) -> None:
        """End the threads, as far as they do within this time."""


class ObjectMover:
    """Moves between the objects of one store, the lanes, and the arenas that are mapped now."""

    def __init__(
        self,
        *,
        transport: Transport,
        lanes: int,
        counters: Metrics,
        packing: Packing | None = None,
    ) -> None:
        """Take over `transport`, which moves up to `lanes` objects at once; it is closed here."""
        self.packing: Packing = packing or Plain()
        self._mover = transport
        self._copier = ThreadPoolExecutor(COPY_THREADS, thread_name_prefix="copy")
        self.lanes = Lanes(lanes)
        self._memory: list[LaneMemory] = []
        """The newest is in use; older ones may still be flown over, and stay."""
        self._arenas: dict[int, Arena] = {}
        """Epoch of the host tier → its arena."""
        self._epochs: dict[str, int] = {}
        """Host tier → the epoch of its arena."""
        self._figures = TransferFigures(counters)

    def close(self) -> None:
        """End the threads; the memory goes with the process."""
        self._copier.shutdown(wait=True, cancel_futures=True)
        self._mover.close(CLOSE_S)
        for memory in self._memory if self.lanes.taken_count else ():
            memory.keep()
        for arena in self._arenas.values():
            arena.close()

    def use_arena(self, reply: ArenaReply) -> None:
        """Map the arena of another life; a copy out of the old one ends in its own mapping."""
        if reply.epoch in self._arenas:
            return
        with contextlib.ExitStack() as unless_kept:  # The core asks again after a failure.
            arena = unless_kept.enter_context(Arena.attach(reply.path))
            arena.populate()
            self._lanes_for(max(reply.sizes, default=reply.slot_bytes))
            unless_kept.pop_all()
        self.drop_arena(reply.instance)
        self._arenas[reply.epoch], self._epochs[reply.instance] = arena, reply.epoch

    @property
    def buffer_bytes(self) -> int:
        """The memory of all lanes, those that have become too short included."""
        return self.lanes.count * sum(memory.lane_bytes for memory in self._memory)

    def _lanes_for(self, block_bytes: int) -> LaneMemory:
        """Return lanes for blocks of this size; larger ones are made when these are too short."""
        lane_bytes = block_bytes + self.packing.extra_bytes
        if not self._memory or self._memory[-1].lane_bytes < lane_bytes:
            memory = LaneMemory(self.lanes.count, lane_bytes)
            self._mover.register_memory(memory.address, memory.bytes).result(CALL_DEADLINE_S)
            self._memory.append(memory)
        return self._memory[-1]

    def drop_arena(self, instance: str) -> None:
        """Drop the arena of a host tier that has left or begun a new life."""
        former = self._epochs.pop(instance, None)
        if former is not None:
            self._arenas.pop(former).close()

    async def put(
        self, name: str, block: Block, *, epoch: int, offset: int, deadline_s: float
    ) -> str:
        """Write the arena's bytes at `offset` as an object; return OK or what was wrong."""
        until_s = asyncio.get_running_loop().time() + deadline_s

        async def move(taken: _Taken, memory: LaneMemory, arena: Bytes) -> str:
            if not await self._in_thread(
                lambda: self._copy_in(memory, taken.lane, arena, offset, block)
            ):
                return CHANGED
            span = self._span(memory, taken.lane, block)
            left_s = until_s - asyncio.get_running_loop().time()
            future = self._mover.write_object(name, span, deadline_s=max(left_s, 0.01))
            return await self._wait(future, taken, path="h2object")

        return await self._with_lane(move, epoch, block, write=True, deadline_s=deadline_s)

    async def get(
        self, name: str, block: Block, *, epoch: int, offset: int, until_ms: int
    ) -> str | Sums:
        """Read an object into the arena at `offset`; return its sums or what was wrong.

        The sums are the checksums of the block's parts.
        """

        async def move(taken: _Taken, memory: LaneMemory, arena: Bytes) -> str | Sums:
            span = self._span(memory, taken.lane, block)
            # How much came is not known: what the lane held before must not complete a torn object.
            memory.lane(taken.lane, block.bytes + self.packing.extra_bytes)[-TAIL_BYTES:] = 0
            future = self._mover.read_object(name, span, deadline_s=_left_s(until_ms))
            outcome = await self._wait(future, taken, path="object2h")
            if outcome != OK:
                return outcome
            return await self._in_thread(
                lambda: self._copy_out(memory, taken.lane, arena, offset, block, until_ms)
            )

        left_s = _left_s(until_ms)
        return await self._with_lane(move, epoch, block, write=False, deadline_s=left_s)

    async def _with_lane(
        self,
        move: Callable[[_Taken, LaneMemory, Bytes], Awaitable[str | T]],
        epoch: int,
        block: Block,
        *,
        write: bool,
        deadline_s: float,
    ) -> str | T:
        try:
            taken = _Taken(await self.lanes.take(write=write, deadline_s=deadline_s))
        except DeadlineExceeded as error:
            return error.code
        try:
            arena = self._arenas.get(epoch)
            if arena is None:
                return STALE_ARENA
            try:
                memory = self._lanes_for(block.bytes)
            except (KvbmError, TimeoutError, OSError):  # No memory for larger lanes.
                return NO_LANE
            return await move(taken, memory, arena.array)
        finally:
            if not taken.is_late:
                self.lanes.give(taken.lane)

    async def _wait(self, future: Future[Transferred], taken: _Taken, *, path: str) -> str:
        taken.is_late = True  # Until we know better; a cancelled task leaves it so.
        try:
            moved = await asyncio.wrap_future(future)
        except TransferError as error:
            taken.is_late = not error.settled
            if taken.is_late and error.settling is not None:
                self._give_later(taken.lane, error.settling)
            return error.code
        taken.is_late = False
        self._figures.observe(path, moved.seconds, moved.bytes)
        return OK

    def _give_later(self, lane: int, settling: Future[None]) -> None:
        loop = asyncio.get_running_loop()

        def settled(_: Future[None]) -> None:
            with contextlib.suppress(RuntimeError):  # The loop is closed: no task wants lanes.
                loop.call_soon_threadsafe(self.lanes.give, lane)

        settling.add_done_callback(settled)

    async def _in_thread(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._copier, function)

    def _span(self, memory: LaneMemory, lane: int, block: Block) -> Spans:
        length = block.bytes + self.packing.extra_bytes
        return Spans.of([memory.address + lane * memory.lane_bytes], length)

    def _copy_in(
        self, memory: LaneMemory, lane: int, arena: Bytes, offset: int, block: Block
    ) -> bool:
        packed = memory.lane(lane, block.bytes + self.packing.extra_bytes)
        return self.packing.pack(arena[offset : offset + block.bytes], packed, block)

    def _copy_out(
        self, memory: LaneMemory, lane: int, arena: Bytes, offset: int, block: Block, until_ms: int
    ) -> str | Sums:
        packed = memory.lane(lane, block.bytes + self.packing.extra_bytes)
        unpacked = self.packing.unpack(packed, block)
        if unpacked is None:
            return CORRUPT
        plain, sums = unpacked
        if monotonic_ms() >= until_ms:
            return TOO_LATE  # The slot may hold another block by now.
        np.copyto(arena[offset : offset + block.bytes], plain)
        return sums


def _left_s(until_ms: int) -> float:
    return max((until_ms - monotonic_ms()) / 1000, 0.01)
