"""Reading: a worker's way from the mapped arena into its own device blocks, and their checksums."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from kvbm_common.arena import Arena
from kvbm_common.cuda import kernels
from kvbm_common.cuda.copies import Copies, Lent, OutsideWindows, Window, through
from kvbm_common.cuda.measure import choose, describe, measure
from kvbm_common.cuda.mover import DeviceMover
from kvbm_common.cuda.pinning import Pinning
from kvbm_common.cuda.runtime import CudaError, Runtime
from kvbm_common.transfers import Moved, Spans, TransferFailed

if TYPE_CHECKING:
    from kvbm_common.cuda.lending import DeviceMemory

log = logging.getLogger(__name__)

T = TypeVar("T")

CALL_DEADLINE_S = 60.0
"""Of what an engine's start waits for: the first of it compiles the kernels."""
SUM_DEADLINE_S = 10.0
SUM_POLL_S = 0.00005
SUM_BLOCKS_MAX = 4096
"""Blocks of one launch: more than any chunk has."""


class Gpu:
    """The GPU of a worker, and the stream that its engine computes on (0: CUDA's default)."""

    def __init__(self, runtime: Runtime, *, compute_stream: int = 0) -> None:
        """Takes some measurements. Raises CudaError and TimeoutError."""
        self.runtime, self._compute_stream = runtime, compute_stream
        self._own = ThreadPoolExecutor(1, thread_name_prefix="gpu")
        self.rates = self._apart(lambda: measure(runtime))
        log.info("copies of GPU %s: %s", runtime.bus_id(), describe(self.rates))

    def export(self, regions: Sequence[Lent]) -> DeviceMemory:
        """What the host tier needs to pull blocks from here; without handles where CUDA gives none
        (memory of virtual addresses, as of sleep modes): then NIXL has to do it."""
        from kvbm_common.cuda.lending import DeviceMemory, export  # msgspec: not for a benchmark.

        try:
            return self._apart(lambda: export(self.runtime, regions))
        except CudaError as error:
            log.warning("CUDA IPC does not take the engine's memory: %s", error)
            return DeviceMemory(self.runtime.bus_id(), self.runtime.device, [])

    def _apart(self, call: Callable[[], T]) -> T:
        """In a thread of ours: the caller's is the engine's, whose device and captures are its."""

        def run() -> T:
            self.runtime.enter()
            return call()

        return self._own.submit(run).result(CALL_DEADLINE_S)

    def computes_on(self, stream: int) -> None:
        """The engine computes on this stream from now on."""
        self._compute_stream = stream

    def fence(self) -> int:
        """An event: whatever the engine has begun to compute by now is done."""
        self.runtime.use()
        event = self.runtime.event()
        self.runtime.record(event, self._compute_stream)
        return event

    def sums(self, regions: Sequence[Lent]) -> DeviceSums | None:
        """Sums up blocks on the GPU; None for pieces that the kernel cannot read."""
        return DeviceSums(self.runtime, regions) if DeviceSums.fits(regions) else None


class DeviceReader:
    """Reads the arena into device memory, out of a mapping that is pinned while it is used.

    A copy begins after what the engine had begun to compute: a block that is loaded may have been
    somebody else's a moment ago. Whoever waits for the future may use the blocks on any stream.
    Raises ArenaUnavailable, CudaError.
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

    def read(self, target: Spans, source: Spans, *, deadline_s: float) -> Future[Moved]:
        """Copy row by row, from the host tier's addresses. The future fails with a
        TransferError."""
        try:
            ours = through([self._window], source.rows[:, 0], source.rows[:, 1])
            fence = self._gpu.fence()
        except (OutsideWindows, CudaError) as error:
            failed: Future[Moved] = Future()
            failed.set_exception(TransferFailed(str(error)))
            return failed
        copies = Copies.of(target.rows[:, 0], ours, target.rows[:, 1])
        return self._mover.move(copies, deadline_s=deadline_s, after=[fence])

    def close(self) -> None:
        """What was asked for before ends first."""
        self._mover.close()
        self._pinning.close()
        self._arena.close()


class DeviceSums:
    """xxh3-64 of blocks where they lie in device memory, by a kernel on a stream of its own."""

    def __init__(self, runtime: Runtime, regions: Sequence[Lent]) -> None:
        assert self.fits(regions)
        self._runtime, self._count = runtime, len(regions)
        self._lock = Lock()
        self._is_set_up = False
        lengths = [region.piece_bytes for region in regions]
        self._block_bytes = sum(lengths)
        table = np.array(
            [[r.address, r.stride, r.piece_bytes, 0] for r in regions], dtype=np.uint64
        )
        table[:, 3] = np.cumsum(lengths) - np.array(lengths)
        self._table = table

    def _set_up(self) -> None:
        """With the first blocks, in the thread that asks for them."""
        runtime, table = self._runtime, self._table
        self._stream = runtime.stream(urgent=True)
        self._staging = runtime.pinned(max(table.nbytes, 8 * SUM_BLOCKS_MAX))
        self._regions = runtime.allocate(table.nbytes)
        self._blocks = runtime.allocate(8 * SUM_BLOCKS_MAX)
        self._digests = runtime.allocate(8 * SUM_BLOCKS_MAX)
        self._upload(self._regions, table.reshape(-1))
        self._wait()
        self._is_set_up = True

    @staticmethod
    def fits(regions: Sequence[Lent]) -> bool:
        """Whether no stripe of the checksum is in two pieces, and every word is aligned."""
        step = kernels.SUM_PIECE_BYTES
        return sum(r.piece_bytes for r in regions) >= kernels.SUM_BLOCK_BYTES_MIN and all(
            r.piece_bytes % step == 0 and r.address % 8 == 0 and r.stride % 8 == 0 for r in regions
        )

    def __call__(self, blocks: Sequence[int]) -> list[int]:
        """The checksums of these blocks, in their order, for a thread of ours. Raises CudaError."""
        with self._lock:
            self._runtime.enter()
            if not self._is_set_up:
                self._set_up()
            found: list[int] = []
            for start in range(0, len(blocks), SUM_BLOCKS_MAX):
                found += self._sums(blocks[start : start + SUM_BLOCKS_MAX])
            return found

    def _sums(self, blocks: Sequence[int]) -> list[int]:
        self._upload(self._blocks, np.array(blocks, dtype=np.uint64))
        self._runtime.sum_blocks(
            regions=self._regions, region_count=self._count, blocks=self._blocks,
            block_count=len(blocks), block_bytes=self._block_bytes, digests=self._digests,
            stream=self._stream,
        )  # fmt: skip
        staging = self._staging
        self._runtime.copy(staging.ctypes.data, self._digests, 8 * len(blocks), self._stream)
        self._wait()
        return [int(n) for n in staging[: 8 * len(blocks)].view(np.uint64)]

    def _upload(self, target: int, numbers: np.ndarray) -> None:
        self._staging[: numbers.nbytes].view(np.uint64)[:] = numbers
        self._runtime.copy(target, self._staging.ctypes.data, numbers.nbytes, self._stream)

    def _wait(self) -> None:
        event = self._runtime.event()
        self._runtime.record(event, self._stream)
        give_up_s = time.monotonic() + SUM_DEADLINE_S
        while not self._runtime.is_done(event):
            if time.monotonic() > give_up_s:
                raise CudaError(f"checksums took more than {SUM_DEADLINE_S} s")
            time.sleep(SUM_POLL_S)
        with contextlib.suppress(CudaError):
            self._runtime.end_event(event)
