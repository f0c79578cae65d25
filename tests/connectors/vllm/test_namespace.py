"""What vLLM's configuration says of an engine that offers blocks."""

from __future__ import annotations

import sys
from enum import IntEnum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from kvbm_connectors.vllm.namespace import (
    cache_dtype_of,
    packing_of,
    refusal_of,
    rewritten_by_drafts,
)


class Mode(IntEnum):
    """vllm.v1.kv_cache_interface.KVQuantMode."""

    NONE = 0
    FP8_PER_TENSOR = 1


@pytest.mark.parametrize(
    ("method", "lookahead", "rewritten"),
    [(None, 0, None), ("ngram", 0, None), ("eagle", 1, 0), ("draft_model", None, 0), ("mtp", 3, 2)],
)
def test_modules_of_a_draft_model_but_the_first_write_again(
    method: str | None, lookahead: int | None, rewritten: int | None
) -> None:
    """As vLLM's `num_reprefillable_tokens`; a vLLM without it has draft models of one module."""
    speculative = SimpleNamespace(method=method) if method else None
    config = SimpleNamespace(speculative_config=speculative)
    if lookahead is not None:
        config.num_prefill_lookahead_tokens = lookahead
    assert rewritten_by_drafts(config) == rewritten


@pytest.mark.parametrize(
    ("scheduler", "worker", "spec", "found"),
    [
        ("auto", "auto", {}, "auto"),
        ("auto", "auto", {"kv_quant_mode": Mode.NONE}, "auto"),
        ("auto", "fp8", {"kv_quant_mode": Mode.FP8_PER_TENSOR}, "fp8"),
        ("fp8_e5m2", "fp8_e5m2", {"kv_quant_mode": Mode.FP8_PER_TENSOR}, "fp8_e5m2"),
        ("fp8", "fp8_ds_mla", {"cache_dtype_str": "fp8_ds_mla"}, "fp8_ds_mla"),
        ("auto", "auto", {"cache_dtype_str": None}, "auto"),
        ("fp8", "fp8", {"cache_dtype_str": "auto", "kv_quant_mode": Mode.NONE}, "fp8"),
    ],
)
def test_all_processes_of_an_engine_name_its_kv_alike(
    scheduler: str, worker: str, spec: dict[str, Any], found: str
) -> None:
    """Goal: vLLM resolves the format of KV while it loads a model, and its scheduler's process
    loads none: an engine of several processes is cached all the same."""
    for one in (
        SimpleNamespace(**spec), SimpleNamespace(kv_cache_specs={"0": SimpleNamespace(**spec)})
    ):  # fmt: skip
        assert {named(scheduler, one), named(worker, one)} == {found}


def named(configured: str, *specs: Any, scheme: Any = None, skipped: Any = ()) -> str:
    """Name the format of KV in a process whose configuration says `configured`."""
    cache_config = SimpleNamespace(cache_dtype=configured, kv_cache_dtype_skip_layers=skipped)
    config = SimpleNamespace(
        cache_config=cache_config, quant_config=SimpleNamespace(kv_cache_scheme=scheme)
    )
    groups = [SimpleNamespace(kv_cache_spec=one) for one in specs]
    return cache_dtype_of(config, SimpleNamespace(kv_cache_groups=groups))


def test_a_skipped_first_layer_says_nothing_of_the_others() -> None:
    """Goal: an engine of several ranks whose first layers keep the model's format is cached.

    1. Groups of other layers have the format. 2. vLLM's scheduler sees one layer of a group: the
    checkpoint's scheme says the rest. 3. Groups of other formats beside latent ones count, too.
    """
    plain = SimpleNamespace(kv_quant_mode=Mode.NONE, dtype="bfloat16")
    fp8 = SimpleNamespace(kv_quant_mode=Mode.FP8_PER_TENSOR, dtype="uint8")
    latent = SimpleNamespace(cache_dtype_str="fp8_ds_mla")
    for configured in ("auto", "fp8"):
        assert named(configured, plain, fp8) == "fp8"
        assert named(configured, plain, scheme={"num_bits": 8}, skipped=["0"]) == "fp8"
    assert named("auto", plain, skipped=["0"]) == "auto"
    assert named("auto", plain, scheme={"num_bits": 8}) == "auto"
    own = type("MLAAttentionSpec", (SimpleNamespace,), {})(kv_quant_mode=Mode.NONE)
    assert named("auto", own, scheme={"num_bits": 8}, skipped=["0"]) == "auto"
    mixed = [
        {named(configured, other, latent) for configured in ("auto", "fp8", "fp8_ds_mla")}
        for other in (plain, fp8, latent)
    ]
    assert list(map(len, mixed)) == [1, 1, 1]
    assert len(set.union(*mixed)) == 3


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """vLLM on a CPU: the head sizes and formats of KV that it was asked to pack."""
    asked: list[tuple[int, str]] = []

    def isa(_dtype: Any, _block_size: int, head_size: int, kv_cache_dtype: str) -> str:
        asked.append((head_size, kv_cache_dtype))
        if head_size % 32 and kv_cache_dtype != "auto":
            raise NotImplementedError("FP8 KV cache requires head_size divisible by 32 on CPU.")
        return "vec16" if head_size % 32 else "vec"

    platforms, backend = ModuleType("platforms"), ModuleType("cpu_attn")
    platforms.__dict__["current_platform"] = SimpleNamespace(is_cpu=lambda: True)
    backend.__dict__["_get_attn_isa"] = isa
    for name in ("vllm", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backends"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    monkeypatch.setitem(sys.modules, "vllm.v1.attention.backends.cpu_attn", backend)
    return asked


@pytest.mark.parametrize("configured", ["auto", "fp8"])
def test_layers_that_are_not_quantised_are_packed_in_the_model_s_format(
    cpu: list[tuple[int, str]], configured: str
) -> None:
    """Goal: skipped layers have heads that vLLM packs in no other format, and it is not asked to,
    however the process says that the other layers are quantised."""
    config = SimpleNamespace(
        cache_config=SimpleNamespace(cache_dtype=configured), model_config=SimpleNamespace(dtype="")
    )
    skipped = SimpleNamespace(kv_quant_mode=Mode.NONE, block_size=32, head_size=48)
    others = SimpleNamespace(kv_quant_mode=Mode.FP8_PER_TENSOR, block_size=32, head_size=64)
    groups = [SimpleNamespace(kv_cache_spec=one) for one in (skipped, others)]
    assert packing_of(config, SimpleNamespace(kv_cache_groups=groups)) == "/vec+vec16"
    assert cpu == [(48, "auto"), (64, "fp8")]


def test_ranks_with_schedulers_of_their_own_are_not_cached() -> None:
    """Goal: no load, and no mark, waits for a rank that reports to another scheduler."""
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(
            distributed_executor_backend="external_launcher", world_size=2
        ),
        cache_config=SimpleNamespace(enable_prefix_caching=True),
        model_config=SimpleNamespace(is_diffusion=False),
    )
    assert "hears of no other rank" in refusal_of(config, None)


def test_models_that_compute_tokens_again_are_not_cached() -> None:
    """Goal: no block is offered whose bytes the next step changes."""
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(),
        cache_config=SimpleNamespace(enable_prefix_caching=True),
        model_config=SimpleNamespace(is_diffusion=True),
    )
    assert "again with each step" in refusal_of(config, None)


def test_an_engine_that_sleeps_unheard_is_not_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: no bytes are taken from memory that vLLM has unmapped, or mapped anew."""
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(distributed_executor_backend="mp"),
        cache_config=SimpleNamespace(enable_prefix_caching=True),
        model_config=SimpleNamespace(is_diffusion=False, enable_sleep_mode=True),
    )
    nothing = SimpleNamespace(kv_cache_groups=[])
    monkeypatch.setattr("kvbm_connectors.vllm.namespace.tells_of_sleep", lambda: False)
    assert "does not say when it unmaps" in refusal_of(config, nothing)
    monkeypatch.setattr("kvbm_connectors.vllm.namespace.tells_of_sleep", lambda: True)
    assert refusal_of(config, nothing) == "the model has no KV cache"


def test_engines_that_report_what_loaded_blocks_lack_are_not_cached() -> None:
    """Goal: a load cannot end an engine that returns routed experts of every block."""
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(distributed_executor_backend="mp"),
        cache_config=SimpleNamespace(enable_prefix_caching=True),
        model_config=SimpleNamespace(is_diffusion=False),
        aux_output_config=SimpleNamespace(enabled=True),
    )
    assert "routed experts" in refusal_of(config, None)
