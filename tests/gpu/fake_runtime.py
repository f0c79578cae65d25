"""A runtime without a GPU: it keeps CUDA's rules of order, and no other promise.

Streams are queues. What is put into one happens later: in its order in a stream, in any order
between streams (a seed draws it), and not before what it waits for. "Device" memory is memory of
this process. Every call is recorded.
"""

from __future__ import annotations

import ctypes
import itertools
import random
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import xxhash
from kvbm_common.cuda.copies import Copies
from kvbm_common.cuda.runtime import Allocation, CudaError
from numpy.typing import NDArray

STEPS_PER_LOOK_MAX = 3
"""How much happens on the device while somebody asks for an event."""


@dataclass(slots=True)
class _Step:
    may_run: Callable[[], bool]
    run: Callable[[], None]


@dataclass(slots=True)
class _Event:
    recorded: int = 0
    done: int = 0


@dataclass(slots=True)
class FakeRuntime:
    """One device. `moves` False: nothing happens on it until `advance`."""

    seed: int = 0
    device: int = 0
    kernels_reach_host: bool = True
    batches: bool = True
    pins_read_only: bool = True
    moves: bool = True
    still_looks: int = 0
    """So many looks at an event see nothing happen."""
    pinnable_bytes: int = 1 << 62
    capturing: bool = False
    """An engine captures a graph: some calls break it, unless their thread has said `enter`."""
    broken_captures: list[str] = field(default_factory=list)
    """The calls that did."""
    calls: list[tuple[object, ...]] = field(default_factory=list)
    """Name and arguments of every call, in their order."""
    registered: dict[int, int] = field(default_factory=dict)
    """Address and bytes of what is pinned."""
    opened: dict[int, Allocation] = field(default_factory=dict)
    _streams: dict[int, deque[_Step]] = field(default_factory=dict)
    _events: dict[int, _Event] = field(default_factory=dict)
    memory: dict[int, NDArray[np.uint8]] = field(default_factory=dict)
    """What is allocated, by its address."""
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _random: random.Random = field(default_factory=lambda: random.Random(0))
    _entered: weakref.WeakSet[threading.Thread] = field(default_factory=weakref.WeakSet)

    def __post_init__(self) -> None:
        self._random.seed(self.seed)

    def _say(self, *call: object) -> None:
        with self._lock:
            self.calls.append(call)

    def advance(self, steps: int = 1_000_000) -> None:
        """Let so much happen on the device, or all that can."""
        with self._lock:
            for _ in range(steps):
                ready = [queue for queue in self._streams.values() if queue and queue[0].may_run()]
                if not ready:
                    return
                self._random.choice(ready).popleft().run()

    def _put(self, stream: int, run: Callable[[], None], may_run: Callable[[], bool]) -> None:
        with self._lock:
            self._streams.setdefault(stream, deque()).append(_Step(may_run, run))

    def _disturb(self, name: str) -> None:
        if self.capturing and threading.current_thread() not in self._entered:
            self.broken_captures.append(name)
            raise CudaError("cudaErrorStreamCaptureUnsupported")

    def use(self) -> None:
        self._say("use")

    def enter(self) -> None:
        self._say("enter")
        self._entered.add(threading.current_thread())

    def stream(self, *, urgent: bool) -> int:
        stream = next(self._numbers)
        self._say("stream", stream, urgent)
        self._streams[stream] = deque()
        return stream

    def end_stream(self, stream: int) -> None:
        self._say("end_stream", stream)

    def event(self) -> int:
        event = next(self._numbers)
        self._events[event] = _Event()
        return event

    def end_event(self, event: int) -> None:
        self._say("end_event", event)

    def record(self, event: int, stream: int) -> None:
        self._say("record", event, stream)
        state = self._events[event]
        state.recorded += 1
        number = state.recorded

        def run() -> None:
            state.done = max(state.done, number)

        self._put(stream, run, lambda: True)

    def wait(self, stream: int, event: int) -> None:
        self._say("wait", stream, event)
        state = self._events[event]
        number = state.recorded
        self._put(stream, lambda: None, lambda: state.done >= number)

    def is_done(self, event: int) -> bool:
        self._disturb("is_done")
        if self.still_looks:
            self.still_looks -= 1
        elif self.moves:
            self.advance(self._random.randint(0, STEPS_PER_LOOK_MAX))
        state = self._events[event]
        return state.done == state.recorded

    def copy(self, target: int, source: int, length: int, stream: int) -> None:
        self._say("copy", target, source, length, stream)
        self._put(stream, lambda: _move(target, source, length), lambda: True)

    def zero(self, target: int, length: int, stream: int) -> None:
        self._say("zero", target, length, stream)
        self._put(stream, lambda: _zero(target, length), lambda: True)

    def copy_batch(self, copies: Copies, stream: int) -> None:
        rows = copies.rows.copy()
        self._say("copy_batch", len(rows), stream)

        def run() -> None:
            self._move_all(rows)

        self._put(stream, run, lambda: True)

    def copy_rows(self, table: int, count: int, stream: int) -> None:
        self._say("copy_rows", table, count, stream)

        def run() -> None:  # The table is read in the stream's turn, as on a GPU.
            self._move_all(_array(table, (count, 3)))

        self._put(stream, run, lambda: True)

    def _move_all(self, rows: NDArray[np.uint64]) -> None:
        """Move in any order: a measurement has thousands, so NumPy draws it."""
        drawn = np.random.default_rng(self._random.getrandbits(32)).permutation(rows)
        for target, source, length in drawn.tolist():
            _move(target, source, length)

    def sum_parts(
        self, *, regions: int, parts: int, part_count: int, kibs: int, blocks: int,
        block_count: int, scratch: int, digests: int, stream: int,
    ) -> None:  # fmt: skip
        self._say("sum_parts", block_count, stream)

        def run() -> None:
            found = iter(range(block_count * part_count))
            for block in _array(blocks, (block_count,)).tolist():
                for first, count, _, _ in _array(parts, (part_count, 4)).tolist():
                    state = xxhash.xxh3_64()
                    rows = _array(regions + 32 * first, (count, 4)).tolist()
                    for address, stride, length, _ in rows:
                        state.update(ctypes.string_at(address + block * stride, length))
                    _array(digests, (block_count * part_count,))[next(found)] = state.intdigest()

        self._put(stream, run, lambda: True)

    def register_host(self, address: int, length: int, *, read_only: bool) -> None:
        self._disturb("register_host")
        with self._lock:
            self._say("register_host", address, length, read_only)
            if sum(self.registered.values()) + length > self.pinnable_bytes:
                raise CudaError("cudaErrorMemoryAllocation: out of memory")
            self.registered[address] = length

    def unregister_host(self, address: int) -> None:
        self._disturb("unregister_host")
        with self._lock:
            self._say("unregister_host", address)
            del self.registered[address]

    def pinned(self, length: int) -> NDArray[np.uint8]:
        self._disturb("pinned")
        return np.zeros(length, dtype=np.uint8)

    def allocate(self, length: int) -> int:
        self._disturb("allocate")
        memory = np.zeros(length, dtype=np.uint8)
        self.memory[memory.ctypes.data] = memory
        return memory.ctypes.data

    def free(self, address: int) -> None:
        self._disturb("free")
        self._say("free", address)
        del self.memory[address]

    def export(self, address: int) -> Allocation:
        self._disturb("export")
        for base, memory in self.memory.items():
            if base <= address < base + len(memory):
                return Allocation(base, len(memory), base.to_bytes(64, "little"))
        raise CudaError("cudaErrorInvalidValue: invalid argument")

    def open(self, allocation: Allocation) -> int:
        """Another address for the same bytes is not to be had without a GPU: the same one."""
        self._say("open", allocation.address)
        self.opened[allocation.address] = allocation
        return allocation.address

    def close(self, address: int) -> None:
        self._say("close", address)
        del self.opened[address]

    def bus_id(self) -> str:
        return "0000:00:00.0"


def _move(target: int, source: int, length: int) -> None:
    ctypes.memmove(target, source, length)


def _zero(target: int, length: int) -> None:
    ctypes.memset(target, 0, length)


def _array(address: int, shape: tuple[int, ...]) -> NDArray[np.uint64]:
    memory = (ctypes.c_uint64 * int(np.prod(shape))).from_address(address)
    return np.ndarray(shape, dtype=np.uint64, buffer=memoryview(memory))
