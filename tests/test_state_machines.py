"""Every state machine has its drawing in docs/state_machines.md, and the drawing is its table.

`python -m tests.test_state_machines` writes the drawings again.
"""

from __future__ import annotations

import importlib
import re
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from kvbm_common.tier.machine import InvalidTransition, Machine, label

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs/state_machines.md"
PACKAGES = [
    *("libs/kvbm_common", "connectors"),
    *(f"services/{name}" for name in ("index", "host_tier", "disk_tier", "metrics")),
]
DRAWING = re.compile(
    r"## (?P<name>[^\n]+)\n\n(?P<text>.*?)\n\n```mermaid\n(?P<drawing>.*?)\n```", re.S
)


def machines() -> dict[str, tuple[str, Machine[Any]]]:
    """Return every machine of the product by its name, with the module that declares it."""
    found: dict[str, tuple[str, Machine[Any]]] = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if not re.search(r"^[A-Z_]+ = Machine\(", path.read_text(), re.M):
                continue
            relative = path.relative_to(ROOT / package)
            module = importlib.import_module(".".join(relative.with_suffix("").parts))
            for value in vars(module).values():
                if isinstance(value, Machine) and value.name not in found:
                    found[value.name] = (str(path.relative_to(ROOT)), value)
    return found


def drawing_of(machine: Machine[Any]) -> str:
    """Return a machine as a Mermaid `stateDiagram-v2`; arrows of one pair share a line."""
    arrows: dict[tuple[str, str], list[str]] = {}
    for (state, event), to in machine.transitions.items():
        arrows.setdefault((label(state), label(to)), []).append(event)
    lines = [f"    {at} --> {to}: {', '.join(why)}" for (at, to), why in arrows.items()]
    return "\n".join(["stateDiagram-v2", *lines])


def test_every_machine_is_drawn_from_its_table() -> None:
    """Goal: a drawing cannot differ from the code. Red: run this module to write them again."""
    drawn = {one["name"]: one["drawing"] for one in DRAWING.finditer(DOCUMENT.read_text())}
    assert drawn == {
        name[0].upper() + name[1:]: drawing_of(machine) for name, (_, machine) in machines().items()
    }


@pytest.mark.parametrize("name", machines())
def test_every_state_can_be_reached_and_has_an_event(name: str) -> None:
    """Goal: no state of a table is dead. The first line of a table is where a thing begins."""
    machine = machines()[name][1]
    states = {state for state, _ in machine.transitions} | set(machine.transitions.values())
    first = next(iter(machine.transitions))[0]
    reached: set[Enum | None] = {first}
    while more := {
        to for (at, _), to in machine.transitions.items() if at in reached and to not in reached
    }:
        reached |= more
    assert reached == states


def test_an_event_without_a_transition_raises_with_the_story() -> None:
    """A refused event names the machine, the state, what it knows, and the thing's story."""
    machine = machines()["breaker"][1]
    closed = machine.next(None, "made")
    assert machine.has(closed, "failed")
    assert not machine.has(closed, "paused")
    with pytest.raises(InvalidTransition, match=r"breaker: no 'paused' in CLOSED.*: disk 1"):
        machine.next(closed, "paused", "disk 1")
    with pytest.raises(InvalidTransition, match=r"no 'failed' in CLOSED"):
        machine.end(closed, "failed")
    assert not machine.ends(closed, "failed")


def test_an_event_may_end_a_thing() -> None:
    """The end of a thing is in its table like a state."""
    machine = machines()["pull"][1]
    in_flight = machine.next(None, "started")
    assert machine.ends(in_flight, "done")
    assert not machine.ends(in_flight, "failed")
    assert not machine.ends(in_flight, "settled"), "not in the table"


def write() -> None:
    """Write every drawing again; the text under a heading stays."""
    old = DOCUMENT.read_text()
    texts = {one["name"]: one["text"] for one in DRAWING.finditer(old)}
    parts = [old.split("\n## ", 1)[0].rstrip("\n")]
    for name, (path, machine) in machines().items():
        title = name[0].upper() + name[1:]
        text = texts.get(title, f"The table is in [{Path(path).name}](../{path}).")
        parts.append(f"## {title}\n\n{text}\n\n```mermaid\n{drawing_of(machine)}\n```")
    DOCUMENT.write_text("\n\n".join(parts) + "\n")


if __name__ == "__main__":
    write()
