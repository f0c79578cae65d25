"""Arguments: TensorRT-LLM's own in terms of JSON, the same in every process and rank. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Set
from dataclasses import is_dataclass
from enum import Enum
from functools import cached_property
from pathlib import PurePath
from types import SimpleNamespace
from typing import Any


def changes_of(holder: object, harmless: Set[str]) -> dict[str, Any]:
    """Return every argument that is set and not known to be harmless."""
    return {
        name: plain(value)
        for name, value in _fields_of(holder).items()
        if not name.startswith("_") and value is not None and name not in harmless
    }


def _fields_of(holder: object) -> Mapping[str, Any]:
    """Return the arguments of a configuration, without what it has computed from them."""
    found: Mapping[str, Any] = getattr(holder, "__dict__", {})
    cached = {
        name
        for kind in type(holder).__mro__
        for name, one in vars(kind).items()
        if isinstance(one, cached_property)
    }
    return {name: value for name, value in found.items() if name not in cached}


def plain(value: Any) -> Any:
    """Return a value in terms of JSON; of what is no argument its type alone: no address may
    enter."""
    if isinstance(value, Enum):  # The engine's enumerations count their members.
        return value.name
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, Mapping):
        return {str(name): plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, Set):
        return sorted(json.dumps(plain(one), sort_keys=True) for one in value)
    kind = type(value).__qualname__
    is_config = is_dataclass(value) or isinstance(value, SimpleNamespace)
    if is_config or hasattr(value, "model_dump_json"):
        return {"": kind} | changes_of(value, frozenset())
    return kind
