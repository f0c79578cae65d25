"""The bounce pool: registered memory of ours that NIXL reads into, before a block is verified.

    free ──borrow──► lent ──give_back──────────► free
                      └────give_back, unsettled─► lost ──NIXL has settled it──► free

A read that misses its deadline fails at its deadline, and may still be written to later: over TCP,
a host tier that stands still holds its reads open for as long as it does. Such late bytes land here
and nowhere else: their buffer is lost to the pool until NIXL has settled the read. When every
buffer is lost, whatever waits for one fails, and whatever comes then.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field

from kvbm_common.memory.huge_pages import map_shared
from kvbm_common.nixl.layout import CHUNK_BYTES
from kvbm_common.nixl.mover_thread import MoverThread, TransferError, TransferTimeout
from kvbm_common.nixl.spans import Registration
from kvbm_common.nixl.transfers import MoverBusy, TransferFailed

BUFFERS = 4
"""Chunks that are read or copied at a time. With CHUNK_BYTES each: 64 MiB for each worker, taken
when the first load comes over NIXL."""
WAITING_MAX = 1024
"""Chunks that wait for a buffer, as many as a mover takes jobs."""


class BounceExhausted(TransferError):
    """Every buffer waits for a read that has missed its deadline: the host tier stands still."""

    code = "bounce_exhausted"


@dataclass(slots=True, eq=False)
class _Waiting:
    deadline: float
    buffer: Future[int] = field(default_factory=Future)


class BouncePool:
    """Buffers of one size. Every method may be called from any thread."""

    def __init__(self, mover: MoverThread, *, block_bytes: int, buffers: int = BUFFERS) -> None:
        """Create a pool of buffers, each with room for a chunk and for at least one block."""
        self.buffer_bytes = max(CHUNK_BYTES, block_bytes)
        self._mover, self._count = mover, buffers
        self._lock = threading.Lock()
        self._free: list[int] = []
        self._waiting: deque[_Waiting] = deque()
        self._lost = 0
        self._is_registered = False
        """True if the buffers are registered, or about to be."""
        self._is_serving = self._serve_again = False

    @property
    def lost(self) -> int:
        """Buffers that late bytes may still reach."""
        return self._lost

    def borrow(self, deadline: float) -> Future[int]:
        """Return a future of the address of a buffer, which settles when a buffer is free. It fails
        with a TransferError, at the deadline (of `time.monotonic`) at the latest."""
        waiting = _Waiting(deadline)
        with self._lock:
            is_full = len(self._waiting) >= WAITING_MAX
            is_first, self._is_registered = not self._is_registered, True
            if not is_full:
                self._waiting.append(waiting)
        if is_full:
            waiting.buffer.set_exception(MoverBusy(f"{WAITING_MAX} chunks wait for a buffer"))
        if is_first:
            self._register()
        self.serve()
        return waiting.buffer

    def give_back(self, buffer: int, settling: Future[None] | None = None) -> None:
        """Take a buffer back: it is free at once, or when `settling` ends."""
        if settling is None or settling.done():
            with self._lock:
                self._free.append(buffer)
                assert len(self._free) <= self._count, "a buffer was given back twice"
        else:
            with self._lock:
                self._lost += 1
            settling.add_done_callback(lambda _: self._found(buffer))
        self.serve()

    def serve(self) -> None:
        """Lend what is free, and fail what can wait no longer. To be called now and then: that
        time has passed, no other call says."""
        with self._lock:
            self._serve_again = True
            if self._is_serving:  # It serves once more; this also ends the recursion of callbacks.
                return
            self._is_serving = True
        while self._serve_once():
            pass

    def _serve_once(self) -> bool:
        with self._lock:
            if not self._serve_again:
                self._is_serving = False
                return False
            self._serve_again = False
            lent, late, refused = self._matched(time.monotonic())
        for waiting, buffer in lent:
            waiting.buffer.set_result(buffer)
        for waiting in late:
            waiting.buffer.set_exception(TransferTimeout("no buffer came free by the deadline"))
        for waiting in refused:
            reason = f"{self._count} buffers wait for reads that have missed their deadlines"
            waiting.buffer.set_exception(BounceExhausted(reason))
        return True

    def _matched(
        self, now: float
    ) -> tuple[list[tuple[_Waiting, int]], list[_Waiting], list[_Waiting]]:
        late = [waiting for waiting in self._waiting if waiting.deadline <= now]
        left = deque(waiting for waiting in self._waiting if waiting.deadline > now)
        lent = []
        while self._free and left:
            lent.append((left.popleft(), self._free.pop()))
        refused = list(left) if self._lost == self._count else []
        self._waiting = deque() if refused else left
        return lent, late, refused

    def _found(self, buffer: int) -> None:
        with self._lock:
            self._lost -= 1
        self.give_back(buffer)

    def _register(self) -> None:
        """Register the memory of the buffers with the first read; retry a failure with the next
        one."""
        try:
            self._memory = map_shared(-1, self._count * self.buffer_bytes)
        except OSError as error:
            self._refuse_all(TransferFailed(f"no memory for {self._count} buffers: {error}"))
            return
        address = self._memory.ctypes.data
        registering = self._mover.register_memory(address, self._memory.nbytes)
        registering.add_done_callback(lambda done: self._registered(address, done))

    def _registered(self, address: int, done: Future[Registration]) -> None:
        error = done.exception()
        if error is not None:
            self._refuse_all(error)
            return
        with self._lock:
            self._free = [address + i * self.buffer_bytes for i in range(self._count)]
        self.serve()

    def _refuse_all(self, error: BaseException) -> None:
        """Fail whatever waits; the next read tries again to register."""
        with self._lock:
            refused, self._waiting = list(self._waiting), deque()
            self._is_registered = False
        for waiting in refused:
            waiting.buffer.set_exception(error)
