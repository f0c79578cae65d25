"""The doors of the index's core: `step`, its questions, and `view`."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest
from kvbm_index.core.core import IndexCore

from tests.doors import ROOT, doors_used, wrong_doors

SHELL = "services/index/kvbm_index/shell"
QUESTIONS = {
    "match", "scores", "routes", "engines", "holders_of", "peers", "dump", "holders", "image",
    "is_quiet",
}  # fmt: skip
"""Methods that change nothing; each answers one verb, or makes an image."""
DOORS = {"step", "check", "story", "view"} | QUESTIONS


def test_the_shell_uses_the_doors_of_the_core_only() -> None:
    """Goal: a part of the core can be changed without the shell."""
    assert all(hasattr(IndexCore, name) for name in DOORS)
    assert wrong_doors([SHELL], DOORS) == []
    used = doors_used((ROOT / SHELL / "service.py").read_text())
    used |= doors_used((ROOT / SHELL / "questions.py").read_text())
    assert {"match", "view"} <= used.keys(), "the shell is looked at"


def test_the_view_is_frozen() -> None:
    """A new core has seen nothing, and its view cannot be written."""
    view = IndexCore().view
    assert (view.position, dict(view.positions), view.statistics.blocks) == (0, {}, 0)
    with pytest.raises(FrozenInstanceError):
        view.position = 1  # type: ignore[misc]
