"""The queue depth: how many blocks in flight keep this disk busy, measured when a store is opened.

Free slots of the store's own file are written, and read again, with 1, 2, 4, 8… blocks in flight,
until more in flight moves no more. Fewer than it takes leave the disk idle; more only make a short
onboard wait behind a long one. It takes no longer than `BUDGET_S` on a disk that answers, and some
0.05 s before it for the memory.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass

import numpy as np
from kvbm_common.memory.huge_pages import make_huge, map_shared
from kvbm_common.nixl.mover_thread import MoverThread, TransferError, Transferred
from kvbm_common.nixl.spans import Spans
from kvbm_common.tier.blocks import batch_blocks
from numpy.typing import NDArray

from kvbm_disk_tier.core.messages import Depth
from kvbm_disk_tier.shell.mover import CALL_DEADLINE_S, SETTLE_DEADLINE_S, NotSettled

BUDGET_S = 0.28
WRITES_SHARE = 0.5
STEP_S = 0.015
STEP_BYTES = 32 * 1024 * 1024
"""A step ends with the first of these two."""
DEPTH_MAX = 256
IN_FLIGHT_BYTES_MAX = 64 * 1024 * 1024
"""At 10 GB/s a disk that answers in 6 ms has so much under way: none needs more."""
TRANSFERS = 8
"""Transfers that what is in flight is cut into: they end, and are followed, one by one."""
SLOTS_MIN = 16
"""A store with fewer free slots has nothing to measure."""
GOOD_ENOUGH = 0.9
"""The part of the best speed that is good enough: the rest is noise."""
RISES = 1.05
"""The factor that counts as faster; after two steps that are not, the measurement ends."""
TRANSFER_DEADLINE_S = 5.0
TURN_S = 0.01
"""From the end of a batch until it is answered for and another one is handed over."""
WRITES_TURN_S = 0.02
"""Some disks end everything in flight at once, and idle until we have heard of it: the more often,
the less that was. No engine waits for a write, so it may be more."""
RANDOM_BYTES = 1024 * 1024
"""Some disks are faster with zeros."""

Move = Callable[[Spans, Spans], "Future[Transferred]"]
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Tuning:
    """The configured numbers of what is in flight at once."""

    queue_depth: int | None = None
    """Blocks; None: measured."""
    batch_blocks: int = 16
    batch_bytes: int = 0
    """Two full batches may always be in flight: one is answered while the other moves. Of small
    blocks up to four: the kernel sorts them by their place on the disk, and two end together."""

    def depth(self, mover: MoverThread, fd: int, stride: int, taken: NDArray[np.bool_]) -> Depth:
        """Return the depth for a store, measured unless it is configured.

        `taken`: which of its slots hold blocks. Nothing else may be in flight.
        """
        if self.queue_depth is not None:
            return Depth(self.queue_depth, self.queue_depth)
        sample = range(0, len(taken), max(1, len(taken) // (2 * DEPTH_MAX)))
        free = [slot for slot in sample if not taken[slot]][:DEPTH_MAX]
        held = [slot for slot in sample if taken[slot]][:DEPTH_MAX]
        if max(len(free), len(held)) < SLOTS_MIN:
            return Depth()
        found = measure(mover, fd, stride, free, held)
        batch = batch_blocks(self.batch_blocks, self.batch_bytes, stride)
        least = max(2 * batch, min(4 * batch, IN_FLIGHT_BYTES_MAX // stride))
        reads, writes = found.reads, found.writes
        # What a full store does not let us measure is as deep as the other.
        return Depth(
            _at_least(least, writes if reads is None else reads),
            _at_least(least, reads if writes is None else writes),
            found.written_bytes,
        )


def measure(
    mover: MoverThread, fd: int, stride: int, free: Sequence[int], held: Sequence[int]
) -> Depth:
    """Write `free` slots, if there are enough; read what was written, or else `held` ones."""
    with _Memory(mover, stride) as memory:
        started_s = time.monotonic()
        run = _Run(memory, fd)
        writes = run.rates(run.write, free, started_s + WRITES_SHARE * BUDGET_S)
        written_bytes = run.moved_bytes
        # A disk that stalls in the first half is still read.
        end_s = max(started_s + BUDGET_S, time.monotonic() + (1 - WRITES_SHARE) * BUDGET_S)
        reads = run.rates(run.read, free if writes else held, end_s)
    depth = Depth(
        _enough(reads, stride, TURN_S), _enough(writes, stride, WRITES_TURN_S), written_bytes
    )
    log.info(
        "queue depth for reads %s, for writes %s (blocks in flight: GB/s; reads %s; writes %s)",
        depth.reads, depth.writes, _shown(reads), _shown(writes),
    )  # fmt: skip
    return depth


def knee(rates: Mapping[int, float]) -> int | None:
    """Return the smallest depth that is as good as the best; None: nothing was measured."""
    if not rates:
        return None
    enough = GOOD_ENOUGH * max(rates.values())
    return min(depth for depth, rate in rates.items() if rate >= enough)


def _at_least(least: int, depth: int | None) -> int | None:
    return None if depth is None else max(least, depth)


def _enough(rates: Mapping[int, float], stride: int, turn_s: float) -> int | None:
    """Return twice the knee, plus what the disk moves in a turn of ours; None: not measured.

    The knee counts twice since some requests wait in the kernel.
    """
    depth = knee(rates)
    return None if depth is None else 2 * depth + round(turn_s * max(rates.values()) / stride)


def _shown(rates: Mapping[int, float]) -> str:
    return " ".join(f"{depth}:{rate / 1e9:.2f}" for depth, rate in rates.items()) or "–"


class _Memory:
    """Registered memory for the blocks in flight."""

    def __init__(self, mover: MoverThread, stride: int) -> None:
        self.mover = mover
        self.stride = stride
        self.slots = max(4, min(DEPTH_MAX, IN_FLIGHT_BYTES_MAX // stride))
        self._array = array = map_shared(-1, self.slots * stride)
        make_huge(array.ctypes.data, len(array))
        noise = np.frombuffer(os.urandom(RANDOM_BYTES), np.uint8)
        for start in range(0, len(array), RANDOM_BYTES):
            array[start : start + RANDOM_BYTES] = noise[: len(array) - start]
        self.address: int = array.ctypes.data

    def __enter__(self) -> _Memory:
        length = self.slots * self.stride
        registering = self.mover.register_memory(self.address, length)
        self._known = registering.result(CALL_DEADLINE_S)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not NotSettled:
            self.mover.deregister(self._known).result(CALL_DEADLINE_S)


class _Run:
    """Transfers between the memory and slots of the file."""

    def __init__(self, memory: _Memory, fd: int) -> None:
        self._memory = memory
        self._fd = fd
        self.moved_bytes = 0

    def write(self, memory: Spans, file: Spans) -> Future[Transferred]:
        mover = self._memory.mover
        return mover.write_file(self._fd, memory, file, deadline_s=TRANSFER_DEADLINE_S)

    def read(self, memory: Spans, file: Spans) -> Future[Transferred]:
        mover = self._memory.mover
        return mover.read_file(self._fd, memory, file, deadline_s=TRANSFER_DEADLINE_S)

    def rates(self, move: Move, slots: Sequence[int], end_s: float) -> dict[int, float]:
        """Measure bytes a second by depth, as far as the time goes; a failure ends it."""
        rates: dict[int, float] = {}
        if len(slots) < SLOTS_MIN:
            return rates
        depth, flat, best = 1, 0, 0.0
        while depth <= min(len(slots), self._memory.slots) and flat < 2:
            needed_s = STEP_S + (depth * self._memory.stride / best if best else 0.0)
            if time.monotonic() + needed_s > end_s:
                break
            try:
                rates[depth] = self._rate(move, slots, depth)
            except TransferError as error:
                log.warning("the queue depth cannot be measured: %s", error)
                return {}
            flat = 0 if rates[depth] > RISES * best else flat + 1
            best = max(best, rates[depth])
            depth *= 2
        return rates

    def _rate(self, move: Move, slots: Sequence[int], depth: int) -> float:
        """Keep `depth` blocks in flight for a step; slots are taken in turn."""
        group = -(-depth // TRANSFERS)
        turns = itertools.cycle(range(0, len(slots) - group + 1, group))
        idle = list(range(depth // group))
        in_flight: dict[Future[Transferred], int] = {}
        moved = 0
        started_s = time.monotonic()
        try:
            while idle or in_flight:
                while idle:
                    turn = next(turns)
                    lane = idle.pop()
                    file = self._spans(0, slots[turn : turn + group])
                    memory = range(lane * group, (lane + 1) * group)
                    in_flight[move(self._spans(self._memory.address, memory), file)] = lane
                done, _ = wait(in_flight, return_when=FIRST_COMPLETED)
                goes_on = time.monotonic() - started_s < STEP_S and moved < STEP_BYTES
                for future in done:
                    moved += future.result().bytes
                    lane = in_flight.pop(future)
                    idle += [lane] if goes_on else []
        except TransferError:
            for future in in_flight:
                _wait_end(future)
            raise
        self.moved_bytes += moved
        return moved / (time.monotonic() - started_s)

    def _spans(self, address: int, slots: Sequence[int]) -> Spans:
        stride = self._memory.stride
        return Spans.of([address + slot * stride for slot in slots], stride)


def _wait_end(future: Future[Transferred]) -> None:
    """Wait until a transfer moves nothing any more; raises NotSettled."""
    error = future.exception(2 * TRANSFER_DEADLINE_S)
    if isinstance(error, TransferError) and error.settling is not None:
        try:
            error.settling.result(SETTLE_DEADLINE_S)
        except TimeoutError:
            raise NotSettled("a write to measure the disk has not ended") from error
