"""A worker whose blocks are on a GPU, in place of which stands a runtime that keeps its order."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from kvbm_common.cuda.lending import DeviceMemory, unwrap, wrap
from kvbm_common.cuda.reading import Gpu
from kvbm_common.cuda.runtime import Allocation
from kvbm_common.memory.arena import Arena
from kvbm_common.nixl.mover_thread import MoverThread
from kvbm_common.wire.local import Hello, Region
from kvbm_connectors.client.lending import needs_owner
from kvbm_connectors.client.worker import WorkerHalf

from tests.connectors.endpoints import DEADLINE_S, host_tier, welcome
from tests.connectors.helpers import EPOCH, INCARNATION, NAMESPACE
from tests.connectors.ranks import BLOCK_BYTES, DEVICE_BLOCKS, SIZE, SLOT_COUNT, THEIRS, Host, load
from tests.gpu.fake_runtime import FakeRuntime
from tests.libs.nixl_owner import Owner, content
from tests.waiting import wait_for

pytestmark = pytest.mark.usefixtures("small_measurements")


class GpuRank:
    """Two regions of a device's memory and their worker half."""

    def __init__(self, directory: Path) -> None:
        self.runtime = FakeRuntime(seed=2)
        self.news = threading.Semaphore(0)
        self.endpoint = f"ipc://{directory}/host.sock"
        address = self.runtime.allocate(DEVICE_BLOCKS * BLOCK_BYTES)
        self.memory = self.runtime.memory[address].reshape(DEVICE_BLOCKS, BLOCK_BYTES)
        half = BLOCK_BYTES // 2
        regions = [
            Region(address=address + offset, stride=BLOCK_BYTES, piece_bytes=half,
                   blocks=DEVICE_BLOCKS)
            for offset in (0, half)
        ]  # fmt: skip
        gpu = Gpu(self.runtime)
        self.half = WorkerHalf(
            engine="ada", incarnation=INCARNATION, namespace=NAMESPACE, regions=regions,
            host_tier_endpoint=self.endpoint,
            on_news=self.news.release, gpu=gpu,
        )  # fmt: skip


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[GpuRank]:
    rank = GpuRank(tmp_path)
    yield rank
    rank.half.close()


@pytest.fixture
def host(rank: GpuRank, arena: Arena, owner: Owner) -> Iterator[Host]:
    """A host tier that has welcomed the rank and heard where its memory is."""
    with host_tier(rank.endpoint) as host:
        rank.half.start()
        agent, memory = unwrap(host.hear(Hello).agent)
        assert agent
        assert memory is not None
        assert [a.address for a in memory.allocations] == [rank.memory.ctypes.data]
        host.say(welcome(EPOCH, slot_bytes=BLOCK_BYTES, slot_count=SLOT_COUNT,
                         arena_path=str(arena.path), arena_address=THEIRS,
                         agent=owner.metadata))  # fmt: skip
        wait_for(lambda: rank.half.epoch == EPOCH)
        yield host
        rank.half.close()


def test_where_nixl_refuses_the_memory_its_agent_can_still_be_met(rank: GpuRank) -> None:
    """Nothing but CUDA IPC is needed beside the GPU; a host tier that cannot load the agent's
    metadata refuses the worker, with all of its memory."""
    with host_tier(rank.endpoint) as host, MoverThread("host") as mover:
        rank.half.start()
        agent, _ = unwrap(host.hear(Hello).agent)
        assert mover.add_peer(agent).result(DEADLINE_S)


def test_a_mover_does_not_stand_ready_for_reads_by_cuda(rank: GpuRank) -> None:
    """Goal: an engine with a GPU is not disturbed a thousand times a second."""
    rank.half.expect_reads(expected=True)
    assert not rank.half.expects_reads


def test_a_mover_stands_ready_where_cuda_gives_no_handles() -> None:
    """Goal: NIXL may need the owner then, as for memory of virtual addresses."""
    assert not needs_owner(wrap(b"agent", DeviceMemory("0", 0, [Allocation(0, 1, b"")])))
    assert needs_owner(wrap(b"agent", DeviceMemory("0", 0, [])))
    assert needs_owner(b"agent")


@pytest.mark.slow
def test_a_load_goes_into_device_memory_and_is_verified_there(rank: GpuRank, host: Host) -> None:
    rank.half.start_load(load([5, 0, 63]))
    assert rank.news.acquire(timeout=DEADLINE_S)
    [result] = rank.half.drain_ended()
    assert (result.intact, result.reason) == ((True,) * 3, "")
    expected = content(SIZE).reshape(SLOT_COUNT, BLOCK_BYTES)[[5, 0, 63]]
    assert np.array_equal(rank.memory[:3], expected)
    assert rank.half.counts["verified_blocks"] == 3
    assert any(call[0] == "sum_parts" for call in rank.runtime.calls)


def test_a_corrupt_slot_is_found_on_the_device(rank: GpuRank, arena: Arena, host: Host) -> None:
    """One byte of the middle one of three."""
    arena.array[0] ^= 1
    rank.half.start_load(load([5, 0, 63]))
    assert rank.news.acquire(timeout=DEADLINE_S)
    [result] = rank.half.drain_ended()
    assert (result.intact, result.corrupt, result.reason) == ((True, False, True), (1,), "corrupt")
    assert not rank.memory[1].any()
