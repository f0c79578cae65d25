"""Loading: names for the weights of vLLM's models, where its loader reads files of this host.

A name is the content of the files below the model's path. So a loader must compute with these
files and with nothing else. Formats that do are listed in LOCAL. Every other one may take weights
from a daemon, a bucket or another process, whose content is not seen here; so may a plugin's
loader, under whichever name it was registered, and an option that is not in LOADER_OPTIONS.
An engine that loads so passes through, unless an operator names the weights (`revision`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from kvbm_connectors.client import variables
from kvbm_connectors.client.loading import refusal_of_format, refusal_of_options
from kvbm_connectors.client.weights import (
    UnreadableWeights,
    content_of,
    fingerprint,
    resolve,
)
from kvbm_connectors.vllm.computation import plain, variables_of

LOCAL = frozenset({
    "auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "mistral", "pt",
    "runai_streamer", "runai_streamer_sharded", "sharded_state", "bitsandbytes", "gguf",
})  # fmt: skip
"""Left out: tensorizer (a URI), modelexpress and ipc_cache (other processes), plugins, and npcache,
which reads the arrays of an earlier start from `np/`, however the files beside it have changed."""
ELSEWHERE = ("audio_model_id", "text_model_id")
"""Fields of a Hugging Face configuration that name a further model to load weights of."""

QUANTISATION_FILE = "quantization_config_file"
"""A key of `hf_overrides`: torchao's configuration."""
OWN = "vllm."

Loaders = Mapping[str, type]
"""vLLM's loaders by format."""


def weights_of(config: Any, loaders: Loaders | None = None) -> str:
    """Return a name for the weights that an engine computes with. Raises UnreadableWeights."""
    if refusal := refusal_of_quantisation(config):
        raise UnreadableWeights(refusal)
    speculative = config.speculative_config
    sources = [(config.model_config, config.load_config)]
    draft = getattr(speculative, "draft_model_config", None)
    if draft is not None:
        load = getattr(speculative, "draft_load_config", None) or config.load_config
        sources.append((draft, load))
    life = str(config.instance_id)
    names = [_named(model, load, life, loaders) for model, load in sources]
    return "/".join(dict.fromkeys(names))


def beside(config: Any, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the content of files that change what is computed, and are not below the model's path.

    Raises UnreadableWeights.
    """
    model = config.model_config
    found = {"encoder_scales": _encoder_scales(config), "generation": _generation(model)}
    overrides = getattr(model, "hf_overrides", None)
    file = overrides.get(QUANTISATION_FILE) if isinstance(overrides, Mapping) else None
    if file:
        found[QUANTISATION_FILE] = content_of(str(file))
    found |= variables.contents_of_files(variables_of(environ))
    return {name: content for name, content in found.items() if content}


def _encoder_scales(config: Any) -> str:
    """Return the scales of an FP8 image encoder.

    Without a file they follow the images that this engine has seen: they have its life's name.
    """
    multimodal = getattr(config.model_config, "multimodal_config", None)
    path = getattr(multimodal, "mm_encoder_fp8_scale_path", None)
    if path:
        return content_of(path)
    dynamic = getattr(multimodal, "mm_encoder_attn_dtype", None) == "fp8"
    return f"dynamic/{config.instance_id}" if dynamic else ""


def _generation(model: Any) -> str:
    """Return the digest of a generation configuration that is not the one in the model's
    directory."""
    kind = getattr(model, "generation_config", None)
    place = getattr(model, "hf_config_path", None) if kind in (None, "auto", "vllm") else kind
    if not place:
        return ""
    path = resolve(str(place)) / "generation_config.json"
    return content_of(path) if path.exists() else ""


def _named(model: Any, load: Any, life: str, loaders: Loaders | None) -> str:
    """Return the fingerprints of a model's weights, or the engine's life for those that it draws.
    Raises UnreadableWeights."""
    if str(load.load_format) == "dummy":
        return f"dummy/{life}"  # Trainers push the real weights later, each other ones.
    refusal = refusal_of_loading(load, loaders)
    if refusal:
        raise UnreadableWeights(refusal)
    refusal = refusal_of_code(model)
    if refusal:
        raise UnreadableWeights(refusal)
    elsewhere = getattr(model, "model_weights", "")
    if elsewhere and elsewhere != model.model:
        raise UnreadableWeights(f"the weights come from {elsewhere}")
    commit = getattr(model.hf_config, "_commit_hash", None) or model.revision
    places = [(str(model.model), commit), *((one, None) for one in _further(model))]
    return "/".join(_content(name, revision, load) for name, revision in places)


def _content(name: str, revision: str | None, load: Any) -> str:
    refuse_modelscope(name)
    return fingerprint(resolve(name, revision, load.download_dir))


def refusal_of_code(model: Any) -> str:
    """Return why code computes that the model's files and vLLM's release do not name, or `""`."""
    name_it = "name it and the weights with `revision`"
    if revision := getattr(model, "code_revision", None):
        return f"the model's code is that of code_revision {revision}; {name_it}"
    if getattr(model, "trust_remote_code", False):
        codes = plain(getattr(model.hf_config, "auto_map", None))
        if "--" in str(codes):
            return f"the model's code comes from another repository ({codes}); {name_it}"
    foreign = _foreign_class(model)
    return f"the model's class is a plugin's: {foreign}; {name_it}" if foreign else ""


def _foreign_class(model: Any) -> str:
    """Return the module of the model's class, if it is not one of vLLM's."""
    models = getattr(getattr(model, "registry", None), "models", {})
    entry = models.get(getattr(model, "architecture", ""))
    module = getattr(entry, "module_name", "") or getattr(
        getattr(entry, "model_cls", None), "__module__", ""
    )
    return "" if not module or module.startswith(OWN) else str(module)


def refusal_of_quantisation(config: Any) -> str:
    """Return why the code that unpacks the weights has no name; `""` if it is vLLM's."""
    quantisation = getattr(config, "quant_config", None)
    module = type(quantisation).__module__
    if quantisation is None or module.startswith(OWN):
        return ""
    return f"the quantisation is a plugin's: {module}; name it and the weights with `revision`"


def refuse_modelscope(model: str) -> None:
    """Raise UnreadableWeights where vLLM asks ModelScope for this model."""
    asked = os.environ.get("VLLM_USE_MODELSCOPE", "").strip().lower() in ("1", "true")
    variables.refuse_modelscope(model, asked=asked)


def _further(model: Any) -> Iterator[str]:
    """Yield other models that weights of this one are loaded from."""
    for field in ELSEWHERE:
        if name := getattr(model.hf_config, field, None):
            yield str(name)


def refusal_of_loading(load: Any, loaders: Loaders | None = None) -> str:
    """Return why the files of a model do not say what is loaded; `""` if they do."""
    kind = str(load.load_format)
    if refusal := refusal_of_format(kind, LOCAL):
        return refusal
    loader = (loaders or {}).get(kind)
    if loader is not None and not loader.__module__.startswith(OWN):
        return f"load_format {kind} is a plugin's: {loader.__module__}.{loader.__qualname__}"
    return refusal_of_options(load.model_loader_extra_config or {})
