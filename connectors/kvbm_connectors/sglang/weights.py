"""Weights: what SGLang's arguments say of the model, as the revision of a namespace. Pure but for
a look into files.

The model's name in a storage's configuration is the one it is served under: two models may share
it, and the same tokens make other bytes in each. Every argument and every variable that is set
enters, except those that `harmless.py` lists with a reason.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Mapping
from typing import Any

from kvbm_connectors.client.loading import refusal_of_format, refusal_of_options
from kvbm_connectors.client.weights import (
    UnreadableWeights,
    content_of,
    fingerprint,
    resolve,
)
from kvbm_connectors.sglang.adapters import adapters_of
from kvbm_connectors.sglang.engine_life import life_of_weights
from kvbm_connectors.sglang.harmless import HARMLESS
from kvbm_connectors.sglang.variables import OWN_MODELS, refuse_modelscope, variables_of

ATTACHMENTS = itertools.count(1)
"""Storages that were attached while this process serves: SGLang attaches one in each rank."""
LOCAL = frozenset({
    "auto", "safetensors", "fastsafetensors", "pt", "sharded_state", "gguf",
    "bitsandbytes", "mistral", "layered", "runai_streamer",
})  # fmt: skip
"""Load formats that read the model's files. Others may ask a server or another engine."""
FILES = ("quantization_param_path", "decrypted_config_file", "decrypted_draft_config_file")
"""Arguments that name a file beside the model: it counts by its content."""
FURTHER = ("kt_weight_path", "modelopt_checkpoint_restore_path", "uno_lora_path")
"""Arguments that name further weights."""
UNCHANGED = (None, "", "auto", "{}")
MAY_BE_UNSET = str | None
"""The types of values in `UNCHANGED`; other objects may compare in a way of their own."""
NOT_FIELDS = frozenset({"_resolution_finished", "_resolution_failed", "_input_frozen"})
"""Attributes of SGLang's arguments that say how far they are resolved."""
NEVER_NS = 2**63
DUMMY = "dummy"


def _weights(path: str, revision: str | None, load_format: str, directory: str | None) -> str:
    if load_format == DUMMY:  # Drawn, and trainers push the real ones later.
        return DUMMY
    if refusal := refusal_of_format(load_format, LOCAL):
        raise UnreadableWeights(refusal)
    refuse_modelscope(path)
    return fingerprint(resolve(path, revision, directory))


def _refusal(arguments: Any, values: Mapping[str, Any]) -> str:
    """Return why other weights or code than the model's files may compute, or `""`."""
    if _text(values.get("weight_cache_mode")) not in ("", "off"):
        return "weight_cache_mode takes weights from another process"
    for name in ("custom_weight_loader", "checkpoint_engine_wait_weights_before_ready"):
        if getattr(arguments, name, None):
            return f"{name} may bring weights from elsewhere than the model's files"
    if os.environ.get(OWN_MODELS):
        return f"{OWN_MODELS} brings the model's code from a package"
    if getattr(arguments, "trust_remote_code", False) and _has_foreign_code(arguments):
        return "the model's code comes from another repository"
    options = values.get("model_loader_extra_config") or {}
    try:
        return refusal_of_options(json.loads(options) if isinstance(options, str) else options)
    except ValueError as error:
        return f"model_loader_extra_config does not parse: {error}"


def _has_foreign_code(arguments: Any) -> bool:
    """Tell whether `auto_map` of the model's configuration names another repository's code."""
    path = str(getattr(arguments, "model_path", None) or "")
    directory = getattr(arguments, "download_dir", None)
    config = resolve(path, getattr(arguments, "revision", None), directory) / "config.json"
    try:
        return "--" in str(json.loads(config.read_bytes()).get("auto_map"))
    except (OSError, ValueError, AttributeError):
        return False  # Without a configuration there is no code that it names.


def revision_of(
    arguments: Any,
    *,
    named: str = "",
    since_ns: int = NEVER_NS,
    version: str = "",
    is_late: bool = False,
    replica: int = 0,
) -> str:
    """Return the weights by their content, and what changes what is computed with them.

    `named` is what an operator calls the model's weights, if their content cannot be read here.
    `since_ns` is when the engine's process began: adapters that were changed later are refused.
    `version` is SGLang's. `is_late`: the engine has served before, so that its weights may have
    been updated, and each call has another name. `replica` tells data-parallel ranks apart where
    weights have no content. Raises UnreadableWeights when their content is not known.
    """
    if arguments is None:
        if not named:
            raise UnreadableWeights("SGLang's arguments are not known; name the weights, and all "
                                    "that changes what is computed, with `revision`")  # fmt: skip
        return named
    values = _values(arguments)
    refusal = "" if named else _refusal(arguments, values)
    if refusal:
        raise UnreadableWeights(f"{refusal}; name the weights with `revision`")
    found = _changes(values) | _beside(values)
    if adapters := adapters_of(arguments, since_ns):
        found["lora"] = adapters
    if variables := variables_of(os.environ):
        found["variables"] = variables
    if version:
        found["sglang"] = version
    late = f"attached:{life_of_weights(replica)}:{next(ATTACHMENTS)}" if is_late else ""
    weights = named or late or _all_weights(arguments)
    if DUMMY in weights.split("/") and not named:
        weights = f"{weights}:{life_of_weights(replica)}"
    if not found:
        return weights
    text = json.dumps(found, sort_keys=True)
    return f"{weights}+{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"


def _all_weights(arguments: Any) -> str:
    """Return what stands for the model's weights, and for a draft's."""
    path = str(getattr(arguments, "model_path", None) or "")
    directory = getattr(arguments, "download_dir", None)
    kind = _text(getattr(arguments, "load_format", None)) or "auto"
    revision = getattr(arguments, "revision", None)
    if not path:
        raise UnreadableWeights("SGLang's arguments name no model")
    weights = _weights(path, revision, kind, directory)
    draft = str(getattr(arguments, "speculative_draft_model_path", None) or "")
    if not draft:
        return weights
    revision = getattr(arguments, "speculative_draft_model_revision", None)
    kind = _text(getattr(arguments, "speculative_draft_load_format", None)) or kind
    return f"{weights}/{_weights(draft, revision, kind, directory)}"


def _values(arguments: Any) -> dict[str, Any]:
    """Return all arguments as they were resolved; a release without `resolved_dict` resolves in
    place."""
    resolved = getattr(arguments, "resolved_dict", None)
    try:
        values: Mapping[str, Any] = resolved() if callable(resolved) else vars(arguments)
    except Exception as error:  # SGLang's code: of any type.
        raise UnreadableWeights(f"SGLang's arguments are not resolved: {error!r}") from error
    return {name: value for name, value in values.items() if name not in NOT_FIELDS}


def _changes(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return every argument that is set and not known to be harmless."""
    return {
        name: _content_or_value(value)
        for name, value in values.items()
        if name not in HARMLESS and not (isinstance(value, MAY_BE_UNSET) and value in UNCHANGED)
    }


def _content_or_value(value: Any) -> Any:
    """Return the digest of a file's content in place of its path, which says nothing of it; other
    values in terms of JSON."""
    if isinstance(value, str) and os.path.isfile(value):
        return content_of(value)
    return _plain(value)


def _plain(value: Any) -> Any:
    """Return a value in terms of JSON, the same in every process: no address of an object
    enters."""
    value = getattr(value, "value", value)  # Some releases give an enumeration's member.
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, set | frozenset):
        return sorted(json.dumps(_plain(one), sort_keys=True) for one in value)
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _beside(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what stands for the files and weights beside the model's, by argument."""
    found: dict[str, Any] = {name: content_of(values[name]) for name in FILES if values.get(name)}
    for name in FURTHER:
        if path := values.get(name):
            refuse_modelscope(str(path))
            found[name] = fingerprint(resolve(str(path)))
    return found


def _text(value: object) -> str:
    """Return a value of the arguments as text; some releases give an enumeration's member."""
    return "" if value is None else str(getattr(value, "value", value))
