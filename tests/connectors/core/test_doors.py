"""The doors of the connector's core: its inputs, `view`, `story` and `check`."""

from __future__ import annotations

from pathlib import Path

import pytest
from kvbm_connectors.core.core import ConnectorCore

from tests.connectors.helpers import Engine
from tests.doors import ROOT, doors_used, imported, wrong_doors

CONNECTORS = "connectors/kvbm_connectors"
SHELLS = [f"{CONNECTORS}/{name}" for name in ("client", "vllm", "sglang", "trtllm", "sim")]
DOORS = {name for name in vars(ConnectorCore) if not name.startswith("_")}
MODULES = {"agent_hints", "core", "limits", "messages", "prefill_meter"}
"""What shells may import: two cores and their words. The other modules are parts of the cores."""


def test_shells_use_the_doors_of_the_core_only() -> None:
    """Goal: a part of the core can be changed without any shell."""
    assert {"lookup", "offer", "tick", "view", "story", "check"} <= DOORS
    assert wrong_doors(SHELLS, DOORS) == []
    used = doors_used((ROOT / CONNECTORS / "client/scheduler.py").read_text())
    assert {"lookup", "found", "tick", "view"} <= used.keys(), "the shell is looked at"


@pytest.mark.parametrize("folder", SHELLS)
def test_shells_import_no_part_of_the_core(folder: str) -> None:
    """Goal: lookups, offers and the outbox stay inside."""
    paths: list[Path] = sorted((ROOT / folder).rglob("*.py"))
    assert paths
    for path in paths:
        assert imported(path.read_text(), "kvbm_connectors.core") <= MODULES, path


def test_a_look_at_a_part_is_found() -> None:
    """The rule sees a part behind `core` and behind an attribute of that name."""
    source = "core._lookups.story\nself._core.epoch\nself._core.view.epoch\n"
    assert doors_used(source) == {"_lookups": 1, "epoch": 2, "view": 3}


def test_the_view_is_frozen_and_its_counts_cannot_be_written() -> None:
    """A shell that could write a counter would be a second writer of the core's state."""
    view = Engine().core.view
    with pytest.raises(AttributeError):
        view.epoch = 1  # type: ignore[misc]
    with pytest.raises(TypeError):
        view.counts["loads"] = 1  # type: ignore[index]


def test_a_story_has_the_moves_of_its_request_only() -> None:
    """A message of a broken invariant tells how the request came there."""
    engine = Engine()
    engine.look_up(5, request="other")
    engine.found(1, 2)
    engine.load_ended(engine.take(70, 71))
    lookup = engine.lookups[-1].lookup
    assert engine.core.story("r") == [
        f"lookup {lookup} of r: {event}" for event in ("asked", "found", "taken", "load ended")
    ]
