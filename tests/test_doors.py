"""The doors of a core: `step` is the way in, effects and `view` are the way out.

A shell that reads a part of its core makes that part a second interface: no later change of the
core is safe then. The rule is held by looking at the attributes of every `core` and `_core`.
"""

from __future__ import annotations

import pytest

from tests.doors import ROOT, VIEW, doors_used, wrong_doors

DOORS = {"step", "settle", "check", "start", "stop", "story", "view"}
DISK = "services/disk_tier/kvbm_disk_tier"
SHELLS = {
    "host tier": ["services/host_tier/kvbm_host_tier/shell"],
    "disk and object tier": [f"{DISK}/shell", f"{DISK}/objects/shell"],
}
"""The folders of the shells, by the name of their core. Connectors and index have doors of their
own: see `tests/connectors/core/test_doors.py` and `tests/services/index/core/test_doors.py`."""


@pytest.mark.parametrize("core", SHELLS)
def test_the_shell_uses_the_doors_of_its_core_only(core: str) -> None:
    """Goal: a core can be changed inside without its shell."""
    assert wrong_doors(SHELLS[core], DOORS) == []
    used = [
        doors_used(path.read_text())
        for folder in SHELLS[core]
        for path in (ROOT / folder).glob("*.py")
    ]
    assert any("view" in attributes for attributes in used), "the shell reads no view"


def test_a_look_at_a_part_is_found() -> None:
    """The rule sees attributes of a name, of an attribute, and behind another one."""
    source = "core.tier.counts\nself._core.tier\nself._core.view.counts\nshell.core.step(1)\n"
    assert doors_used(source) == {"tier": 1, "view": 3, "step": 4}
    assert doors_used(source, VIEW) == {"counts": 3}
