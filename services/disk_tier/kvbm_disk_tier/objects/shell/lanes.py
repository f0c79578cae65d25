"""Lanes: places in memory of our own through which blocks pass on their way from and to the bucket.

An object store may take seconds, and NIXL cannot abort: bytes of a read that was given up may still
come. They come into a lane, never into the arena, whose slots belong to others; the lane is lent
again when NIXL has said that nothing comes any more.

Reads go first, and writes take no more than half of the lanes.
"""

from __future__ import annotations

import asyncio
import ctypes
import mmap
from collections import deque

import numpy as np
from kvbm_common.errors import DeadlineExceeded
from numpy.typing import NDArray


class Lanes:
    """Lanes for the tasks of one event loop."""

    def __init__(self, count: int) -> None:
        assert count > 0
        self.count = count
        self._writes_max = max(1, count // 2)
        self._free = list(range(count - 1, -1, -1))
        self._writing: set[int] = set()
        self._readers: deque[asyncio.Future[int]] = deque()
        self._writers: deque[asyncio.Future[int]] = deque()

    @property
    def taken_count(self) -> int:
        """Return the number of lanes in use."""
        return self.count - len(self._free)

    async def take(self, *, write: bool, deadline_s: float) -> int:
        """Wait for a lane; raises DeadlineExceeded."""
        waiter: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        (self._writers if write else self._readers).append(waiter)
        self._hand_out()
        try:
            async with asyncio.timeout(deadline_s):
                return await waiter
        except BaseException as error:
            # It may have been handed out in the very moment in which we gave up.
            if not waiter.cancel() and not waiter.cancelled():
                self.give(waiter.result())
            if isinstance(error, TimeoutError):
                raise DeadlineExceeded(f"no lane was free for {deadline_s} s") from error
            raise

    def give(self, lane: int) -> None:
        """Give a lane back."""
        assert lane not in self._free
        self._writing.discard(lane)
        self._free.append(lane)
        self._hand_out()

    def _hand_out(self) -> None:
        while self._free:
            waiter, writes = self._next()
            if waiter is None:
                return
            lane = self._free.pop()
            if writes:
                self._writing.add(lane)
            waiter.set_result(lane)

    def _next(self) -> tuple[asyncio.Future[int] | None, bool]:
        """Return the next waiter and whether it writes; waiters that gave up are skipped."""
        may_write = len(self._writing) < self._writes_max
        for queue, writes in ((self._readers, False), (self._writers, True)):
            while queue and (not writes or may_write):
                waiter = queue.popleft()
                if not waiter.done():
                    return waiter, writes
        return None, False


class LaneMemory:
    """The memory of the lanes, each `lane_bytes` long."""

    def __init__(self, count: int, lane_bytes: int) -> None:
        self.lane_bytes = lane_bytes
        self.bytes = count * lane_bytes
        self._mapping = mmap.mmap(-1, self.bytes)
        self.array: NDArray[np.uint8] = np.frombuffer(self._mapping, dtype=np.uint8)
        self.address: int = self.array.ctypes.data

    def keep(self) -> None:
        """Leave it mapped to the last moment of the process: a request that hangs may still end."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._mapping))

    def lane(self, lane: int, length: int) -> NDArray[np.uint8]:
        """Return the first `length` bytes of a lane."""
        assert length <= self.lane_bytes
        start = lane * self.lane_bytes
        return self.array[start : start + length]
