"""The two ways of a block, host tier and worker, on a runtime that keeps CUDA's order only."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from kvbm_common.checksum import block_checksum, part_checksums, unpack_sums
from kvbm_common.copying.rank_pieces import RankPieces
from kvbm_common.cuda import stream_end
from kvbm_common.cuda.device_sums import DeviceSums
from kvbm_common.cuda.lending import MAGIC, DeviceMemory, export, unwrap, wrap
from kvbm_common.cuda.pulling import DevicePuller
from kvbm_common.cuda.reading import DeviceReader, Gpu
from kvbm_common.cuda.runtime import Allocation, CudaError, CudaUnavailable
from kvbm_common.memory.arena import Arena
from kvbm_common.nixl.spans import Spans
from kvbm_common.nixl.transfers import (
    BadPeerMetadata,
    MoverClosed,
    PeerLost,
    TransferFailed,
    TransferTimeout,
)
from kvbm_common.tier.parts import ONE_PART, Grid, Share, share_of_rank
from kvbm_common.wire.local import Region

from benchmarks.pieces import device_spans, slot_spans
from tests.gpu.fake_runtime import FakeRuntime
from tests.waiting import wait_for

pytestmark = pytest.mark.usefixtures("small_measurements")
DEADLINE_S = 10.0
LAYERS, BLOCKS, PIECE = 3, 6, 512
BLOCK_BYTES = LAYERS * PIECE
SLOT_BYTES = 2048
THEIRS = 0x7000_0000_0000


class Cache:
    """Paged device memory, a region for each layer, full of noise."""

    def __init__(self, runtime: FakeRuntime) -> None:
        self.address = runtime.allocate(LAYERS * BLOCKS * PIECE)
        self.pieces = runtime.memory[self.address].reshape(LAYERS, BLOCKS, PIECE)
        self.pieces[:] = np.random.default_rng(5).integers(0, 255, self.pieces.shape, np.uint8)
        self.regions = [
            Region(address=self.address + layer * BLOCKS * PIECE, stride=PIECE,
                   piece_bytes=PIECE, blocks=BLOCKS)
            for layer in range(LAYERS)
        ]  # fmt: skip

    def cut(self, grid: Grid = ONE_PART) -> RankPieces:
        """All of a block, in parts."""
        share = Share(grid, 0, grid.ranges, 0, grid.heads)
        return RankPieces(self.regions, share)

    def block(self, number: int) -> bytes:
        """Its bytes, as they are stored."""
        return self.pieces[:, number].tobytes()

    def spans(self, blocks: list[int]) -> Spans:
        return device_spans(self.regions, blocks)


def names(runtime: FakeRuntime) -> list[object]:
    """The calls so far."""
    return [call[0] for call in runtime.calls]


def slots(cache: Cache, arena_address: int, numbers: list[int]) -> Spans:
    """Where blocks are in an arena."""
    return slot_spans(cache.regions, numbers, arena_address=arena_address, slot_bytes=SLOT_BYTES)


@pytest.fixture
def runtime() -> FakeRuntime:
    return FakeRuntime(seed=1)


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    with Arena.create(tmp_path, "arena", 8 * SLOT_BYTES) as arena:
        yield arena


@pytest.fixture
def puller(runtime: FakeRuntime, arena: Arena) -> Iterator[DevicePuller]:
    puller = DevicePuller(arena.address, arena.bytes, runtime_at=lambda _: runtime)
    yield puller
    puller.close()


# --- what a worker says of its memory -----------------------------------------------------------


def test_device_memory_travels_in_the_agents_metadata(runtime: FakeRuntime) -> None:
    """Three regions of one allocation are one allocation."""
    memory = export(runtime, Cache(runtime).regions)
    assert len(memory.allocations) == 1
    assert unwrap(wrap(b"nixl", memory)) == (b"nixl", memory)
    assert unwrap(b"nixl alone") == (b"nixl alone", None)


@pytest.mark.parametrize(
    "blob",
    [
        b"", b"\x92", b"\x92\xc4\x01a\x91\xa1b", b"\x92\xc4\x01a\x93\xa1\xff\x00\x90",
        b"\x92\xc4\x01a\x94\xa1b\x00\x90" + b"\x91" * 100_000,
    ],
)  # fmt: skip
def test_a_broken_blob_is_bad_metadata(blob: bytes) -> None:
    with pytest.raises(BadPeerMetadata):
        unwrap(MAGIC + blob)


# --- offload ------------------------------------------------------------------------------------


def test_blocks_are_pulled_into_their_slots(
    runtime: FakeRuntime, arena: Arena, puller: DevicePuller
) -> None:
    """Blocks 4 and 1 into slots 0 and 5; the rest of the arena is left alone."""
    cache = Cache(runtime)
    puller.attach("ada", export(runtime, cache.regions))
    assert puller.knows("ada")
    puller.read(
        "ada", slots(cache, arena.address, [0, 5]), cache.spans([4, 1]), deadline_s=DEADLINE_S
    ).result(DEADLINE_S)
    content = arena.array.reshape(8, SLOT_BYTES)
    assert content[0, :BLOCK_BYTES].tobytes() == cache.block(4)
    assert content[5, :BLOCK_BYTES].tobytes() == cache.block(1)
    assert np.count_nonzero(content.any(axis=1)) == 2
    assert not content[:, BLOCK_BYTES:].any()


def test_memory_that_was_not_lent_is_not_read(
    runtime: FakeRuntime, arena: Arena, puller: DevicePuller
) -> None:
    cache = Cache(runtime)
    puller.attach("ada", export(runtime, cache.regions))
    outside = Spans.of([cache.address + LAYERS * BLOCKS * PIECE - 1], 2)
    read = puller.read("ada", Spans.of([arena.address], 2), outside, deadline_s=DEADLINE_S)
    with pytest.raises(TransferFailed):
        read.result(DEADLINE_S)
    with pytest.raises(PeerLost):
        puller.read("bob", outside, outside, deadline_s=DEADLINE_S).result(DEADLINE_S)


def test_a_workers_memory_stays_open_while_it_is_read(
    runtime: FakeRuntime, arena: Arena, puller: DevicePuller
) -> None:
    """The device stands still, the read is late, the worker leaves: closed when it has landed."""
    cache = Cache(runtime)
    puller.attach("ada", export(runtime, cache.regions))
    runtime.moves = False
    read = puller.read(
        "ada", slots(cache, arena.address, [0]), cache.spans([4]), deadline_s=0.01
    )  # fmt: skip
    with pytest.raises(TransferTimeout) as raised:
        read.result(DEADLINE_S)
    puller.detach("ada")
    assert not puller.knows("ada")
    assert len(runtime.opened) == 1
    runtime.moves = True
    assert raised.value.settling is not None
    raised.value.settling.result(DEADLINE_S)
    puller.close()
    assert runtime.opened == {}


def test_the_arena_is_pinned_with_the_first_worker(
    runtime: FakeRuntime, arena: Arena, puller: DevicePuller
) -> None:
    """Once, and given back after the last copy."""
    assert runtime.registered == {}
    for name in ("ada", "bob"):
        puller.attach(name, export(runtime, Cache(runtime).regions))
    wait_for(lambda: runtime.registered == {arena.address: arena.bytes})
    runtime.moves = False
    cache = Cache(runtime)
    puller.attach("eve", export(runtime, cache.regions))
    late = puller.read(
        "eve", slots(cache, arena.address, [0]), cache.spans([4]), deadline_s=DEADLINE_S
    )
    wait_for(late.running)
    over = puller.close(0.01)
    assert isinstance(late.exception(DEADLINE_S), MoverClosed)
    assert (over.done(), len(runtime.registered)) == (False, 1)
    runtime.moves = True
    over.result(DEADLINE_S)
    assert runtime.registered == {}


def test_without_cuda_a_worker_is_refused(arena: Arena) -> None:
    """Goal: a typed error, on which the host tier falls back to NIXL."""
    memory = DeviceMemory("0000:99:00.0", 0, [Allocation(0, 1, b"")])
    puller = DevicePuller(arena.address, arena.bytes)
    with pytest.raises(CudaUnavailable):
        puller.attach("ada", memory)


def test_memory_without_handles_is_said_to_have_none(
    runtime: FakeRuntime, puller: DevicePuller
) -> None:
    """Memory of a sleep mode: CUDA exports none of it, and the host tier falls back to NIXL."""
    memory = Gpu(runtime).export([Region(address=1, stride=64, piece_bytes=64, blocks=2)])
    assert memory == DeviceMemory("0000:00:00.0", 0, [])
    with pytest.raises(CudaError, match="no handles"):
        puller.attach("ada", memory)
    assert not puller.knows("ada")


# --- onboard ------------------------------------------------------------------------------------


@pytest.mark.parametrize("pins_read_only", [True, False])
def test_slots_are_read_into_blocks(
    runtime: FakeRuntime, arena: Arena, pins_read_only: bool
) -> None:
    """From the host tier's addresses, out of a mapping of our own, and summed up there."""
    runtime.pins_read_only = pins_read_only
    cache = Cache(runtime)
    cache.pieces[:] = 0
    arena.array[:] = np.random.default_rng(6).integers(0, 255, arena.bytes, np.uint8)
    gpu = Gpu(runtime)
    reader = DeviceReader(gpu, arena_path=arena.path, arena_address=THEIRS)
    reader.read(
        cache.spans([2, 0]), slots(cache, THEIRS, [7, 3]), deadline_s=DEADLINE_S
    ).result(DEADLINE_S)  # fmt: skip
    content = arena.array.reshape(8, SLOT_BYTES)[:, :BLOCK_BYTES]
    assert cache.block(2) == content[7].tobytes()
    assert cache.block(0) == content[3].tobytes()
    assert not cache.pieces[:, [1, 3, 4, 5]].any()
    sums = gpu.sums(cache.cut())
    assert sums([2, 0]) == [block_checksum(content[7].copy()), block_checksum(content[3].copy())]
    reader.close()


GRIDS = [ONE_PART, Grid(heads=2), Grid(ranges=3), Grid(layers=3, heads=2), Grid(ranges=3, heads=2)]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("on_host", [False, True])
def test_each_part_is_summed_over_its_runs(
    runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch, grid: Grid, on_host: bool
) -> None:
    """By the kernel, a launch for each part; or by the host, where the kernel cannot. Block after
    block, part after part."""
    if on_host:
        monkeypatch.setattr(DeviceSums, "fits", staticmethod(lambda _regions: False))
    cache = Cache(runtime)
    summer = Gpu(runtime).sums(cache.cut(grid))
    assert isinstance(summer, DeviceSums) == (not on_host)
    blocks = [np.frombuffer(cache.block(number), np.uint8) for number in (4, 1, 2)]
    expected = [one for block in blocks for one in unpack_sums(part_checksums(block, grid))]
    for _ in range(2):
        assert summer([4, 1, 2]) == expected


def test_a_read_waits_for_the_engines_stream(runtime: FakeRuntime, arena: Arena) -> None:
    """A fence is recorded on it when the read is asked for; it itself waits for nothing."""
    compute = runtime.stream(urgent=False)
    reader = DeviceReader(
        Gpu(runtime, compute_stream=compute), arena_path=arena.path, arena_address=THEIRS
    )
    cache = Cache(runtime)
    reader.read(
        cache.spans([1]), slots(cache, THEIRS, [0]), deadline_s=DEADLINE_S
    ).result(DEADLINE_S)  # fmt: skip
    [fence] = [call[1] for call in runtime.calls if call[0] == "record" and call[2] == compute]
    [(_, waiting, event)] = [call for call in runtime.calls if call[0] == "wait"]
    assert event == fence
    assert waiting != compute
    reader.close()


def test_the_arena_is_kept_for_a_read_that_outlives_the_close(
    runtime: FakeRuntime, arena: Arena
) -> None:
    """Pinned and mapped until the copy has landed, whose caller hears of that."""
    cache = Cache(runtime)
    arena.array[:] = 3
    reader = DeviceReader(Gpu(runtime), arena_path=arena.path, arena_address=THEIRS)
    wait_for(lambda: sum(runtime.registered.values()) == arena.bytes)
    runtime.moves = False
    read = reader.read(cache.spans([1]), slots(cache, THEIRS, [0]), deadline_s=DEADLINE_S)
    wait_for(read.running)
    reader.close(0.01)
    with pytest.raises(MoverClosed) as raised:
        read.result(DEADLINE_S)
    assert sum(runtime.registered.values()) == arena.bytes
    runtime.moves = True
    assert raised.value.settling is not None
    raised.value.settling.result(DEADLINE_S)
    assert (cache.pieces[:, 1] == 3).all()
    wait_for(lambda: runtime.registered == {})


def test_an_engine_that_captures_a_graph_is_not_disturbed(
    runtime: FakeRuntime, arena: Arena
) -> None:
    """Memory is lent late, the arena comes, is pinned, read from and summed up, and goes, while it
    captures: all of it in threads that have nothing to do with it."""
    cache = Cache(runtime)
    runtime.capturing = True
    gpu = Gpu(runtime)
    assert len(gpu.export(cache.regions).allocations) == 1
    sums = gpu.sums(cache.cut())
    reader = DeviceReader(gpu, arena_path=arena.path, arena_address=THEIRS)
    wait_for(lambda: sum(runtime.registered.values()) == arena.bytes)
    reader.read(
        cache.spans([1]), slots(cache, THEIRS, [0]), deadline_s=DEADLINE_S
    ).result(DEADLINE_S)  # fmt: skip
    with ThreadPoolExecutor(1) as verifier:
        assert verifier.submit(sums, [1]).result(DEADLINE_S) == [block_checksum(cache.block(1))]
    reader.close()
    assert (runtime.broken_captures, runtime.registered) == ([], {})


def test_slots_outside_the_arena_are_refused(runtime: FakeRuntime, arena: Arena) -> None:
    reader = DeviceReader(Gpu(runtime), arena_path=arena.path, arena_address=THEIRS)
    read = reader.read(
        Cache(runtime).spans([0]), Spans.of([THEIRS + arena.bytes - 1] * 3, PIECE),
        deadline_s=DEADLINE_S,
    )  # fmt: skip
    with pytest.raises(TransferFailed):
        read.result(DEADLINE_S)
    reader.close()


@pytest.mark.parametrize(("piece", "stride", "address"), [(96, 96, 0), (128, 128, 4), (64, 64, 0)])
def test_pieces_that_the_kernel_cannot_sum(piece: int, stride: int, address: int) -> None:
    """No multiple of a stripe, not aligned, too small a block."""
    region = Region(address=address, stride=stride, piece_bytes=piece, blocks=1)
    regions = [region] * (1 if piece == 64 else 3)
    assert not DeviceSums.fits(regions)


def test_a_layout_that_the_kernel_cannot_sum_is_summed_by_the_host(runtime: FakeRuntime) -> None:
    """It is verified all the same: blocks are copied back."""
    piece = 96
    address = runtime.allocate(3 * 4 * piece)
    memory = runtime.memory[address].reshape(3, 4, piece)
    memory[:] = np.random.default_rng(5).integers(0, 255, memory.shape, np.uint8)
    regions = [
        Region(address=address + i * 4 * piece, stride=piece, piece_bytes=piece, blocks=4)
        for i in range(3)
    ]
    assert not DeviceSums.fits(regions)
    found = Gpu(runtime).sums(RankPieces(regions, share_of_rank(0, 1)))([2, 0])
    assert found == [block_checksum(memory[:, block].tobytes()) for block in (2, 0)]


def test_blocks_of_a_gpu_are_delivered_and_cleared(runtime: FakeRuntime) -> None:
    """1. From host memory. 2. Zeros, and not beside."""
    cache, gpu = Cache(runtime), Gpu(runtime)
    others = cache.pieces[:, [1, 2, 4, 5]].copy()
    source = np.random.default_rng(6).integers(0, 255, (2, BLOCK_BYTES), np.uint8)
    pieces = cache.cut().coarse
    target = pieces.on_device([3, 0])
    starts = source.ctypes.data + np.arange(2, dtype=np.uint64) * np.uint64(BLOCK_BYTES)
    gpu.deliver(target, pieces.back_to_back(starts))
    assert [cache.block(3), cache.block(0)] == [block.tobytes() for block in source]
    gpu.clear(target)
    assert not cache.pieces[:, [3, 0]].any()
    assert np.array_equal(cache.pieces[:, [1, 2, 4, 5]], others)


@pytest.mark.parametrize("fails", [False, True])
def test_late_zeros_are_there_when_they_have_settled(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """Also where CUDA takes the first ones only. No event is left behind."""
    monkeypatch.setattr(stream_end, "WAIT_DEADLINE_S", 0.0)

    class Refuses(FakeRuntime):
        def zero(self, target: int, length: int, stream: int) -> None:
            if fails and names(self).count("zero"):
                raise CudaError("cudaErrorInvalidValue")
            super().zero(target, length, stream)

    runtime = Refuses(seed=1)
    cache, gpu = Cache(runtime), Gpu(runtime)
    ended = names(runtime).count("end_event")
    runtime.still_looks = 5
    with pytest.raises(TransferTimeout) as raised:
        gpu.clear(cache.cut().coarse.on_device([3]))
    assert not raised.value.settled
    assert cache.pieces[:, 3].all(axis=1).any()
    assert raised.value.settling is not None
    raised.value.settling.result(DEADLINE_S)
    assert not cache.pieces[0, 3].any()
    assert names(runtime).count("end_event") == ended + 2


def test_sums_after_a_call_that_was_given_up_are_those_of_their_own_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The stream still writes the digests of the call before, where the next one's numbers go."""
    runtime = FakeRuntime(seed=1)
    cache = Cache(runtime)
    summer = DeviceSums(runtime, cache.cut().part_regions())
    expected = summer([4, 1])
    monkeypatch.setattr(stream_end, "WAIT_DEADLINE_S", 0.0)
    runtime.still_looks = 5
    with pytest.raises(CudaError):
        summer([5, 2])
    monkeypatch.setattr(stream_end, "WAIT_DEADLINE_S", DEADLINE_S)
    assert summer([4, 1]) == expected
