"""The worker side of vLLM's connector, without vLLM: its tensors are arrays."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
from kvbm_common.checksum import block_checksum, pack_sums
from kvbm_common.copying.rank_pieces import RankPieces
from kvbm_common.cuda.lending import unwrap
from kvbm_common.cuda.reading import Gpu, SumsOfBlocks
from kvbm_common.cuda.runtime import CudaUnavailable
from kvbm_common.memory.arena import Arena
from kvbm_common.nixl.mover_thread import MoverThread, TransferFailed
from kvbm_common.nixl.spans import Registration
from kvbm_common.tier.parts import Grid, Share
from kvbm_common.wire.local import Hello
from kvbm_connectors.client.tensors import UnknownLayout
from kvbm_connectors.core.messages import Load, LoadResult
from kvbm_connectors.vllm.namespace import Life
from kvbm_connectors.vllm.options import Options
from kvbm_connectors.vllm.plan import StepPlan, StepReport
from kvbm_connectors.vllm.shape import Shape
from kvbm_connectors.vllm.worker_side import WorkerSide

from tests.connectors.endpoints import host_tier, welcome
from tests.connectors.helpers import NAMESPACE, name
from tests.gpu.fake_runtime import FakeRuntime
from tests.waiting import wait_for

pytestmark = pytest.mark.usefixtures("small_measurements")
BLOCKS, BLOCK_BYTES = 4, 4096


class Tensor:
    """Some memory, as torch shows it."""

    def __init__(self, *block: int) -> None:
        """Blocks of this shape."""
        self.memory = np.zeros((BLOCKS, *(block or (BLOCK_BYTES,))), dtype=np.uint8)
        self.shape: Sequence[int] = self.memory.shape

    def stride(self) -> Sequence[int]:
        return self.memory.strides

    def element_size(self) -> int:
        return 1

    def data_ptr(self) -> int:
        return self.memory.ctypes.data


@pytest.mark.parametrize(
    "failures", [[TransferFailed("no descriptors"), TimeoutError()], [TimeoutError()]]
)
def test_memory_that_cannot_be_lent_is_lent_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: list[Exception]
) -> None:
    """1. NIXL refuses the KV tensors, or does not answer: loads fail at once, nobody is stopped.
    2. It takes them a while later: the worker introduces itself, without a restart.
    """
    left = list(failures)
    register = MoverThread.register_memory

    def fails_at_first(mover: MoverThread, address: int, length: int) -> Future[Registration]:
        if not left:
            return register(mover, address, length)
        failed: Future[Registration] = Future()
        failed.set_exception(left.pop())
        return failed

    monkeypatch.setattr(MoverThread, "register_memory", fails_at_first)
    monkeypatch.setattr("kvbm_connectors.vllm.worker_side.LEND_AGAIN_S", 0.3)
    options = Options.read({"host_tier_endpoint": f"ipc://{tmp_path}/host.sock"}, {})
    side = WorkerSide(Life("ada", f"{1:016x}", 0), NAMESPACE, options)
    with host_tier(options.settings.host_tier_endpoint) as host:
        tensor = Tensor()
        side.register([[tensor]], BLOCKS)
        assert side.counts() == {"lend_failures": 1}
        load = Load("r", 7, 5, (0,), (2,), (name(1),), (bytes(8),), BLOCK_BYTES, 2**60)
        side.start(StepPlan((load,)))
        assert (side.arrived(), side.bad_blocks()) == ({"r"}, {2})
        hello = host.hear(Hello)
        assert [region.address for region in hello.regions] == [tensor.data_ptr()]
        wait_for(lambda: side.counts()["lend_failures"] == len(failures))
        side.close()


class Landing:
    """A worker half whose only load lands when it is told to, perhaps after its end."""

    def __init__(self) -> None:
        self.loading = 0
        self._ended: list[LoadResult] = []

    def start_load(self, _load: Load) -> None:
        self.loading = 1

    def land(self, load: Load) -> None:
        self._ended.append(LoadResult(load, (False,) * len(load.blocks), (), "closed"))
        self.loading = 0

    def drain_ended(self) -> list[LoadResult]:
        ended, self._ended = self._ended, []
        return ended

    def start(self) -> None: ...
    def expect_reads(self, *, expected: bool) -> None: ...
    def close(self) -> None: ...


def test_a_load_that_lands_after_the_memory_was_taken_back_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Goal: a request of an engine that sleeps and wakes does not wait without end."""
    half = Landing()
    monkeypatch.setattr("kvbm_connectors.vllm.worker_side.WorkerHalf", lambda **_: half)
    side = WorkerSide(Life("ada", f"{1:016x}", 0), NAMESPACE, Options.read({}, {}))
    side.register([[Tensor()]], BLOCKS)
    load = Load("r", 7, 5, (0,), (2,), (name(1),), (bytes(8),), BLOCK_BYTES, 2**60)
    side.start(StepPlan((load,)))
    side.park()
    assert (side.arrived(), side.bad_blocks()) == (set(), set())
    half.land(load)
    assert (side.arrived(), side.bad_blocks()) == ({"r"}, {2})
    assert (side.arrived(), side.report()) == (
        set(),
        StepReport((LoadResult(load, (False,), (), "closed"),)),
    )


def test_the_reason_of_a_worker_that_lends_nothing_is_reported_once() -> None:
    """Goal: the scheduler half hears it, beside loads or without any, from whichever rank."""
    side = WorkerSide(Life("ada", f"{1:016x}", 0), NAMESPACE, Options.read({}, {}))
    assert side.report() is None
    side.pass_through("KV tensors on xpu are not lent")
    report = side.report()
    assert report == StepReport((), "KV tensors on xpu are not lent")
    assert side.report() is None
    load = Load("r", 7, 5, (0,), (2,), (name(1),), (b"",), BLOCK_BYTES, 2**60)
    ended = StepReport((LoadResult(load, (True,)),))
    assert ended.joined(report) == StepReport(ended.results, report.passes_through)
    side.close()


def test_a_rank_says_which_parts_it_holds(tmp_path: Path) -> None:
    """Goal: its regions are in the order of layers and heads, and nothing else is lent.

    1. Layers without its heads, or of other sizes, are refused. 2. The right ones are lent.
    """
    grid = Grid(ranges=1, layers=1, heads=4)
    shares = tuple(Share(grid, 0, 1, rank * 2, rank * 2 + 2) for rank in range(2))
    shape = Shape(grid, shares, 2, 1, 1, BLOCK_BYTES)
    options = Options.read({"host_tier_endpoint": f"ipc://{tmp_path}/host.sock"}, {})
    life = Life("ada", f"{1:016x}", 0)
    side = WorkerSide(life, NAMESPACE, options, rank=1, world_size=2, shape=shape)
    tensor = Tensor()
    with pytest.raises(UnknownLayout, match="heads outside of tokens"):
        side.register([[tensor]], BLOCKS)
    tensor, small = (Tensor(2, size) for size in (BLOCK_BYTES // 2, BLOCK_BYTES // 4))
    with pytest.raises(UnknownLayout, match="another size"):
        side.register([[small]], BLOCKS)
    with host_tier(options.settings.host_tier_endpoint) as host:
        side.register([[tensor]], BLOCKS)
        hello = host.hear(Hello)
        assert (hello.rank, hello.share) == (1, shares[1])
        side.close()


def test_tensors_on_a_gpu_are_lent_with_their_handles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. cupy is not there at first: the engine computes. 2. It is: the worker introduces itself
    with CUDA's handles, and verifies on the device."""
    monkeypatch.setattr("kvbm_connectors.vllm.worker_side.LEND_AGAIN_S", 0.1)
    tensor, runtime = Tensor(), FakeRuntime()
    runtime.memory[tensor.data_ptr()] = tensor.memory.reshape(-1)
    answers: list[CudaUnavailable | Gpu] = [CudaUnavailable("no cupy"), Gpu(runtime)]

    def make_gpu() -> Gpu:
        answer = answers.pop(0)
        if isinstance(answer, CudaUnavailable):
            raise answer
        return answer

    summed: list[list[int]] = []
    sums = Gpu.sums

    def note(gpu: Gpu, pieces: RankPieces) -> SumsOfBlocks:
        summed.append(pieces.coarse.device.tolist())
        return sums(gpu, pieces)

    monkeypatch.setattr(Gpu, "sums", note)
    options = Options.read({"host_tier_endpoint": f"ipc://{tmp_path}/host.sock"}, {})
    side = WorkerSide(Life("ada", f"{1:016x}", 0), NAMESPACE, options)
    with host_tier(options.settings.host_tier_endpoint) as host:
        side.register([[tensor]], BLOCKS, make_gpu)
        assert side.counts() == {"lend_failures": 1}
        _, memory = unwrap(host.hear(Hello).agent)
        assert memory is not None
        assert [a.address for a in memory.allocations] == [tensor.data_ptr()]
        assert summed == [[tensor.data_ptr()]]
        side.close()


def test_loads_wait_for_the_stream_that_computes_now(tmp_path: Path) -> None:
    """vLLM leaves the default stream when it first needs another one, after it has registered its
    tensors, as well: a load must wait for what computes in the step that begins it."""
    tensor, runtime = Tensor(), FakeRuntime()
    runtime.memory[tensor.data_ptr()] = tensor.memory.reshape(-1)
    gpu, current = Gpu(runtime), [0]
    options = Options.read({"host_tier_endpoint": f"ipc://{tmp_path}/host.sock"}, {})
    side = WorkerSide(Life("ada", f"{1:016x}", 0), NAMESPACE, options)
    side.register([[tensor]], BLOCKS, lambda: gpu, compute_stream=lambda: current[0])
    current[0] = runtime.stream(urgent=False)
    load = Load("r", 7, 5, (0,), (2,), (name(1),), (bytes(8),), BLOCK_BYTES, 2**60)
    side.start(StepPlan((load,)))
    event = gpu.fence()
    assert runtime.calls[-1] == ("record", event, current[0])
    side.close()


def test_a_mark_is_reported_when_the_stream_that_computes_has_passed_it(tmp_path: Path) -> None:
    """1. A plan with a mark: it is laid in the stream that computes now. 2. The stream stands
    still: nothing is reported. 3. It has passed the mark: that is reported once."""
    tensor, runtime = Tensor(), FakeRuntime()
    runtime.memory[tensor.data_ptr()] = tensor.memory.reshape(-1)
    gpu, compute = Gpu(runtime), runtime.stream(urgent=False)
    options = Options.read({"host_tier_endpoint": f"ipc://{tmp_path}/host.sock"}, {})
    side = WorkerSide(Life("ada", f"{1:016x}", 0), NAMESPACE, options)
    side.register([[tensor]], BLOCKS, lambda: gpu, compute_stream=lambda: compute)
    runtime.moves = False
    side.start(StepPlan(mark=3))
    assert runtime.calls[-1][::2] == ("record", compute)
    assert side.report() is None
    runtime.moves = True
    runtime.advance()
    assert side.report() == StepReport(mark_ends=((3, True),))
    assert side.report() is None
    side.close()


@pytest.mark.parametrize(("rank", "world_size"), [(0, 1), (0, 2), (1, 2)])
def test_a_flipped_byte_is_found_with_the_settings_that_are_shipped(
    tmp_path: Path, rank: int, world_size: int
) -> None:
    """By each rank in its own part: the block is bad, and zeroed; the one beside it is good."""
    size = world_size * BLOCK_BYTES
    tensor = Tensor()
    options = Options.read({"host_tier_endpoint": f"ipc://{tmp_path}/host.sock"}, {})
    life = Life("ada", f"{1:016x}", 0)
    side = WorkerSide(life, NAMESPACE, options, rank=rank, world_size=world_size)
    with (
        Arena.create(tmp_path, "arena", 4 * size) as arena,
        MoverThread("host") as mover,
        host_tier(options.settings.host_tier_endpoint) as host,
    ):
        arena.array[:] = np.random.default_rng(1).integers(0, 256, arena.bytes, dtype=np.uint8)
        parts = arena.array.reshape(4, world_size, BLOCK_BYTES)
        sums = tuple(pack_sums(map(block_checksum, parts[slot])) for slot in (3, 1))
        parts[1, rank, 5] ^= 1
        side.register([[tensor]], BLOCKS)
        host.hear(Hello)
        host.say(welcome(7, slot_bytes=size, slot_count=4, arena_path=str(arena.path),
                         agent=mover.metadata().result(10)))  # fmt: skip
        load = Load("r", 7, 5, (3, 1), (2, 0), (name(1), name(2)), sums, size, 2**60)
        side.start(StepPlan((load,)))
        wait_for(lambda: side.arrived() == {"r"})
        assert side.bad_blocks() == {0}
        assert np.array_equal(tensor.memory[2], parts[3, rank])
        assert not tensor.memory[0].any()
        assert side.counts()["loads_failed.corrupt"] == 1
        side.close()
