"""Weights: what SGLang's arguments say of the model, as the revision of a namespace. Pure but for
a look into the model's directory.

The model's name in a storage's configuration is the one it is served under: two models may share
it, and the same tokens make other bytes in each.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from kvbm_connectors.weights import fingerprint

CHANGES = (
    "dtype", "quantization", "kv_cache_dtype", "quantization_param_path",
    "json_model_override_args", "speculative_draft_model_path", "speculative_algorithm",
)  # fmt: skip
"""Arguments that change what a page holds for the same weights."""
UNCHANGED = (None, "", "auto", "{}")


def revision_of(arguments: Any) -> str:
    """The commit of a hub model, a fingerprint of a directory, and what changes the meaning of
    either. Empty when the arguments are not known."""
    path = str(getattr(arguments, "model_path", None) or "")
    if path and Path(path).is_dir():
        weights = fingerprint(Path(path))
    else:
        weights = f"{path}@{getattr(arguments, 'revision', None) or ''}" if path else ""
    values = {name: getattr(arguments, name, None) for name in CHANGES}
    changes = {name: str(value) for name, value in values.items() if value not in UNCHANGED}
    if not changes:
        return weights
    text = json.dumps(changes, sort_keys=True)
    return f"{weights}+{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"
