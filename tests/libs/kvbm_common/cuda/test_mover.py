"""The device mover: order, deadlines and waves, on a runtime that keeps CUDA's order only."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from kvbm_common.cuda import measure as measure_module
from kvbm_common.cuda import mover as mover_module
from kvbm_common.cuda.copies import Copies
from kvbm_common.cuda.measure import PIECES_BYTES, Rate, choose, describe, measure
from kvbm_common.cuda.mover import WAVES_IN_FLIGHT, DeviceMover
from kvbm_common.cuda.pinning import Pinning
from kvbm_common.cuda.runtime import CudaError, CudaUnavailable
from kvbm_common.nixl.transfers import MoverClosed, TransferFailed, TransferTimeout

from tests.gpu.fake_runtime import FakeRuntime
from tests.waiting import wait_for

DEADLINE_S = 10.0
SIZE = 1 << 16


@pytest.fixture
def runtime() -> FakeRuntime:
    return FakeRuntime(seed=3)


@pytest.fixture
def memory() -> tuple[np.ndarray, np.ndarray]:
    """Host memory with bytes that are known, and device memory without."""
    host = np.random.default_rng(0).integers(1, 255, SIZE, dtype=np.uint8)
    return host, np.zeros(SIZE, dtype=np.uint8)


@pytest.fixture
def movers(runtime: FakeRuntime) -> Iterator[list[DeviceMover]]:
    made: list[DeviceMover] = []
    yield made
    for mover in made:
        mover.close(0.5)


def make(
    runtime: FakeRuntime, movers: list[DeviceMover], *, below: int = 2048,
    pinning: Pinning | None = None,
) -> DeviceMover:  # fmt: skip
    """A mover from the host to the device."""
    mover = DeviceMover(
        runtime, name="test", urgent=True, pinning=pinning, host_side=1, kernel_below=below
    )
    movers.append(mover)
    return mover


def pieces(host: np.ndarray, device: np.ndarray, length: int, count: int) -> Copies:
    """The first pieces of the host, in reversed order on the device."""
    places = np.arange(count) * length
    return Copies.of(device.ctypes.data + places[::-1], host.ctypes.data + places, length)


def names(runtime: FakeRuntime, *wanted: str) -> list[object]:
    return [call[0] for call in runtime.calls if call[0] in wanted]


@pytest.mark.parametrize("below", [0, 2048, 1 << 30], ids=["engine", "both", "kernel"])
@pytest.mark.parametrize("length", [1024, 4096])
def test_pieces_arrive(
    runtime: FakeRuntime, memory: tuple[np.ndarray, np.ndarray], movers: list[DeviceMover],
    below: int, length: int,
) -> None:  # fmt: skip
    """By whichever way: large pieces one by one, all small ones in one launch."""
    host, device = memory
    moved = make(runtime, movers, below=below).move(
        pieces(host, device, length, 8), deadline_s=DEADLINE_S
    )
    assert moved.result(DEADLINE_S).bytes == 8 * length
    expected = host[: 8 * length].reshape(8, length)[::-1].reshape(-1)
    assert np.array_equal(device[: 8 * length], expected)
    launches = names(runtime, "copy_rows")
    assert len(launches) == (1 if length < below else 0)
    assert len(names(runtime, "copy")) == (1 if launches else 0)
    assert len(names(runtime, "copy_batch")) == (0 if launches else 1)


@pytest.mark.slow
def test_many_jobs_do_not_mix(
    runtime: FakeRuntime, memory: tuple[np.ndarray, np.ndarray], movers: list[DeviceMover]
) -> None:
    """Goal: no table is written while an earlier launch reads it. More jobs than tables."""
    host, device = memory
    mover = make(runtime, movers)
    jobs = [
        mover.move(
            Copies.of(device.ctypes.data + at, host.ctypes.data + at, 512), deadline_s=DEADLINE_S
        )
        for at in range(0, SIZE, 512)
    ]
    for job in jobs:
        job.result(DEADLINE_S)
    assert np.array_equal(device, host)


def test_a_job_larger_than_a_table_goes_in_waves(
    runtime: FakeRuntime, memory: tuple[np.ndarray, np.ndarray], movers: list[DeviceMover],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Ten rows, tables of three: four launches, one end."""
    monkeypatch.setattr(mover_module, "TABLE_ROWS", 3)
    host, device = memory
    mover = make(runtime, movers)
    mover.move(pieces(host, device, 64, 10), deadline_s=DEADLINE_S).result(DEADLINE_S)
    assert np.array_equal(device[:640], host[:640].reshape(10, 64)[::-1].reshape(-1))
    assert len(names(runtime, "copy_rows")) == 4


@pytest.mark.parametrize("seed", range(5))
def test_an_onboard_waits_for_the_compute_before_it(
    memory: tuple[np.ndarray, np.ndarray], movers: list[DeviceMover], seed: int
) -> None:
    """A kernel that is still in the compute stream reads the old bytes of the blocks.

    The compute stream itself is never told to wait for us.
    """
    runtime = FakeRuntime(seed=seed, moves=False)
    host, device = memory
    seen = np.full(512, 9, dtype=np.uint8)
    compute, fence = runtime.stream(urgent=False), runtime.event()
    runtime.copy(seen.ctypes.data, device.ctypes.data, 512, compute)
    runtime.record(fence, compute)
    mover = make(runtime, movers)
    runtime.moves = True
    mover.move(
        Copies.of(device.ctypes.data, host.ctypes.data, 512), deadline_s=DEADLINE_S, after=[fence]
    ).result(DEADLINE_S)
    assert not seen.any()
    assert np.array_equal(device[:512], host[:512])
    assert all(call[1] != compute for call in runtime.calls if call[0] == "wait")
    assert ("end_event", fence) in runtime.calls


def test_what_is_not_pinned_is_the_engines(
    runtime: FakeRuntime, memory: tuple[np.ndarray, np.ndarray], movers: list[DeviceMover]
) -> None:
    """The first slice is pinned, the second is not; a piece across the border is cut there."""
    host, device = memory
    runtime.pinnable_bytes = 4096
    pinning = Pinning(runtime, host.ctypes.data, SIZE, slice_bytes=4096, thread_count=1)
    pinning.start().result(DEADLINE_S)
    mover = make(runtime, movers, pinning=pinning)
    copies = Copies.of(device.ctypes.data, host.ctypes.data + 3584, 1024)
    mover.move(copies, deadline_s=DEADLINE_S).result(DEADLINE_S)
    assert np.array_equal(device[:1024], host[3584:4608])
    [launch] = [call for call in runtime.calls if call[0] == "copy_rows"]
    assert launch[2] == 1
    direct = [call for call in runtime.calls if call[0] == "copy" and call[3] == 512]
    assert [call[2] for call in direct] == [host.ctypes.data + 4096]


def test_no_kernel_where_it_cannot_reach_the_host(
    memory: tuple[np.ndarray, np.ndarray], movers: list[DeviceMover]
) -> None:
    host, device = memory
    runtime = FakeRuntime(kernels_reach_host=False)
    make(runtime, movers).move(
        pieces(host, device, 64, 4), deadline_s=DEADLINE_S
    ).result(DEADLINE_S)  # fmt: skip
    assert names(runtime, "copy_rows") == []


def test_a_late_copy_is_not_settled_before_it_ends(
    memory: tuple[np.ndarray, np.ndarray], movers: list[DeviceMover]
) -> None:
    """The device stands still: the caller hears of it at the deadline, and of the end later."""
    host, device = memory
    runtime = FakeRuntime(moves=False)
    mover = make(runtime, movers)
    late = mover.move(pieces(host, device, 64, 4), deadline_s=0.01)
    with pytest.raises(TransferTimeout) as raised:
        late.result(DEADLINE_S)
    assert not raised.value.settled
    assert not device.any()
    runtime.moves = True
    assert raised.value.settling is not None
    raised.value.settling.result(DEADLINE_S)
    assert device[:256].all()


def test_what_waits_behind_a_device_that_stands_still_is_late_too(
    memory: tuple[np.ndarray, np.ndarray], movers: list[DeviceMover]
) -> None:
    """More jobs than may be in flight: each is told at its deadline, and those that have not begun
    are settled then. Their bytes never come."""
    host, device = memory
    runtime = FakeRuntime(moves=False)
    mover = make(runtime, movers)
    in_flight = [mover.move(pieces(host, device, 64, 1), deadline_s=DEADLINE_S)
              for _ in range(WAVES_IN_FLIGHT)]  # fmt: skip
    wait_for(in_flight[-1].running)
    late = [mover.move(pieces(host, device, 64, 4), deadline_s=0.01) for _ in range(3)]
    for job in late:
        with pytest.raises(TransferTimeout, match="in the queue") as raised:
            job.result(DEADLINE_S)
        assert raised.value.settling is not None
        raised.value.settling.result(DEADLINE_S)
    runtime.moves = True
    for job in in_flight:
        job.result(DEADLINE_S)
    assert not device[64:].any()


def test_a_call_that_fails_fails_the_job(
    memory: tuple[np.ndarray, np.ndarray], movers: list[DeviceMover]
) -> None:
    """… and no other one."""

    class Refuses(FakeRuntime):
        refuses = True

        def copy_rows(self, table: int, count: int, stream: int) -> None:
            if self.refuses:
                raise CudaError("cudaErrorLaunchFailure")
            super().copy_rows(table, count, stream)

    host, device = memory
    runtime = Refuses()
    mover = make(runtime, movers)
    with pytest.raises(TransferFailed, match="LaunchFailure"):
        mover.move(pieces(host, device, 64, 4), deadline_s=DEADLINE_S).result(DEADLINE_S)
    runtime.refuses = False
    mover.move(pieces(host, device, 64, 4), deadline_s=DEADLINE_S).result(DEADLINE_S)
    assert device[:256].all()


def test_a_job_that_cannot_be_divided_is_the_only_one_that_fails(
    runtime: FakeRuntime, memory: tuple[np.ndarray, np.ndarray], movers: list[DeviceMover]
) -> None:
    """Host memory before the pinned range: its caller hears of it, the next job is copied."""
    host, device = memory
    pinning = Pinning(runtime, host.ctypes.data + 8192, SIZE - 8192, slice_bytes=8192)
    mover = make(runtime, movers, pinning=pinning)
    copies = pieces(host, device, 1024, 1)
    with pytest.raises(TransferFailed, match="before the base"):
        mover.move(copies, deadline_s=DEADLINE_S).result(DEADLINE_S)
    inside = Copies(copies.rows + np.array([0, 8192, 0], dtype=np.uint64))
    assert mover.move(inside, deadline_s=DEADLINE_S).result(DEADLINE_S).bytes == 1024
    assert np.array_equal(device[:1024], host[8192 : 8192 + 1024])


def test_a_closed_mover_says_so(
    memory: tuple[np.ndarray, np.ndarray], movers: list[DeviceMover]
) -> None:
    """What is in flight, what waits, and what comes after the end."""
    host, device = memory
    runtime = FakeRuntime(moves=False)
    mover = make(runtime, movers)
    jobs = [mover.move(pieces(host, device, 64, 4), deadline_s=DEADLINE_S) for _ in range(9)]
    over = mover.close(0.05)
    fence = runtime.event()
    late = mover.move(pieces(host, device, 64, 4), deadline_s=DEADLINE_S, after=[fence])
    assert ("end_event", fence) in runtime.calls
    jobs.append(late)
    for job in jobs:
        with pytest.raises(MoverClosed):
            job.result(DEADLINE_S)
    runtime.moves = True
    over.result(DEADLINE_S)


def test_what_outlives_a_close_lands_and_is_settled(
    memory: tuple[np.ndarray, np.ndarray], movers: list[DeviceMover]
) -> None:
    """Until then its table is kept, and the close is not over."""
    host, device = memory
    runtime = FakeRuntime(moves=False)
    mover = make(runtime, movers)
    moved = mover.move(pieces(host, device, 64, 4), deadline_s=DEADLINE_S)
    wait_for(moved.running)
    over = mover.close(0.01)
    with pytest.raises(MoverClosed) as raised:
        moved.result(DEADLINE_S)
    assert (raised.value.settled, over.done(), names(runtime, "free")) == (False, False, [])
    runtime.moves = True
    assert raised.value.settling is not None
    raised.value.settling.result(DEADLINE_S)
    assert device[:256].all()
    over.result(DEADLINE_S)
    assert runtime.memory == {}


def test_a_copy_whose_end_cannot_be_recorded_has_not_ended(
    memory: tuple[np.ndarray, np.ndarray], movers: list[DeviceMover]
) -> None:
    """CUDA takes no event for a moment: it is asked again."""

    class Refuses(FakeRuntime):
        refuses = True

        def record(self, event: int, stream: int) -> None:
            if self.refuses:
                self.calls.append(("refused", event))
                raise CudaError("cudaErrorMemoryAllocation: out of memory")
            super().record(event, stream)

    host, device = memory
    runtime = Refuses(moves=False)
    mover = make(runtime, movers)
    moved = mover.move(pieces(host, device, 64, 4), deadline_s=DEADLINE_S)
    wait_for(lambda: len(names(runtime, "refused")) > 1 or moved.done())
    assert not moved.done()
    runtime.moves, runtime.refuses = True, False
    assert moved.result(DEADLINE_S).bytes == 256
    assert device[:256].all()


def test_the_engine_is_chosen_where_it_stays_fast_enough() -> None:
    """One lucky small size does not count. A load must not wait twice as long for the engine; an
    offload may take four times as long."""
    rates = [
        Rate("h2d", 1024, engine=9, kernel=8),
        Rate("h2d", 4096, engine=4, kernel=9),
        Rate("h2d", 65_536, engine=20, kernel=10),
        Rate("h2d", 16_384, engine=5, kernel=10),
        Rate("d2h", 1024, engine=1, kernel=4),
        Rate("d2h", 4096, engine=3, kernel=12),
    ]
    assert choose(rates, "h2d") == 16_384
    assert choose(rates, "d2h") == 1024
    assert choose([Rate("d2h", 4096, engine=1, kernel=5)], "d2h") == 4097
    assert choose([], "d2h") == 0


def test_measuring_takes_every_size_both_ways() -> None:
    """On the fake the figures mean nothing; that all of them are there, does."""
    runtime = FakeRuntime()
    rates = measure(runtime, moved_bytes=1 << 20)
    assert [(r.direction, r.piece_bytes) for r in rates] == [
        (direction, size) for direction in ("d2h", "h2d") for size in PIECES_BYTES
    ]
    assert all(rate.engine > 0 and rate.kernel > 0 for rate in rates)
    assert runtime.memory == {}


def test_batches_that_do_not_work_are_not_used() -> None:
    """A driver that copies something else, and one that refuses: rows one by one, then."""

    class Wrong(FakeRuntime):
        def copy_batch(self, copies: Copies, stream: int) -> None:
            super().copy_batch(Copies(copies.rows[:1]), stream)

    class Refusing(FakeRuntime):
        def copy_batch(self, copies: Copies, stream: int) -> None:
            raise CudaError("cuMemcpyBatchAsync: error 1")

    for runtime in (Wrong(), Refusing()):
        measure(runtime, moved_bytes=1 << 20)
        assert not runtime.batches


def test_the_doctor_sees_every_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that works, and one that cupy does not know."""

    def runtime(device: int) -> FakeRuntime:
        if device == 1:
            raise CudaUnavailable("there is no device 1: there are 1")
        return FakeRuntime()

    monkeypatch.setattr(measure_module, "CupyRuntime", runtime)
    monkeypatch.setattr(
        measure_module, "measure", lambda _: [Rate("d2h", 4096, 9, 8), Rate("h2d", 4096, 3, 8)]
    )
    lines, error = measure_module.look(2)
    assert lines == (
        "0000:00:00.0: d2h 9 GB/s, by a kernel below 4 KiB a piece; "
        "h2d 8 GB/s, by a kernel below 4 KiB a piece",
    )
    assert error == "there is no device 1: there are 1"
    assert describe([]) == (
        "d2h 0 GB/s, by a kernel below 0 KiB a piece; h2d 0 GB/s, by a kernel below 0 KiB a piece"
    )
