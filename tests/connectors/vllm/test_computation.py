"""What of vLLM's configuration and variables enters names: all that is not listed as harmless."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from kvbm_connectors.vllm.computation import application_of, digest_of, variables_of
from kvbm_connectors.vllm.harmless import HARMLESS_VARIABLES


@dataclass
class Part:
    """A part of vLLM's configuration: a harmless field, and one of a later release."""

    master_port: int = 1
    from_a_later_release: Any = None


class HuggingFace:
    """A configuration of the transformers library."""

    def __init__(self, **fields: Any) -> None:
        self._fields = fields

    def to_dict(self) -> dict[str, Any]:
        """Return the fields."""
        return self._fields


@dataclass
class Model:
    """vLLM's ModelConfig, as far as it counts here."""

    max_model_len: int = 8
    hf_config: Any = field(default_factory=lambda: HuggingFace(model_type="qwen3"))
    served_model_name: str = "poet"


@dataclass
class Config:
    """vLLM's VllmConfig."""

    model_config: Model = field(default_factory=Model)
    parallel_config: Part = field(default_factory=Part)
    kv_transfer_config: Part = field(default_factory=Part)
    instance_id: str = "1"


def digest(config: Any, **environ: str) -> str:
    """The digest of a configuration where no other variable is set."""
    return digest_of(config, "0.32.0", environ=environ)


PLAIN = digest(Config())


@pytest.mark.parametrize(
    "config",
    [
        Config(instance_id="2"),
        Config(parallel_config=Part(master_port=2)),
        Config(kv_transfer_config=Part(from_a_later_release=2)),
        Config(model_config=Model(served_model_name="other")),
        Config(model_config=Model(max_model_len=2**20)),
    ],
)
def test_harmless_fields_leave_the_digest_alone(config: Config) -> None:
    """Ports, lives, parts that carry blocks, what clients call the model, an unscaled length."""
    assert digest(config) == PLAIN


def test_a_field_of_a_later_release_enters() -> None:
    """Until it is looked at and listed."""
    assert digest(Config(parallel_config=Part(from_a_later_release=2))) != PLAIN


def test_passes_of_the_compiler_enter_and_its_state_does_not() -> None:
    """A pass may change the graph; what was compiled so far is a process's own."""

    def compiled(**given: Any) -> str:
        config = Config()
        config.compilation_config = SimpleNamespace(**given)  # type: ignore[attr-defined]
        return digest(config)

    assert compiled(inductor_passes={}, traced_files={"a"}) == compiled(inductor_passes={})
    assert compiled(inductor_passes={"post_grad": "own.pass"}) != compiled(inductor_passes={})


def test_llama_4_tunes_its_attention_by_the_length() -> None:
    """Beyond 32,768 tokens, unless its files say otherwise."""
    kind = HuggingFace(model_type="llama4_text")
    found = [
        digest(Config(model_config=Model(length, kind))) for length in (8, 32_768, 32_769, 2**20)
    ]
    assert found[0] == found[1] != found[2] == found[3]


VITAL = (
    "VLLM_CPU_INT4_W4A8", "VLLM_MARLIN_INPUT_DTYPE", "VLLM_HUMMING_ONLINE_QUANT_CONFIG",
    "VLLM_MXFP4_EMULATION_DEQUANT_AT_LOAD", "VLLM_USE_DEEP_GEMM_E8M0",
    "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION",
    "VLLM_DEEPEPLL_NVFP4_DISPATCH", "VLLM_B12X_MOE_FP4_FORCE_A16", "VLLM_XPU_INC_WNA16_BACKEND",
    "VLLM_DISABLED_KERNELS", "VLLM_OF_A_LATER_RELEASE",
)  # fmt: skip


@pytest.mark.parametrize("name", VITAL)
def test_variables_enter(name: str) -> None:
    """Each changes what is computed, or may."""
    assert digest(Config(), **{name: "1"}) != PLAIN
    assert digest(Config(), **{name: "1"}) != digest(Config(), **{name: "0"})


def test_harmless_variables_and_those_of_others_do_not() -> None:
    """Hosts, ports, paths, logs; and a shell's own."""
    environ = dict.fromkeys((*HARMLESS_VARIABLES, "PATH", "KVBM_HOST"), "1")
    assert variables_of(environ) == {}


def lora(**given: Any) -> SimpleNamespace:
    """vLLM's LoRAConfig."""
    return SimpleNamespace(**({"lora_dtype": "bfloat16", "target_modules": None} | given))


@pytest.mark.parametrize(
    "given",
    [
        {"target_modules": ["o_proj"]},
        {"enable_moe_shared_loras": True},
        {"enable_mixed_moe_lora_format": True},
        {"enable_tower_connector_lora": True},
        {"lora_dtype": "float16"},
        {"from_a_later_release": 1},
    ],
)
def test_how_adapters_are_applied_enters(given: dict[str, Any]) -> None:
    """The same adapter computes otherwise."""
    assert application_of(lora(**given)) != application_of(lora())


@pytest.mark.parametrize("given", [{"max_loras": 8}, {"max_lora_rank": 64}, {"max_cpu_loras": 8}])
def test_how_many_adapters_there_may_be_does_not(given: dict[str, Any]) -> None:
    """Counts and ranks are room alone."""
    assert application_of(lora(**given)) == application_of(lora())


def test_the_order_of_targets_does_not_count() -> None:
    """A set of modules."""
    first, other = (
        application_of(lora(target_modules=names)) for names in (["a", "b"], ["b", "a"])
    )
    assert first == other
    assert application_of(None) == ""
