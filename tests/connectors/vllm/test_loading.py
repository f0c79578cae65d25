"""What vLLM loads weights from: the model's files, which have a name, or something else."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kvbm_connectors.client.weights import UnreadableWeights
from kvbm_connectors.vllm.computation import digest_of
from kvbm_connectors.vllm.loading import beside, weights_of


def model_at(directory: Path, content: bytes = b"1", **hf: Any) -> SimpleNamespace:
    """vLLM's ModelConfig of a model in a directory of its own."""
    directory.mkdir()
    (directory / "model.safetensors").write_bytes(content)
    return SimpleNamespace(
        model=str(directory), revision=None, hf_config=SimpleNamespace(**hf),
        multimodal_config=None, max_model_len=8, model_weights="",
    )  # fmt: skip


def load(kind: str = "auto", **options: Any) -> SimpleNamespace:
    """vLLM's LoadConfig."""
    return SimpleNamespace(
        load_format=kind, download_dir=None, model_loader_extra_config=options, ignore_patterns=[]
    )


def engine(model: Any, loading: Any, *, life: str = "1", **draft: Any) -> SimpleNamespace:
    """vLLM's VllmConfig, as far as weights are concerned."""
    speculative = SimpleNamespace(**draft) if draft else None
    return SimpleNamespace(
        model_config=model, load_config=loading, speculative_config=speculative,
        instance_id=life, cache_config=None,
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["auto", "safetensors", "runai_streamer", "sharded_state", "pt"])
def test_formats_that_read_the_model_s_files_have_its_name(tmp_path: Path, kind: str) -> None:
    """The format itself is another field of the namespace."""
    model = model_at(tmp_path / "model")
    assert weights_of(engine(model, load(kind))) == weights_of(engine(model, load()))


@pytest.mark.parametrize(
    "kind", ["tensorizer", "modelexpress", "ipc_cache", "npcache", "a_plugin_s"]
)
def test_other_formats_have_no_name(tmp_path: Path, kind: str) -> None:
    """The reason names the format, and those that are allowed."""
    config = engine(model_at(tmp_path / "model"), load(kind))
    with pytest.raises(UnreadableWeights, match=rf"load_format {kind}.*safetensors"):
        weights_of(config)


def test_a_plugin_under_the_name_of_a_known_format_has_no_name(tmp_path: Path) -> None:
    """vLLM lets a plugin take the place of one of its own loaders."""
    theirs = type("DefaultModelLoader", (), {"__module__": "vllm.model_executor.model_loader"})
    plugins = type("Loader", (), {"__module__": "plugin.loaders"})
    config = engine(model_at(tmp_path / "model"), load("auto"))
    assert weights_of(config, {"auto": theirs}) == weights_of(config)
    with pytest.raises(UnreadableWeights, match="plugin"):
        weights_of(config, {"auto": plugins})


@pytest.mark.parametrize(
    "options",
    [
        {"tensorizer_uri": "s3://bucket/weights"},
        {"qlora_adapter_name_or_path": "/srv/adapter"},
        {"pattern": "../other/model-rank-{rank}-part-{part}.safetensors"},
        {"pattern": "rank-{rank}-part-{part}.shard"},
        {"pattern": ".rank-{rank}-part-{part}.safetensors"},
    ],
)
def test_options_that_lead_elsewhere_have_no_name(tmp_path: Path, options: dict[str, str]) -> None:
    """Whatever the format does with them."""
    model = model_at(tmp_path / "model")
    weights_of(engine(model, load("auto", enable_multithread_load=True)))
    with pytest.raises(UnreadableWeights, match="model_loader_extra_config"):
        weights_of(engine(model, load("sharded_state", **options)))


def test_a_pattern_of_safetensors_files_is_the_model_s(tmp_path: Path) -> None:
    """As vLLM's own one is."""
    loading = load("sharded_state", pattern="model-rank-{rank}-part-{part}.safetensors")
    model = model_at(tmp_path / "model")
    assert weights_of(engine(model, loading)) == weights_of(engine(model, load()))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("code_revision", "main"),
        ("hf_config", SimpleNamespace(auto_map={"AutoModel": "other/repo--modeling.Model"})),
        ("registry", SimpleNamespace(models={"Own": SimpleNamespace(module_name="plugin.model")})),
        ("registry", SimpleNamespace(models={"Own": SimpleNamespace(model_cls=SimpleNamespace)})),
    ],
)
def test_code_that_is_neither_the_model_s_nor_vllm_s_has_no_name(
    tmp_path: Path, field: str, value: Any
) -> None:
    """Another commit, another repository, a plugin."""
    model = model_at(tmp_path / "model", auto_map={"AutoModel": "modeling.Model"})
    model.trust_remote_code, model.architecture = True, "Own"
    own = SimpleNamespace(module_name="vllm.model_executor.models.own")
    model.registry = SimpleNamespace(models={"Own": own})
    weights_of(engine(model, load()))
    setattr(model, field, value)
    with pytest.raises(UnreadableWeights, match="name it and the weights with `revision`"):
        weights_of(engine(model, load()))


def test_a_plugin_s_quantisation_has_no_name(tmp_path: Path) -> None:
    """It unpacks the weights."""
    config = engine(model_at(tmp_path / "model"), load())
    for module in ("vllm.model_executor.layers.quantization.fp8", "plugin.quantisation"):
        config.quant_config = type("Config", (), {"__module__": module})()
        if module.startswith("vllm."):
            weights_of(config)
    with pytest.raises(UnreadableWeights, match=r"plugin\.quantisation"):
        weights_of(config)


@pytest.mark.parametrize("field", ["hf_overrides", "generation_config", "hf_config_path"])
def test_files_beside_the_model_count_by_content(tmp_path: Path, field: str) -> None:
    """A quantisation's configuration, and a generation configuration from elsewhere."""
    model = model_at(tmp_path / "model")
    path = tmp_path / "elsewhere" / "generation_config.json"
    path.parent.mkdir()
    whole: dict[str, Any] = {"hf_overrides": {"quantization_config_file": str(path)}}
    setattr(model, field, whole.get(field, str(path.parent)))
    found = []
    for content in ("{}", '{"attn_temperature_tuning": true}'):
        path.write_text(content)
        config = engine(model, load())
        found.append(digest_of(config, "0.32", beside=beside(config)))
    assert found[0] != found[1]


def test_a_variable_that_names_a_file_counts_by_content(tmp_path: Path) -> None:
    """Hosts may keep the file in different places."""
    config = engine(model_at(tmp_path / "model"), load())
    found = []
    for place, content in (("a", "{}"), ("b", "{}"), ("b", "[]")):
        (tmp_path / place).write_text(content)
        environ = {"VLLM_HUMMING_ONLINE_QUANT_CONFIG": str(tmp_path / place)}
        files = beside(config, environ)
        found.append(digest_of(config, "0.32", beside=files, environ=environ))
    first, copy, other = found
    assert first == copy != other


def test_a_draft_is_loaded_in_its_own_way(tmp_path: Path) -> None:
    """A draft model may have a load format of its own."""
    model, draft = model_at(tmp_path / "model"), model_at(tmp_path / "draft", b"2")
    with_draft = engine(model, load(), draft_model_config=draft)
    assert weights_of(with_draft) != weights_of(engine(model, load()))
    with pytest.raises(UnreadableWeights, match="load_format ipc_cache"):
        weights_of(
            engine(model, load(), draft_model_config=draft, draft_load_config=load("ipc_cache"))
        )


def test_weights_of_a_further_model_count(tmp_path: Path) -> None:
    """Ultravox takes its audio tower and its language model from models of their own."""
    found = set()
    for number, content in enumerate((b"1", b"2")):
        tower = model_at(tmp_path / f"tower{number}", content)
        model = model_at(tmp_path / f"model{number}", audio_model_id=tower.model)
        found.add(weights_of(engine(model, load())))
    assert len(found) == 2


def test_a_model_that_modelscope_brings_has_no_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub's cache may hold another model of that name."""
    model = model_at(tmp_path / "model")
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "true")
    weights_of(engine(model, load()))
    model.model = "org/elsewhere"
    with pytest.raises(UnreadableWeights, match="ModelScope"):
        weights_of(engine(model, load()))


def test_dummy_weights_are_named_by_the_engine_s_life(tmp_path: Path) -> None:
    """Each life draws its own."""
    model = model_at(tmp_path / "model")
    first, other = (weights_of(engine(model, load("dummy"), life=life)) for life in "12")
    assert first != other


def test_scales_of_an_encoder_count_by_content(tmp_path: Path) -> None:
    """The file lies outside the model's directory, and a path says nothing of what it holds."""
    model = model_at(tmp_path / "model")
    config = engine(model, load())
    found = [digest_of(config, "0.32", beside=beside(config))]
    for place, content in (("a", "{}"), ("b", "{}"), ("a", '{"q": 2}')):
        path = tmp_path / f"{place}.json"
        path.write_text(content)
        model.multimodal_config = SimpleNamespace(mm_encoder_fp8_scale_path=str(path))
        found.append(digest_of(config, "0.32", beside=beside(config)))
    plain, first, copy, other = found
    assert first == copy
    assert len({plain, first, other}) == 3
    model.multimodal_config = SimpleNamespace(mm_encoder_fp8_scale_path=str(tmp_path / "nothing"))
    with pytest.raises(UnreadableWeights):
        beside(config)


def test_scales_that_follow_the_images_are_an_engine_s_own(tmp_path: Path) -> None:
    """Without a file, vLLM chooses them by what it has seen."""
    model = model_at(tmp_path / "model")
    assert beside(engine(model, load())) == {}
    model.multimodal_config = SimpleNamespace(mm_encoder_attn_dtype="fp8")
    first, other = (beside(engine(model, load(), life=life)) for life in "12")
    assert first != other
