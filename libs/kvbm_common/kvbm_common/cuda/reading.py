"""Reading: a worker's way from the mapped arena into its own device blocks, and their checksums.

`device_sums.py` sums up on the GPU.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np

from kvbm_common.cuda.copies import Copies, Lent, OutsideWindows, Window, through
from kvbm_common.cuda.device_sums import DeviceSums, sums_are_right
from kvbm_common.cuda.measure import choose, describe, measure
from kvbm_common.cuda.mover import CLOSE_DEADLINE_S, DeviceMover
from kvbm_common.cuda.pinning import Pinning
from kvbm_common.cuda.runtime import CudaError, Runtime
from kvbm_common.cuda.stream_end import WAIT_DEADLINE_S, StreamEnd
from kvbm_common.memory.arena import Arena
from kvbm_common.nixl.spans import Spans
from kvbm_common.nixl.transfers import TransferFailed, Transferred, TransferTimeout

if TYPE_CHECKING:
    from kvbm_common.copying import Places
    from kvbm_common.copying.rank_pieces import RankPieces
    from kvbm_common.cuda.lending import DeviceMemory

log = logging.getLogger(__name__)

T = TypeVar("T")

CALL_DEADLINE_S = 60.0
"""Deadline of calls that an engine's start waits for: the first one compiles the kernels."""


class Gpu:
    """The GPU of a worker, and the stream that its engine computes on (0: CUDA's default)."""

    def __init__(self, runtime: Runtime, *, compute_stream: int = 0) -> None:
        """Take some measurements of the GPU. Raises CudaError and TimeoutError."""
        self.runtime, self._compute_stream = runtime, compute_stream
        self._lock = Lock()
        self._stream: int | None = None
        self._own = ThreadPoolExecutor(1, thread_name_prefix="gpu")
        self.rates = self._apart(lambda: measure(runtime))
        log.info("copies of GPU %s: %s", runtime.bus_id(), describe(self.rates))

    def export(self, regions: Sequence[Lent]) -> DeviceMemory:
        """Return what the host tier needs to pull blocks from here.

        The handles are missing where CUDA gives none (memory of virtual addresses, as of sleep
        modes): then NIXL has to pull the blocks.
        """
        from kvbm_common.cuda.lending import DeviceMemory, export  # msgspec: not for a benchmark.

        try:
            return self._apart(lambda: export(self.runtime, regions))
        except CudaError as error:
            log.warning("CUDA IPC does not take the engine's memory: %s", error)
            return DeviceMemory(self.runtime.bus_id(), self.runtime.device, [])

    def _apart(self, call: Callable[[], T]) -> T:
        """Run a call in a thread of ours: the caller's has the engine's device and captures."""

        def run() -> T:
            self.runtime.enter()
            return call()

        return self._own.submit(run).result(CALL_DEADLINE_S)

    def computes_on(self, stream: int) -> None:
        """Set the stream that the engine computes on from now on."""
        self._compute_stream = stream

    def fence(self) -> int:
        """Record an event; when it is done, all that the engine has begun by now is done. Raises
        CudaError."""
        self.runtime.use()
        event = self.runtime.event()
        try:
            self.runtime.record(event, self._compute_stream)
        except CudaError:
            self._end_event(event)
            raise
        return event

    def has_passed(self, fence: int) -> bool:
        """Return whether all is done that comes before a fence; the fence is gone then. Raises
        CudaError, and the fence is gone, too."""
        try:
            if not self.runtime.is_done(fence):
                return False
        except CudaError:
            self._end_event(fence)
            raise
        self._end_event(fence)
        return True

    def _end_event(self, event: int) -> None:
        with contextlib.suppress(CudaError):
            self.runtime.end_event(event)

    def sums(self, pieces: RankPieces) -> SumsOfBlocks:
        """Return what sums up blocks of these pieces, part by part.

        That is the GPU; for pieces that its kernel cannot read, this host, which copies them back.
        """
        parts = pieces.part_regions()
        if not all(DeviceSums.fits(regions) for regions in parts):
            log.warning("blocks are summed up by the host: the GPU's kernel does not fit")
        elif not self._kernels_sum_right():
            log.error("blocks are summed up by the host: the GPU's are wrong in a trial")
        else:
            return DeviceSums(self.runtime, parts)
        return HostSums(self, pieces)

    def _kernels_sum_right(self) -> bool:
        try:
            return self._apart(lambda: sums_are_right(self.runtime))
        except CudaError as error:
            log.error("the kernels of checksums cannot be tried: %s", error)
            return False

    def clear(self, target: Places) -> None:
        """Fill blocks with zeros, after what the engine has begun to compute; for a thread of
        ours. Raises CudaError; TransferTimeout, then they may come until it has settled."""

        def put(stream: int) -> None:
            for address, length, _ in target.spans.rows.tolist():
                self.runtime.zero(address, length, stream)

        self._on_stream(put)

    def deliver(self, target: Places, source: Places) -> None:
        """Copy blocks from host memory into the GPU's; for a thread of ours. Raises CudaError,
        TransferTimeout."""
        self._copy(target, source)

    def fetch(self, target: Places, source: Places) -> None:
        """Copy blocks from the GPU's memory into this host's. Raises CudaError,
        TransferTimeout."""
        self._copy(target, source)

    def _copy(self, target: Places, source: Places) -> None:
        rows = zip(target.spans.rows.tolist(), source.spans.rows.tolist(), strict=True)

        def put(stream: int) -> None:
            for (to, length, _), (origin, _, _) in rows:
                self.runtime.copy(to, origin, length, stream)

        self._on_stream(put)

    def _on_stream(self, put: Callable[[int], None]) -> None:
        """Put something into a stream of ours, after the engine's, and wait for its end: also if
        a call fails half-way, for what is in the stream by then."""
        with self._lock:
            self.runtime.enter()
            if self._stream is None:
                self._stream = self.runtime.stream(urgent=True)
            end = StreamEnd(self.runtime, self._stream)
            try:
                self._wait_for_engine(self._stream)
                put(self._stream)
            finally:
                _await(end)

    def _wait_for_engine(self, stream: int) -> None:
        """Make a stream of ours wait for all that the engine has begun by now."""
        begun = self.fence()
        try:
            self.runtime.wait(stream, begun)
        finally:
            self._end_event(begun)


def _await(end: StreamEnd) -> None:
    """Wait for what was just put into a stream. Raises CudaError, TransferTimeout."""
    end.mark()
    try:
        has_come = end.wait()
    except CudaError:
        end.close()
        raise
    if not has_come:
        reason = f"the engine's stream has not come to its end in {WAIT_DEADLINE_S} s"
        raise TransferTimeout(reason, end.watch())
    end.close()


class SumsOfBlocks(Protocol):
    """Sums up device blocks, by their number."""

    def __call__(self, blocks: Sequence[int]) -> list[int]:
        """Return the checksums of the rank's parts of these blocks, block after block. Raises
        CudaError, TransferTimeout."""


class HostSums:
    """Sums up device blocks on this host, through a buffer of it."""

    def __init__(self, gpu: Gpu, pieces: RankPieces) -> None:
        self._gpu, self._pieces = gpu, pieces
        self._buffer: np.ndarray | None = None

    def __call__(self, blocks: Sequence[int]) -> list[int]:
        """Copy each block back, and sum it up. For one thread at a time."""
        from kvbm_common.copying import COPIER

        found: list[int] = []
        pieces = self._pieces
        for block in blocks:
            if self._buffer is None:
                self._gpu.runtime.enter()
                self._buffer = self._gpu.runtime.pinned(pieces.bytes)
            start = np.array([self._buffer.ctypes.data], dtype=np.uint64)
            self._gpu.fetch(pieces.coarse.back_to_back(start), pieces.coarse.on_device([block]))
            found += COPIER.sums(pieces.fine.back_to_back(start), lanes=pieces.lanes)
        return found


class DeviceReader:
    """Reads the arena into device memory, out of a mapping that is pinned while it is used.

    A copy begins after what the engine had begun to compute: a loaded block may have been another
    request's a moment ago. When the future has ended, the blocks may be used on any stream. Raises
    ArenaUnavailable, CudaError.
    """

    name = "cuda"

    def __init__(self, gpu: Gpu, *, arena_path: str | Path, arena_address: int) -> None:
        self._gpu = gpu
        read_only = gpu.runtime.pins_read_only
        self._arena = Arena.attach(arena_path, writable=not read_only)
        self._window = Window(arena_address, self._arena.bytes, self._arena.address)
        self._pinning = Pinning(
            gpu.runtime, self._arena.address, self._arena.bytes, read_only=read_only
        )
        try:
            self._mover = DeviceMover(
                gpu.runtime, name="onboard", urgent=True, pinning=self._pinning, host_side=1,
                kernel_below=choose(gpu.rates, "h2d"),
            )  # fmt: skip
        except BaseException:
            self._arena.close()
            raise
        self._pinning.start()

    def read(self, target: Spans, source: Spans, *, deadline_s: float) -> Future[Transferred]:
        """Copy row by row, from the host tier's addresses. The future fails with a
        TransferError."""
        try:
            ours = through([self._window], source.rows[:, 0], source.rows[:, 1])
            fence = self._gpu.fence()
        except (OutsideWindows, CudaError) as error:
            failed: Future[Transferred] = Future()
            failed.set_exception(TransferFailed(str(error)))
            return failed
        copies = Copies.of(target.rows[:, 0], ours, target.rows[:, 1])
        return self._mover.move(copies, deadline_s=deadline_s, after=[fence])

    def close(self, timeout_s: float = CLOSE_DEADLINE_S) -> None:
        """Close mover, pinning and arena; reads that were asked for before end first, however late:
        the last one to land closes what it has used."""
        self._mover.close(timeout_s).add_done_callback(lambda _: self._release())

    def _release(self) -> None:
        self._pinning.close()
        self._arena.close()
