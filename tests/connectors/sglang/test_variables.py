"""Variables: which of SGLang's environment variables are part of a page's name."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kvbm_connectors.client.weights import UnreadableWeights
from kvbm_connectors.sglang.harmless import HARMLESS_VARIABLES
from kvbm_connectors.sglang.weights import revision_of

VITAL = [
    ("SGLANG_FP8_IGNORED_LAYERS", "model.layers.0.self_attn"),
    ("SGLANG_PP_LAYER_PARTITION", "12,12,8"),
    ("SGLANG_QUANT_ALLOW_DOWNCASTING", "1"),
    ("SGLANG_NVFP4_CKPT_FP8_GEMM_IN_ATTN", "1"),
    ("SGLANG_OF_A_LATER_RELEASE", "1"),
    ("FLASHINFER_NVFP4_4OVER6", "1"),
]
FROM_A_HUB: list[dict[str, Any]] = [
    {"model_path": "org/tiny"},
    {"speculative_draft_model_path": "org/draft"},
    {"kt_weight_path": "org/experts"},
    {"lora_paths": {"poet": "org/poet"}},
]


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "model.safetensors").write_bytes(b"1")
    return str(tmp_path)


def revision(model: str, **given: Any) -> str:
    """The revision of a model, with further arguments; `named` is an operator's name."""
    named = given.pop("named", "")
    return revision_of(SimpleNamespace(**({"model_path": model} | given)), named=named)


@pytest.mark.parametrize(("variable", "value"), VITAL)
@pytest.mark.parametrize("named", ["", "poet"])
def test_variables_enter_the_revision(
    model: str, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, named: str
) -> None:
    """Goal: what one engine computes is not served to another one that would compute otherwise."""
    before = revision(model, named=named)
    monkeypatch.setenv(variable, value)
    after = revision(model, named=named)
    assert before != after == revision(model, named=named)
    monkeypatch.setenv(variable, "2")
    assert revision(model, named=named) not in (before, after)


def test_harmless_variables_leave_the_revision_unchanged(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang itself sets another SGLANG_RUN_ID in each life."""
    before = revision(model)
    assert "SGLANG_RUN_ID" in HARMLESS_VARIABLES
    for variable in (*HARMLESS_VARIABLES, "PATH_OF_SGLANG", "KVBM_HOST"):
        monkeypatch.setenv(variable, "1")
    assert revision(model) == before


def test_a_file_that_a_variable_names_counts_by_content(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tuned.conf"
    monkeypatch.setenv("SGLANG_HUMMING_ONLINE_QUANT_CONFIG", str(path))
    found = set()
    for content in ("{}", "[]"):
        path.write_text(content)
        found.add(revision(model))
    assert len(found) == 2


@pytest.mark.parametrize("given", FROM_A_HUB, ids=str)
def test_weights_from_modelscope_have_no_name(
    model: str, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any]
) -> None:
    """Goal: what the Hugging Face cache has under that name does not stand for them. A path does,
    wherever it came from."""
    monkeypatch.setenv("SGLANG_USE_MODELSCOPE", "true")
    revision(model, kt_weight_path=model)
    with pytest.raises(UnreadableWeights, match="comes from ModelScope"):
        revision(model, **given)


@pytest.mark.parametrize("value", ["", "0", "false"])
def test_modelscope_that_is_not_asked_changes_no_refusal(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("SGLANG_USE_MODELSCOPE", value)
    with pytest.raises(UnreadableWeights, match="neither a path nor a model in the hub's cache"):
        revision("org/nowhere")


def test_models_of_another_package_have_no_name(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its code may change under the same name: an operator names weights and code."""
    monkeypatch.setenv("SGLANG_EXTERNAL_MODEL_PACKAGE", "my_models")
    with pytest.raises(UnreadableWeights, match="name the weights with `revision`"):
        revision(model)
    assert revision(model, named="poet") != "poet"
