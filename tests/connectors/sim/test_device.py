"""The device of a sim engine: what is computed on it is what it holds, on the host or on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from kvbm_cli.demo.command import DemoOptions
from kvbm_common.config.settings import Settings
from kvbm_common.cuda.runtime import CudaUnavailable, CupyRuntime
from kvbm_connectors.sim.control import EngineConfig
from kvbm_connectors.sim.device import SimDevice
from kvbm_connectors.sim.process import runtime_of

from tests.connectors.helpers import INCARNATION, NAMESPACE, name
from tests.gpu.fake_runtime import FakeRuntime

pytestmark = pytest.mark.usefixtures("small_measurements")


def config(directory: Path, **changes: object) -> EngineConfig:
    """A small engine whose host tier nobody has started."""
    values: dict[str, object] = {
        "name": "sim", "directory": str(directory), "block_bytes": 8192, "block_count": 4,
        "host_tier_endpoint": f"ipc://{directory}/host.sock",
        "consolidator_endpoint": f"ipc://{directory}/consolidator.sock",
    }  # fmt: skip
    return EngineConfig(**(values | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("on_gpu", [False, True], ids=["cpu", "gpu"])
def test_a_block_holds_what_was_computed(tmp_path: Path, ranks: int, on_gpu: bool) -> None:
    """Every rank's part; another name's block does not pass for it."""
    runtime = FakeRuntime(seed=1) if on_gpu else None
    device = SimDevice(
        config(tmp_path, ranks=ranks), incarnation=INCARNATION, namespace=NAMESPACE,
        on_news=lambda: None, runtime=runtime,
    )  # fmt: skip
    try:
        device.compute(2, name(1))
        device.compute(3, name(2))
        assert device.holds(2, name(1))
        assert device.holds(3, name(2))
        assert not device.holds(2, name(2))
        assert not device.holds(1, name(1))
        if runtime is not None:
            list(runtime.memory.values())[-1][-1] ^= 1
            assert not device.holds(3, name(2))
    finally:
        device.close()


def test_without_cuda_an_engine_on_a_gpu_says_so(tmp_path: Path) -> None:
    assert runtime_of(config(tmp_path)) is None
    try:
        CupyRuntime()
    except CudaUnavailable:
        with pytest.raises(CudaUnavailable):
            runtime_of(config(tmp_path, device="cuda"))
    else:
        assert runtime_of(config(tmp_path, device="cuda")) is not None


def test_the_demo_puts_its_engines_there() -> None:
    options = DemoOptions(device="cuda")
    assert options.engine_config(0, Settings.load()).device == "cuda"
    assert DemoOptions().engine_config(0, Settings.load()).device == "cpu"
