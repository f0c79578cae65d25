"""Patches: methods of the product that are replaced in this process, and put back."""

from __future__ import annotations

import importlib
from typing import Any

_ABSENT = object()
_originals: list[tuple[Any, str, Any]] = []


def replace(module: str, owner: str, name: str, value: object) -> None:
    """Put something in the place of a method that must be there."""
    target, old = _found(module, owner, name)
    assert target is not None, f"{module}.{owner}.{name} is not there: adapt the plant"
    _originals.append((target, name, old))
    setattr(target, name, value)


def add(module: str, owner: str, name: str, value: object) -> None:
    """Put something into a class that has no attribute of that name: its instances have."""
    target = getattr(importlib.import_module(module), owner)
    assert name not in vars(target), f"{module}.{owner}.{name} is there: replace it"
    _originals.append((target, name, _ABSENT))
    setattr(target, name, value)


def replace_if_there(module: str, owner: str, name: str, value: object) -> None:
    """The same for what only a mended product has: in another one the defect is without us."""
    try:
        target, _ = _found(module, owner, name)
    except ModuleNotFoundError:
        return
    if target is not None:
        replace(module, owner, name, value)


def original(module: str, owner: str, name: str) -> Any:
    """What is there now."""
    target, old = _found(module, owner, name)
    assert target is not None, f"{module}.{owner}.{name} is not there: adapt the plant"
    return old


def restore() -> None:
    """Put all back."""
    while _originals:
        target, name, old = _originals.pop()
        if old is _ABSENT:
            delattr(target, name)
        else:
            setattr(target, name, old)


def _found(module: str, owner: str, name: str) -> tuple[Any, Any]:
    found = importlib.import_module(module)
    target = getattr(found, owner, None) if owner else found
    if target is None or not hasattr(target, name):
        return None, None
    return target, vars(target)[name] if name in vars(target) else getattr(target, name)
