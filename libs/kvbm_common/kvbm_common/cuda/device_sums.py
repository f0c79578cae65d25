"""Device sums: checksums of blocks where they lie in a GPU's memory, by kernels.

The kernels are in `kernels.py`, their tables are made here, and `sums_are_right` tries them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock

import numpy as np

from kvbm_common.cuda import kernels
from kvbm_common.cuda.copies import Lent
from kvbm_common.cuda.runtime import CudaError, Runtime
from kvbm_common.cuda.stream_end import WAIT_DEADLINE_S, StreamEnd

SUM_BLOCKS_MAX = 4096
"""Blocks of one launch: more than any chunk has."""
SCRATCH_BYTES = 4 << 20
"""Memory of a launch, unless one block needs more: enough for 64 MiB of blocks."""


class DeviceSums:
    """xxh3-64 of blocks where they lie in device memory, by kernels on a stream of its own.

    One call of the runtime sums up all parts of all blocks: a launch for each part would take
    longer than the copy.
    """

    def __init__(self, runtime: Runtime, parts: Sequence[Sequence[Lent]]) -> None:
        assert all(self.fits(regions) for regions in parts)
        self._runtime = runtime
        self._lock = Lock()
        self._is_set_up = False
        self._is_in_use = False
        """The stream may still read or write the staging buffer: a call has given it up."""
        self._regions_table, self._parts_table, self._kibs = tables_of(parts)
        self._part_count = len(parts)
        per_block = kernels.KIB_SUM_BYTES * max(1, self._kibs)
        self._scratch_bytes = max(SCRATCH_BYTES, per_block)
        self._blocks_max = min(SUM_BLOCKS_MAX, self._scratch_bytes // per_block)

    def _set_up(self) -> None:
        """Allocate stream and tables with the first blocks, in the thread that asks for them."""
        runtime, regions, parts = self._runtime, self._regions_table, self._parts_table
        digest_bytes = 8 * self._blocks_max * self._part_count
        self._stream = runtime.stream(urgent=True)
        self._end = StreamEnd(runtime, self._stream)
        self._staging = runtime.pinned(
            max(regions.nbytes, parts.nbytes, digest_bytes, 8 * self._blocks_max)
        )
        self._regions = runtime.allocate(regions.nbytes)
        self._parts = runtime.allocate(parts.nbytes)
        self._blocks = runtime.allocate(8 * self._blocks_max)
        self._digests = runtime.allocate(digest_bytes)
        self._scratch = runtime.allocate(self._scratch_bytes)
        for target, table in ((self._regions, regions), (self._parts, parts)):
            self._upload(target, table.reshape(-1))
            self._wait()
        self._is_set_up = True

    @staticmethod
    def fits(regions: Sequence[Lent]) -> bool:
        """Return whether no stripe of the checksum is in two pieces, and every word is aligned."""
        step = kernels.SUM_PIECE_BYTES
        return sum(r.piece_bytes for r in regions) >= kernels.SUM_BLOCK_BYTES_MIN and all(
            r.piece_bytes % step == 0 and r.address % 8 == 0 and r.stride % 8 == 0 for r in regions
        )

    def __call__(self, blocks: Sequence[int]) -> list[int]:
        """Return the checksums of all parts of these blocks, block after block. Raises CudaError.

        It waits for the GPU and makes it the thread's device: call it in a thread of KVBM's.
        """
        with self._lock:
            self._runtime.enter()
            if not self._is_set_up:
                self._set_up()
            if self._is_in_use:
                self._wait()
            found: list[int] = []
            for start in range(0, len(blocks), self._blocks_max):
                found += self._sums(blocks[start : start + self._blocks_max])
            return found

    def close(self) -> None:
        """Give the GPU's memory back; no sums are under way. Raises CudaError."""
        with self._lock:
            if not self._is_set_up:
                return
            tables = (self._regions, self._parts, self._blocks, self._digests, self._scratch)
            for address in tables:
                self._runtime.free(address)
            self._end.close()
            self._runtime.end_stream(self._stream)
            self._is_set_up = False

    def _sums(self, blocks: Sequence[int]) -> list[int]:
        self._upload(self._blocks, np.array(blocks, dtype=np.uint64))
        self._runtime.sum_parts(
            regions=self._regions, parts=self._parts, part_count=self._part_count,
            kibs=self._kibs, blocks=self._blocks, block_count=len(blocks), scratch=self._scratch,
            digests=self._digests, stream=self._stream,
        )  # fmt: skip
        staging, size = self._staging, 8 * len(blocks) * self._part_count
        self._runtime.copy(staging.ctypes.data, self._digests, size, self._stream)
        self._wait()
        found: list[int] = staging[:size].view(np.uint64).tolist()
        return found

    def _upload(self, target: int, numbers: np.ndarray) -> None:
        self._is_in_use = True
        self._staging[: numbers.nbytes].view(np.uint64)[:] = numbers
        self._runtime.copy(target, self._staging.ctypes.data, numbers.nbytes, self._stream)

    def _wait(self) -> None:
        self._end.mark()
        if not self._end.wait():
            raise CudaError(f"the GPU has not come to the sums in {WAIT_DEADLINE_S} s")
        self._is_in_use = False


def tables_of(parts: Sequence[Sequence[Lent]]) -> tuple[np.ndarray, np.ndarray, int]:
    """Return the kernels' tables and the full KiBs of a block.

    Regions, part by part: address, stride, bytes, offset in the part. Parts: the first region, the
    number of regions, bytes, KiBs of the parts before.
    """
    regions: list[tuple[int, int, int, int]] = []
    rows: list[tuple[int, int, int, int]] = []
    kibs = 0
    for part in parts:
        first, size = len(regions), 0
        for region in part:
            regions.append((region.address, region.stride, region.piece_bytes, size))
            size += region.piece_bytes
        rows.append((first, len(part), size, kibs))
        kibs += kernels.kibs_of(size)
    return np.array(regions, dtype=np.uint64), np.array(rows, dtype=np.uint64), kibs


@dataclass(frozen=True, slots=True)
class PlainRegion:
    """As `wire.local.Region`, which needs msgspec."""

    address: int
    stride: int
    piece_bytes: int
    blocks: int


def sums_are_right(runtime: Runtime) -> bool:
    """Try the kernels on two blocks of two parts, beside the library's checksums.

    Call it in a thread of ours, whose device is the runtime's. Raises CudaError.
    """
    from kvbm_common.checksum import block_checksum  # xxhash: not for a benchmark.

    sizes = ((1024, 5 * 1024 + 64), (256,))
    lengths = np.array([length for part in sizes for length in part])
    places = np.cumsum(2 * lengths) - 2 * lengths
    host = runtime.pinned(int(2 * lengths.sum()))
    host[:] = np.random.default_rng(0).integers(0, 255, len(host), dtype=np.uint8)
    device = runtime.allocate(len(host))
    regions = iter(
        PlainRegion(device + int(place), int(length), int(length), 2)
        for place, length in zip(places, lengths, strict=True)
    )
    parts = [[next(regions) for _ in part] for part in sizes]
    stream = runtime.stream(urgent=False)
    try:
        end = StreamEnd(runtime, stream)
        runtime.copy(device, host.ctypes.data, len(host), stream)
        end.mark()
        if not end.wait():
            raise CudaError(f"a copy has not ended in {WAIT_DEADLINE_S} s")
        end.close()
        sums = DeviceSums(runtime, parts)
        found = sums([1, 0])
        sums.close()
    finally:
        runtime.end_stream(stream)
        runtime.free(device)
    expected = [
        block_checksum(
            b"".join(
                host[r.address - device + block * r.stride :][: r.piece_bytes].tobytes()
                for r in part
            )
        )
        for block in (1, 0)
        for part in parts
    ]
    return found == expected
