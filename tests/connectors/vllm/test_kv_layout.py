"""Which layout of KV memory vLLM is asked for; `tests/vllm/test_smoke.py` asks vLLM itself."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from kvbm_connectors.vllm.kv_layout import wanted_layout


@pytest.fixture(autouse=True)
def platform(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """vllm.platforms.current_platform: CUDA."""
    current = SimpleNamespace(is_cuda=lambda: True, is_cpu=lambda: False)
    base = ModuleType("vllm.distributed.kv_transfer.kv_connector.v1.base")
    base.__dict__["KVConnectorBase_V1"] = type("KVConnectorBase_V1", (), {})
    v1 = ModuleType("vllm.distributed.kv_transfer.kv_connector.v1")
    v1.__dict__["base"] = base
    platforms = ModuleType("vllm.platforms")
    platforms.__dict__["current_platform"] = current
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    monkeypatch.setitem(sys.modules, "vllm.distributed.kv_transfer.kv_connector.v1", v1)
    return current


def config_of() -> Any:
    """A VllmConfig of a model with full attention."""
    return SimpleNamespace(
        model_config=SimpleNamespace(
            use_mla=False, is_hybrid=False, get_total_num_kv_heads=lambda: 8,
            enable_sleep_mode=False,
        ),
        cache_config=SimpleNamespace(enable_prefix_caching=True, cache_dtype="auto"),
        parallel_config=SimpleNamespace(
            distributed_executor_backend="mp", world_size=1, decode_context_parallel_size=1,
        ),
        attention_config=SimpleNamespace(),
        speculative_config=None,
    )  # fmt: skip


@pytest.mark.parametrize("cache_dtype", ["auto", "bfloat16", "fp8", "fp8_e5m2"])
def test_heads_are_to_lie_outside_of_tokens(cache_dtype: str) -> None:
    """Goal: engines with one rank and with two share blocks by default."""
    config = config_of()
    config.cache_config.cache_dtype = cache_dtype
    assert wanted_layout(config) == "LBHNC"


def test_it_is_asked_for_on_cuda_and_cpu_alone(platform: SimpleNamespace) -> None:
    """Goal: on ROCm the layout of the native kernels stays."""
    platform.is_cuda = lambda: False
    assert wanted_layout(config_of()) is None
    platform.is_cpu = lambda: True
    assert wanted_layout(config_of()) == "LBHNC"


def _set(path: str, value: object) -> Callable[[Any], None]:
    *owners, name = path.split(".")

    def change(config: Any) -> None:
        owner = config
        for one in owners:
            owner = getattr(owner, one)
        setattr(owner, name, value)

    return change


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(_set("model_config", None), id="no model"),
        pytest.param(_set("model_config.use_mla", True), id="latent attention"),
        pytest.param(_set("model_config.get_total_num_kv_heads", lambda: 1), id="one head"),
        pytest.param(_set("model_config.is_hybrid", True), id="states"),
        pytest.param(_set("speculative_config", SimpleNamespace(method="eagle")), id="drafts"),
        pytest.param(
            _set("speculative_config", SimpleNamespace(method="extract_hidden_states")), id="hidden"
        ),
        pytest.param(_set("attention_config.hisparse_config", object()), id="hisparse"),
        pytest.param(_set("cache_config.cache_dtype", "int8_per_token_head"), id="scales"),
        pytest.param(_set("cache_config.cache_dtype", "turboquant_k8v4"), id="packed"),
        pytest.param(_set("cache_config.enable_prefix_caching", False), id="no prefix caching"),
        pytest.param(_set("parallel_config.decode_context_parallel_size", 2), id="context"),
        pytest.param(_set("model_config.enable_sleep_mode", True), id="sleep"),
    ],
)
def test_it_is_not_asked_for_in_vain(change: Callable[[Any], None]) -> None:
    """Goal: where engines share no more with it, or pass through, vLLM's own choice stays."""
    config = config_of()
    change(config)
    assert wanted_layout(config) is None


def test_drafts_without_a_model_keep_it() -> None:
    config = config_of()
    config.speculative_config = SimpleNamespace(method="ngram")
    assert wanted_layout(config) == "LBHNC"
