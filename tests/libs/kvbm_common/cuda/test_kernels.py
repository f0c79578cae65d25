"""Kernels: what a thread does, compiled for this processor; and the whole, by CUDA's compilers."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from kvbm_common.checksum import block_checksum
from kvbm_common.cuda import kernels
from kvbm_common.cuda.device_sums import PlainRegion, tables_of

COMPILER = shutil.which("g++") or shutil.which("clang++")
NVCC = shutil.which("nvcc")
COMPILE_S = 60

ENTRIES = r"""
extern "C" void copy(const u64* rows, u32 count, u32 lanes) {
    for (u32 row = 0; row < count; ++row)
        for (u32 lane = 0; lane < lanes; ++lane)
            copy_row(rows[3 * row], rows[3 * row + 1], rows[3 * row + 2], lane, lanes);
}
extern "C" u64 digest(const u64* regions, u32 region_count, u64 block, u64 bytes) {
    Pieces pieces = {regions, region_count, block};
    u64 sums[8];
    for (u32 lane = 0; lane < 8; ++lane) {
        Keys keys = keys_of(lane);
        u64 scramble = secret_at(128 + 8 * lane);
        sums[lane] = first_sum(lane);
        for (u64 kib = 0; kib < kibs_of(bytes); ++kib)
            sums[lane] = scrambled(sums[lane] + kib_sum(pieces, kib, 16, lane, keys), scramble);
        sums[lane] += rest_sum(pieces, bytes, lane, keys);
    }
    return digest_of(sums, bytes);
}
"""

CUDA_HERE = r"""
#include <pthread.h>
#include <thread>
#include <vector>
#define __CUDACC__ 1
#define __device__
#define __constant__
#define __global__
#define __forceinline__ inline
#define __shared__ static
struct uint4 { unsigned x, y, z, w; };
struct Index { unsigned x; };
static thread_local Index threadIdx, blockIdx;
static Index gridDim, blockDim;
static pthread_barrier_t barrier;
static void __syncthreads() { pthread_barrier_wait(&barrier); }
static unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)(((unsigned __int128)a * b) >> 64);
}
template <typename Kernel> static void launch(unsigned grid, unsigned threads, Kernel kernel) {
    gridDim.x = grid; blockDim.x = threads;
    for (unsigned block = 0; block < grid; ++block) {
        pthread_barrier_init(&barrier, nullptr, threads);
        std::vector<std::thread> running;
        for (unsigned thread = 0; thread < threads; ++thread)
            running.emplace_back([=] { blockIdx.x = block; threadIdx.x = thread; kernel(); });
        for (auto& one : running) one.join();
        pthread_barrier_destroy(&barrier);
    }
}
"""
"""As much of CUDA as the kernels need: a thread for each of theirs, one block after the other."""
LAUNCHES = r"""
extern "C" void copy_rows(unsigned grid, unsigned threads, const u64* rows, u32 count) {
    launch(grid, threads, [=] { kvbm_copy_rows(rows, count); });
}
extern "C" void sum_parts(unsigned grid, unsigned threads, unsigned chain_threads,
                          const u64* regions, const u64* parts, u32 part_count, u32 kibs,
                          const u64* blocks, u32 block_count, u64* scratch, u64* digests) {
    launch(grid, threads, [=] {
        kvbm_sum_kibs(regions, parts, part_count, kibs, blocks, block_count, scratch); });
    launch(block_count * part_count, chain_threads, [=] {
        kvbm_sum_parts(regions, parts, part_count, kibs, blocks, scratch, digests); });
}
"""


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The kernels themselves, with threads of this processor for the GPU's."""
    if COMPILER is None:
        pytest.skip("no C++ compiler")
    directory = tmp_path_factory.mktemp("launched")
    source, library = directory / "launched.cpp", directory / "launched.so"
    source.write_text(CUDA_HERE + kernels.SOURCE + LAUNCHES)
    command = [COMPILER, "-O1", "-w", "-std=c++17", "-shared", "-fPIC", "-pthread",
               "-o", str(library), str(source)]  # fmt: skip
    subprocess.run(command, check=True, timeout=COMPILE_S)
    return ctypes.CDLL(str(library))


def pointer(numbers: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(numbers.ctypes.data)


@pytest.mark.parametrize("count", [1, 7, 64])
def test_a_launch_copies_every_row(launched: ctypes.CDLL, count: int) -> None:
    """Fewer rows than warps, and more."""
    length = 1000
    source = np.random.default_rng(3).integers(1, 255, count * length, dtype=np.uint8)
    target = np.zeros_like(source)
    places = np.arange(count) * length
    rows = np.stack([target.ctypes.data + places[::-1], source.ctypes.data + places,
                     np.full(count, length)], axis=1).astype(np.uint64)  # fmt: skip
    launched.copy_rows(2, 256, pointer(rows), count)
    assert np.array_equal(target.reshape(count, -1), source.reshape(count, -1)[::-1])


@pytest.mark.parametrize("grid", [1, 3])
@pytest.mark.parametrize(
    "sizes",
    [
        ((256,),),
        ((1024,), (64, 1024)),
        ((256,), (3 * 1024 + 64, 128 * 1024), (64, 64, 64, 64), (130 * 1024,)),
    ],
)
def test_launches_sum_up_all_parts_of_all_blocks(
    launched: ctypes.CDLL, sizes: tuple[tuple[int, ...], ...], grid: int
) -> None:
    """By the very kernels and the tables of `DeviceSums`: parts of no KiB, of some, of more than
    a tile."""
    blocks, random = 3, np.random.default_rng(4)
    memory = [
        [random.integers(0, 255, (blocks, size), np.uint8) for size in part] for part in sizes
    ]
    places = [[region_of(pieces) for pieces in part] for part in memory]
    regions, parts, kibs = tables_of(places)
    wanted = np.array([2, 0], dtype=np.uint64)
    scratch = np.zeros((len(wanted) * max(1, kibs), 8), dtype=np.uint64)
    digests = np.zeros((len(wanted), len(sizes)), dtype=np.uint64)
    launched.sum_parts(
        grid, kernels.SUM_THREADS, kernels.CHAIN_THREADS, pointer(regions), pointer(parts),
        len(parts), kibs, pointer(wanted), len(wanted), pointer(scratch), pointer(digests),
    )  # fmt: skip
    assert digests.tolist() == [
        [block_checksum(b"".join(piece[block].tobytes() for piece in part)) for part in memory]
        for block in (2, 0)
    ]


def region_of(pieces: np.ndarray) -> PlainRegion:
    """A region of pieces that are in this memory."""
    blocks, piece_bytes = pieces.shape
    return PlainRegion(pieces.ctypes.data, piece_bytes, piece_bytes, blocks)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The functions of the kernels, for this processor."""
    if COMPILER is None:
        pytest.skip("no C++ compiler")
    directory = tmp_path_factory.mktemp("kernels")
    source, library = directory / "host.cpp", directory / "host.so"
    source.write_text(kernels.SOURCE + ENTRIES)
    command = [COMPILER, "-O1", "-shared", "-fPIC", "-fsanitize=alignment",
               "-fsanitize-undefined-trap-on-error", "-o", str(library), str(source)]  # fmt: skip
    subprocess.run(command, check=True, timeout=COMPILE_S)
    loaded = ctypes.CDLL(str(library))
    loaded.digest.restype = ctypes.c_uint64
    return loaded


@pytest.mark.parametrize("source_shift", [0, 1, 4, 8])
@pytest.mark.parametrize("target_shift", [0, 2, 4, 8])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 4096, 8191, 8192])
def test_a_row_is_copied(
    host: ctypes.CDLL, source_shift: int, target_shift: int, length: int
) -> None:
    """Any alignment, any length: these bytes, and none beside them."""
    source = np.random.default_rng(0).integers(1, 255, 8300, dtype=np.uint8)
    target = np.zeros(8300, dtype=np.uint8)
    row = [target.ctypes.data + target_shift, source.ctypes.data + source_shift, length]
    rows = np.array([row], dtype=np.uint64)
    host.copy(ctypes.c_void_p(rows.ctypes.data), 1, 32)
    moved = target[target_shift : target_shift + length]
    assert np.array_equal(moved, source[source_shift : source_shift + length])
    assert np.count_nonzero(target) == length


@pytest.mark.parametrize("pieces", [1, 3, 64])
@pytest.mark.parametrize("piece_bytes", [256, 1024, 1088, 4096, 65_536])
def test_a_digest_is_xxh3(host: ctypes.CDLL, pieces: int, piece_bytes: int) -> None:
    """Of a block whose pieces lie apart, beside the library's digest of the same bytes."""
    blocks = 2
    memory = np.random.default_rng(1).integers(0, 255, (pieces, blocks, piece_bytes), np.uint8)
    regions = np.array(
        [[memory[i].ctypes.data, piece_bytes, piece_bytes, i * piece_bytes] for i in range(pieces)],
        dtype=np.uint64,
    )
    block_bytes = pieces * piece_bytes
    assert block_bytes >= kernels.SUM_BLOCK_BYTES_MIN
    for block in range(blocks):
        found = host.digest(
            ctypes.c_void_p(regions.ctypes.data), pieces, ctypes.c_uint64(block),
            ctypes.c_uint64(block_bytes),
        )  # fmt: skip
        assert found == block_checksum(memory[:, block].tobytes())


@pytest.mark.slow
@pytest.mark.skipif(NVCC is None, reason="no nvcc")
@pytest.mark.parametrize("architecture", ["compute_75", "compute_90"])
def test_nvcc_compiles_the_kernels(tmp_path: Path, architecture: str) -> None:
    """To PTX, which needs no GPU; every warning is an error."""
    source, output = tmp_path / "kernels.cu", tmp_path / "kernels.ptx"
    source.write_text(kernels.SOURCE)
    command = [str(NVCC), "-ptx", f"-arch={architecture}", "-Werror", "all-warnings",
               "-o", str(output), str(source)]  # fmt: skip
    subprocess.run(command, check=True, timeout=COMPILE_S)
    for name in (kernels.COPY_ROWS, kernels.SUM_KIBS, kernels.SUM_PARTS):
        assert f".entry {name}(" in output.read_text()


@pytest.mark.parametrize("architecture", ["compute_75", "compute_90"])
def test_nvrtc_compiles_the_kernels(architecture: str) -> None:
    """By the library that cupy uses."""
    nvrtc = pytest.importorskip("cupy_backends.cuda.libs.nvrtc", reason="no cupy")
    program = nvrtc.createProgram(kernels.SOURCE, "kernels.cu", (), ())
    nvrtc.compileProgram(program, (f"-arch={architecture}", "-std=c++14"))
    compiled = nvrtc.getPTX(program)
    for name in (kernels.COPY_ROWS, kernels.SUM_KIBS, kernels.SUM_PARTS):
        assert f".entry {name}(".encode() in compiled
