"""What every runtime must do: for the fake in every run, for cupy where there is a GPU."""

from __future__ import annotations

import time

import numpy as np
import pytest
from kvbm_common.cuda import kernels
from kvbm_common.cuda.copies import Copies
from kvbm_common.cuda.device_sums import sums_are_right
from kvbm_common.cuda.runtime import Runtime
from kvbm_common.cuda.stream_end import StreamEnd

DEADLINE_S = 30.0
SIZE = 1 << 16


def wait_done(runtime: Runtime, stream: int) -> None:
    """Until all that is in the stream by now has happened."""
    event = runtime.event()
    runtime.record(event, stream)
    give_up_s = time.monotonic() + DEADLINE_S
    while not runtime.is_done(event):
        assert time.monotonic() < give_up_s, "the device does not come to an end"
    runtime.end_event(event)


def filled(runtime: Runtime, content: np.ndarray, stream: int) -> int:
    """Device memory with this content."""
    staging = runtime.pinned(content.nbytes)
    staging[:] = content.reshape(-1).view(np.uint8)
    address = runtime.allocate(content.nbytes)
    runtime.copy(address, staging.ctypes.data, content.nbytes, stream)
    wait_done(runtime, stream)
    return address


def read(runtime: Runtime, address: int, length: int, stream: int) -> np.ndarray:
    """What is in device memory."""
    staging = runtime.pinned(length)
    runtime.copy(staging.ctypes.data, address, length, stream)
    wait_done(runtime, stream)
    return staging.copy()


def noise(seed: int, size: int = SIZE) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 255, size, dtype=np.uint8)


class RuntimeContract:
    """Inherit it, and give a fixture `runtime`."""

    @pytest.fixture
    def stream(self, runtime: Runtime) -> int:
        runtime.use()
        return runtime.stream(urgent=True)

    def test_bytes_come_back(self, runtime: Runtime, stream: int) -> None:
        address = filled(runtime, noise(1), stream)
        assert np.array_equal(read(runtime, address, SIZE, stream), noise(1))
        runtime.free(address)

    def test_zeros_are_written_in_the_streams_order(self, runtime: Runtime, stream: int) -> None:
        """A copy, zeros over a part of it, and nothing beside that part."""
        address = filled(runtime, noise(2), stream)
        source = filled(runtime, noise(1), stream)
        runtime.copy(address, source, SIZE, stream)
        runtime.zero(address + 100, 1000, stream)
        expected = noise(1)
        expected[100:1100] = 0
        assert np.array_equal(read(runtime, address, SIZE, stream), expected)

    def test_a_stream_keeps_its_order(self, runtime: Runtime, stream: int) -> None:
        """A copy, and one that reads what it has written."""
        first, second = filled(runtime, noise(1), stream), filled(runtime, noise(2), stream)
        third = runtime.allocate(SIZE)
        runtime.copy(second, first, SIZE, stream)
        runtime.copy(third, second, SIZE, stream)
        assert np.array_equal(read(runtime, third, SIZE, stream), noise(1))

    def test_an_event_orders_two_streams(self, runtime: Runtime, stream: int) -> None:
        """The second stream reads what the first one writes, since it waits for its event."""
        first, second = filled(runtime, noise(1), stream), filled(runtime, noise(2), stream)
        other, event = runtime.stream(urgent=False), runtime.event()
        third = runtime.allocate(SIZE)
        runtime.copy(second, first, SIZE, stream)
        runtime.record(event, stream)
        runtime.wait(other, event)
        runtime.copy(third, second, SIZE, other)
        assert np.array_equal(read(runtime, third, SIZE, other), noise(1))

    def test_a_stream_comes_to_its_end(self, runtime: Runtime, stream: int) -> None:
        """Marked three times by one event: waited for, and watched by a thread, which ends it."""
        back = runtime.pinned(SIZE)
        address = filled(runtime, noise(1), stream)
        end = StreamEnd(runtime, stream)
        for expected in (noise(1), np.zeros(SIZE, np.uint8)):
            runtime.copy(back.ctypes.data, address, SIZE, stream)
            end.mark()
            assert end.wait()
            assert np.array_equal(back, expected)
            runtime.zero(address, SIZE, stream)
        end.mark()
        end.watch().result(DEADLINE_S)

    def test_waiting_for_what_was_never_recorded_is_no_wait(
        self, runtime: Runtime, stream: int
    ) -> None:
        runtime.wait(stream, runtime.event())
        wait_done(runtime, stream)

    @pytest.mark.parametrize("length", [1, 24, 4096, 8191])
    @pytest.mark.parametrize("shift", [0, 1, 8])
    def test_the_kernel_copies_rows(
        self, runtime: Runtime, stream: int, length: int, shift: int
    ) -> None:
        """From pinned host memory into device memory and back, rows in a mixed order."""
        host, back = runtime.pinned(SIZE), runtime.pinned(SIZE)
        host[:] = noise(3)
        back[:] = 0
        device = filled(runtime, np.zeros(SIZE, np.uint8), stream)
        places = np.arange(4) * 9000 + shift
        there = Copies.of(device + places[::-1], host.ctypes.data + places, length)
        here = Copies.of(back.ctypes.data + places, device + places[::-1], length)
        for copies in (there, here):
            table = filled(runtime, copies.rows, stream)
            runtime.copy_rows(table, copies.count, stream)
        wait_done(runtime, stream)
        expected = np.zeros(SIZE, np.uint8)
        for place in places.tolist():
            expected[place : place + length] = host[place : place + length]
        assert np.array_equal(back, expected)

    def test_a_batch_copies(self, runtime: Runtime, stream: int) -> None:
        host = runtime.pinned(SIZE)
        host[:] = noise(4)
        device = runtime.allocate(SIZE)
        half = SIZE // 2
        swapped = Copies.of([device + half, device], host.ctypes.data + np.array([0, half]), half)
        if not runtime.batches:
            pytest.skip("the driver has no cuMemcpyBatchAsync: it is of CUDA 12.8")
        runtime.copy_batch(swapped, stream)
        assert np.array_equal(read(runtime, device, SIZE, stream), np.roll(noise(4), half))

    @pytest.mark.parametrize("piece", [256, 1088, 65_536, 1 << 20])
    def test_parts_of_blocks_are_summed_where_they_lie(
        self, runtime: Runtime, stream: int, piece: int
    ) -> None:
        """Three layers of four blocks, in parts of two and of one; blocks 3 and 1 are asked for.
        Parts have no full KiB, some, many."""
        xxhash = pytest.importorskip("xxhash", reason="no xxhash to compare with")
        cache = noise(5, 3 * 4 * piece).reshape(3, 4, piece)
        device = filled(runtime, cache, stream)
        places = [device + i * 4 * piece for i in range(3)]
        offsets = [0, piece, 0]
        regions = np.array([[p, piece, piece, o] for p, o in zip(places, offsets, strict=True)])
        first, second = kernels.kibs_of(2 * piece), kernels.kibs_of(piece)
        parts = np.array([[0, 2, 2 * piece, 0], [2, 1, piece, first]])
        digests, kibs = runtime.allocate(32), first + second
        runtime.sum_parts(
            regions=filled(runtime, regions.astype(np.uint64), stream),
            parts=filled(runtime, parts.astype(np.uint64), stream), part_count=2, kibs=kibs,
            blocks=filled(runtime, np.array([3, 1], np.uint64), stream), block_count=2,
            scratch=runtime.allocate(2 * kernels.KIB_SUM_BYTES * max(1, kibs)),
            digests=digests, stream=stream,
        )  # fmt: skip
        found = read(runtime, digests, 32, stream).view(np.uint64).tolist()
        assert found == [
            xxhash.xxh3_64_intdigest(cache[layers, block].tobytes())
            for block in (3, 1)
            for layers in (slice(0, 2), slice(2, 3))
        ]

    def test_a_trial_of_the_sums_tells_that_they_are_right(self, runtime: Runtime) -> None:
        runtime.use()
        assert sums_are_right(runtime)

    def test_pinned_memory_is_copied(self, runtime: Runtime, stream: int) -> None:
        """Registered, used, given back, and registered again."""
        memory = np.zeros(SIZE + 4096, dtype=np.uint8)
        start = -memory.ctypes.data % 4096
        memory[start : start + SIZE] = noise(6)
        address = memory.ctypes.data + start
        for _ in range(2):
            runtime.register_host(address, SIZE, read_only=False)
            device = runtime.allocate(SIZE)
            runtime.copy(device, address, SIZE, stream)
            assert np.array_equal(read(runtime, device, SIZE, stream), noise(6))
            runtime.unregister_host(address)

    def test_an_address_belongs_to_an_allocation(self, runtime: Runtime) -> None:
        """What another process needs: the base, the size and a handle of 64 bytes."""
        runtime.use()
        address = runtime.allocate(SIZE)
        found = runtime.export(address + 4096)
        assert found.address <= address
        assert found.address + found.size >= address + SIZE
        assert len(found.handle) == 64
