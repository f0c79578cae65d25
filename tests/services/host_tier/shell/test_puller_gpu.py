"""The puller and a worker whose memory is on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from kvbm_common.checksum import block_checksum, pack_sums
from kvbm_common.cuda.lending import export, wrap
from kvbm_common.cuda.runtime import CudaError, CupyRuntime
from kvbm_common.nixl.mover_thread import MoverThread
from kvbm_common.runtime.metrics import Metrics
from kvbm_common.tier.parts import share_of_rank
from kvbm_common.wire.local import Region
from kvbm_host_tier.core.messages import (
    AttachPeer,
    EngineId,
    PeerAttached,
    PullDone,
    PullPart,
    StartPull,
)
from kvbm_host_tier.shell.puller import Puller

from tests.gpu.fake_runtime import FakeRuntime

pytestmark = pytest.mark.usefixtures("small_measurements")
SLOT_BYTES, PIECE, BLOCKS = 4096, 512, 4


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    """The GPU at whatever place of the bus."""
    runtime = FakeRuntime(seed=4)
    monkeypatch.setattr(CupyRuntime, "at", lambda _: runtime)
    return runtime


@pytest.fixture
def puller(tmp_path: Path) -> Iterator[Puller]:
    puller = Puller(tmp_path, name="test", counters=Metrics())
    puller.make_arena(4 * SLOT_BYTES)
    yield puller
    puller.close()


@pytest.fixture
def worker() -> Iterator[MoverThread]:
    """The NIXL agent of a worker."""
    with MoverThread("worker") as worker:
        yield worker


async def attach(puller: Puller, worker: MoverThread, runtime: FakeRuntime, region: Region) -> str:
    """Introduce the worker's memory; gives the peer's name."""
    worker.register_memory(region.address, BLOCKS * PIECE).result(5.0)
    blob = wrap(worker.metadata().result(5.0), export(runtime, [region]))
    attached = await puller.attach(AttachPeer(EngineId("ada", "0" * 16), 0, blob))
    assert isinstance(attached, PeerAttached)
    return attached.peer


def whole(peer: str, region: Region) -> PullPart:
    """A rank that has all of a block."""
    return PullPart(peer, (region,), share_of_rank(0, 1))


async def test_a_gpus_blocks_are_pulled_by_cuda(
    puller: Puller, worker: MoverThread, runtime: FakeRuntime
) -> None:
    """Blocks 3 and 0 into slots 1 and 2, with the checksums of what is there."""
    address = runtime.allocate(BLOCKS * PIECE)
    cache = runtime.memory[address].reshape(BLOCKS, PIECE)
    cache[:] = np.random.default_rng(0).integers(0, 255, cache.shape, np.uint8)
    region = Region(address=address, stride=PIECE, piece_bytes=PIECE, blocks=BLOCKS)
    peer = await attach(puller, worker, runtime, region)
    done = await puller.pull(
        StartPull(pull=1, parts=(whole(peer, region),), blocks=(3, 0), slots=(1, 2),
                  block_bytes=PIECE, deadline_ms=5000),
    )  # fmt: skip
    assert isinstance(done, PullDone)
    assert done.sums == tuple(pack_sums([block_checksum(cache[block])]) for block in (3, 0))
    assert runtime.opened
    assert worker.statistics().transfers_done == puller.mover.statistics().transfers_done == 0
    puller.detach(peer)
    assert not runtime.opened


async def test_without_ipc_a_gpu_is_read_over_nixl(
    puller: Puller, worker: MoverThread, runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another container: its handles do not open. The peer is there, its rows are VRAM."""

    def refuse(*_: object) -> int:
        raise CudaError("cudaErrorInvalidResourceHandle")

    monkeypatch.setattr(FakeRuntime, "open", refuse)
    address = runtime.allocate(BLOCKS * PIECE)
    region = Region(address=address, stride=PIECE, piece_bytes=PIECE, blocks=BLOCKS)
    peer = await attach(puller, worker, runtime, region)
    kinds: list[str] = []
    read = puller.mover.read

    def listen(peer: str, local: object, remote: object, **rest: object) -> object:
        kinds.append(remote.kind)  # type: ignore[attr-defined]
        return read(peer, local, remote, **rest)  # type: ignore[arg-type]

    monkeypatch.setattr(puller.mover, "read", listen)
    await puller.pull(
        StartPull(pull=1, parts=(whole(peer, region),), blocks=(3,), slots=(1,),
                  block_bytes=PIECE, deadline_ms=1000),
    )  # fmt: skip
    assert kinds == ["VRAM"]
