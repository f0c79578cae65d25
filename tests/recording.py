"""Recorders: what a module of the product makes by a public name, for a test to look at."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest


def recorded(monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str) -> list[Any]:
    """Return a list of everything that `module` makes from now on by calling `name`."""
    made: list[Any] = []
    make = getattr(module, name)

    def record(*args: Any, **kwargs: Any) -> Any:
        made.append(make(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(module, name, record)
    return made
