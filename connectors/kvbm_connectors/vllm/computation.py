"""Computation: what of vLLM's configuration enters the computing of K and V, beside the weights.

Two engines that differ in any of it name their blocks apart. Every field of VllmConfig and its
parts enters, and every variable that is set and begins with `VLLM_`, except those that
`harmless.py` lists with a reason: what a later release adds enters until it is looked at. So do a
few variables with other prefixes (`OTHER_VARIABLES` there). Besides:

Enters                              because
- max_model_len, if rope is scaled  LongRoPE and dynamic NTK choose their factors by it; Llama 4
                                    tunes its attention beyond 32,768
- inductor_passes                   an operator's own changes of the model's graph
- runner_type, convert_type         which code computes: a pooling model may look both ways
- the content of files beside the   FP8 scales of an image encoder, a quantisation's configuration,
  model (loading.py)                a generation configuration from elsewhere, a variable's file
- vLLM's release, major and minor   kernels, and how a block is packed

Does not enter                      because
- dtype, cache dtype, layout, block size, heads, how blocks are cut: fields of the namespace
- tensor and pipeline parallelism: blocks are cut by layers and heads, or the namespace says how
- LoRA: part of a request's name (adapters.py)
"""

from __future__ import annotations

import enum
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from types import SimpleNamespace
from typing import Any

from kvbm_connectors.client.variables import variables_in_name
from kvbm_connectors.vllm.harmless import (
    FIELDS,
    HARMLESS_VARIABLES,
    OF_LORA,
    OTHER_VARIABLES,
    PREFIXES,
)

DERIVED = ("runner_type", "convert_type")
"""Attributes of ModelConfig that are no fields."""
LONG = 32_768
"""Tokens of a sequence from which on Llama 4 tunes its attention, unless a file says otherwise."""
NOT_OF_THE_MODEL = frozenset({"_name_or_path", "_commit_hash", "transformers_version"})
"""Fields of a Hugging Face configuration that say where it came from."""
DEEP = 12
"""Levels of a configuration that are looked at."""


def digest_of(
    config: Any,
    version: str,
    *,
    beside: Mapping[str, str] | None = None,
    environ: Mapping[str, str] | None = None,
) -> str:
    """Return 32 hex digits that stand for everything above.

    `beside` stands for the content of files that the configuration names.
    """
    model = config.model_config
    files = beside or {}
    variables = variables_of(os.environ if environ is None else environ)
    found = {
        "engine": entering(config),
        "derived": {name: getattr(model, name, None) for name in DERIVED},
        "passes": getattr(getattr(config, "compilation_config", None), "inductor_passes", None),
        "max_model_len": _length_that_counts(model),
        "beside": files,
        "variables": {name: one for name, one in variables.items() if name not in files},
        "vllm": version.split(".")[:2],
    }
    text = json.dumps(plain(found), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def application_of(lora: Any) -> str:
    """Return what stands for how an engine applies adapters, from its LoRAConfig."""
    if lora is None:
        return ""
    chosen = {name: plain(one) for name, one in _items(lora) if name not in OF_LORA}
    if targets := chosen.get("target_modules"):
        chosen["target_modules"] = sorted(map(str, targets))
    return json.dumps(chosen, sort_keys=True)


def entering(part: Any, path: str = "") -> dict[str, Any]:
    """Return all fields of a configuration that are not harmless, of its parts too."""
    found: dict[str, Any] = {}
    for name, value in _items(part):
        if path + name in FIELDS:
            continue
        found[name] = entering(value, f"{path}{name}.") if _is_part(value) else plain(value)
    return found


def _is_part(value: Any) -> bool:
    """Return whether a value is a part of vLLM's configuration, and not one of Hugging Face, which
    describes itself."""
    if isinstance(value, type) or hasattr(value, "to_dict"):
        return False
    return is_dataclass(value) or isinstance(value, SimpleNamespace)


def _items(part: Any) -> list[tuple[str, Any]]:
    """Return fields and their values; not every release has all of them."""
    if not is_dataclass(part):
        return list(vars(part).items())
    return [(one.name, getattr(part, one.name, None)) for one in fields(part)]


def variables_of(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that are part of a block's name."""
    return variables_in_name(environ, PREFIXES, harmless=HARMLESS_VARIABLES, others=OTHER_VARIABLES)


def _length_that_counts(model: Any) -> int | str | None:
    """Return the longest sequence, as far as the model computes otherwise for another one."""
    config = plain(getattr(model, "hf_config", None))
    if has_scaled_rope(config):
        return int(model.max_model_len)
    if "llama4" in json.dumps(config).lower():
        return "long" if model.max_model_len > LONG else "short"
    return None


def has_scaled_rope(config: Any) -> bool:
    """Return whether positions are encoded in a way that may depend on the longest sequence.

    Looks at every `rope_scaling` and `rope_parameters`, of a text model inside another one, too.
    """
    return any(
        kind not in ("default", "None", "")
        for kind in _rope_types(plain(config), inside=False, levels=DEEP)
    )


def _rope_types(value: Any, *, inside: bool, levels: int) -> Iterable[str]:
    if not isinstance(value, dict) or not levels:
        return
    for name, one in value.items():
        if inside and name in ("rope_type", "type"):
            yield str(one)
        elif isinstance(one, dict):
            below = inside or name in ("rope_scaling", "rope_parameters")
            yield from _rope_types(one, inside=below, levels=levels - 1)


def plain(value: Any, levels: int = DEEP) -> Any:
    """Return a value in terms of JSON, the same in every process and on every host.

    What has no such form (a function, an object of the engine's) is its type's name: no address
    may enter. Whatever it does to the model is in the resolved configuration.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value.name if isinstance(value, enum.Enum) else value
    if not levels:
        return "deeper"
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, Mapping):
        return {
            str(name): plain(one, levels - 1)
            for name, one in value.items()
            if name not in NOT_OF_THE_MODEL
        }
    if isinstance(value, list | tuple):
        return [plain(one, levels - 1) for one in value]
    if isinstance(value, set | frozenset):
        return sorted(json.dumps(plain(one, levels - 1), sort_keys=True) for one in value)
    return _plain_object(value, levels)


def _plain_object(value: Any, levels: int) -> Any:
    if hasattr(value, "to_dict") and not isinstance(value, type):
        return plain(value.to_dict(), levels - 1)
    if is_dataclass(value) and not isinstance(value, type):
        return {
            one.name: plain(getattr(value, one.name, None), levels - 1) for one in fields(value)
        }
    if type(value).__module__ == "torch":
        return str(value)  # A dtype or a device.
    kind = value if isinstance(value, type) else type(value)
    return f"{kind.__module__}.{kind.__qualname__}"
