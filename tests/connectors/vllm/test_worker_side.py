"""The worker side of vLLM's connector, without vLLM: its tensors are arrays."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
from kvbm_common.cuda.lending import unwrap
from kvbm_common.cuda.reading import Gpu
from kvbm_common.cuda.runtime import CudaUnavailable
from kvbm_common.nixl import MoverThread, Registration, TransferFailed
from kvbm_common.wire.local import Hello
from kvbm_connectors.messages import Load
from kvbm_connectors.vllm.namespace import Life
from kvbm_connectors.vllm.options import Options
from kvbm_connectors.vllm.plan import StepPlan
from kvbm_connectors.vllm.worker_side import WorkerSide

from tests.connectors.endpoints import host_tier, wait_for
from tests.connectors.helpers import NAMESPACE, name
from tests.gpu.fake_runtime import FakeRuntime

BLOCKS, BLOCK_BYTES = 4, 4096


class Tensor:
    """Some memory, as torch shows it."""

    def __init__(self) -> None:
        self._memory = np.zeros((BLOCKS, BLOCK_BYTES), dtype=np.uint8)
        self.shape: Sequence[int] = self._memory.shape

    def stride(self) -> Sequence[int]:
        return self._memory.strides

    def element_size(self) -> int:
        return 1

    def data_ptr(self) -> int:
        return self._memory.ctypes.data


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
        side.register([tensor], BLOCKS)
        assert side.counts() == {"lend_failures": 1}
        load = Load("r", 7, 5, (0,), (2,), (name(1),), (0,), BLOCK_BYTES, 2**60)
        side.start(StepPlan((load,)))
        assert (side.arrived(), side.bad_blocks()) == ({"r"}, {2})
        hello = host.hear(Hello)
        assert [region.address for region in hello.regions] == [tensor.data_ptr()]
        wait_for(lambda: side.counts()["lend_failures"] == len(failures))
        side.close()


def test_tensors_on_a_gpu_are_lent_with_their_handles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. cupy is not there at first: the engine computes. 2. It is: the worker introduces itself
    with CUDA's handles, and verifies on the device."""
    monkeypatch.setattr("kvbm_connectors.vllm.worker_side.LEND_AGAIN_S", 0.1)
    tensor, runtime = Tensor(), FakeRuntime()
    runtime._memory[tensor.data_ptr()] = tensor._memory.reshape(-1)
    answers: list[CudaUnavailable | Gpu] = [CudaUnavailable("no cupy"), Gpu(runtime)]

    def make_gpu() -> Gpu:
        answer = answers.pop(0)
        if isinstance(answer, CudaUnavailable):
            raise answer
        return answer

    options = Options.read({"host_tier_endpoint": f"ipc://{tmp_path}/host.sock"}, {})
    side = WorkerSide(Life("ada", f"{1:016x}", 0), NAMESPACE, options)
    with host_tier(options.settings.host_tier_endpoint) as host:
        side.register([tensor], BLOCKS, make_gpu)
        assert side.counts() == {"lend_failures": 1}
        _, memory = unwrap(host.hear(Hello).agent)
        assert memory is not None
        assert [a.address for a in memory.allocations] == [tensor.data_ptr()]
        assert side._half is not None
        assert side._half._sum_blocks is not None
        side.close()
