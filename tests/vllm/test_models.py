"""Other kinds of attention: latent, windowed, and what is not cached but must not break."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vllm.conftest import make_model
from tests.vllm.conversation import Ask
from tests.vllm.harness import EngineProcess, LiveStack, alike, live_stack, prompt, same

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture
def stack() -> Iterator[LiveStack]:
    """For each model its own: the slots of an arena are as large as the first engine's blocks."""
    with live_stack({"cpu_cache_gb": 0.1}) as running:
        yield running


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        pytest.param("windowed", {}, id="several groups"),
        pytest.param("windowed", {"disable_hybrid_kv_cache_manager": True}, id="windows"),
        pytest.param(
            "latent",
            {"dtype": "bfloat16"},
            id="latent attention",
            marks=pytest.mark.skipif(
                "amx_tile" not in Path("/proc/cpuinfo").read_text(), reason="vLLM needs AMX for it"
            ),
        ),
    ],
)
def test_other_attention_in_one_group_is_cached(
    stack: LiveStack, log_dir: Path, tmp_path: Path, kind: str, arguments: dict[str, object]
) -> None:
    """Goal: a block is bytes, whatever kind of attention reads them.

    1. A prompt, longer than every window, is computed, hit on the device, and loaded.
    2. The answers are the same; all whole blocks were loaded.
    """
    model = make_model(tmp_path / "model", kind)
    log = log_dir / f"{kind}-cached.log"
    engine = EngineProcess(
        model, stack.settings, log=log, blocks=256, arguments=arguments
    ).wait_started()
    try:
        engine.wait_attached(stack)
        tokens = prompt(1, 500)
        cold = engine.run(Ask(name="cold", tokens=tokens))
        local = engine.run(Ask(name="local", tokens=tokens))
        engine.reset()
        loaded = engine.run(Ask(name="loaded", tokens=tokens))
        assert local[0].cached == loaded[0].cached >= 480
        assert same(loaded, local)
        if "dtype" not in arguments:  # In bfloat16 a hit on the device differs from a cold run.
            assert alike(local, cold)
    finally:
        engine.stop()


@pytest.mark.parametrize(
    ("kind", "arguments", "reason"),
    [
        pytest.param(
            "latent", {"attention_backend": "CPU_MLA"}, "prefix caching is off",
            id="latent attention",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_cached_passes_through(
    stack: LiveStack,
    log_dir: Path,
    tmp_path: Path,
    kind: str,
    arguments: dict[str, object],
    reason: str,
) -> None:
    """Goal: what is not supported costs nothing but the caching, and the log says why.

    vLLM's latent attention on CPU cannot begin after a prefix: it answers wrongly when made to.
    """
    model = make_model(tmp_path / "model", kind)
    log = log_dir / f"{kind}.log"
    engine = EngineProcess(
        model, stack.settings, log=log, blocks=256, arguments=arguments
    ).wait_started()
    try:
        tokens = prompt(2, 500)
        cold = engine.run(Ask(name="cold", tokens=tokens))
        engine.reset()
        again = engine.run(Ask(name="again", tokens=tokens))
        assert again[0].cached == 0
        assert same(again, cold)
        assert f"KVBM passes through: {reason}" in engine.log_text()
        assert not stack.held("host-tier")
    finally:
        engine.stop()
