"""Copies of the simulation: torn for a part of their time, whole when it is over."""

from __future__ import annotations

import pytest

from tests.sim.memory import Memory, copy
from tests.sim.world import Node, World

CELLS = 200
WEEKS_MS = 2_104_084_350.0
"""A float has steps of 2.4 * 10^-7 ms by then."""


@pytest.mark.parametrize("now_ms", [0.0, WEEKS_MS], ids=["at first", "after weeks"])
def test_a_copy_is_whole_when_it_ends(now_ms: float) -> None:
    """A mover that reads what it has moved finds all of it, however few steps a copy takes."""
    world = World(0)
    world.run_until(now_ms)
    node = Node(world, "h/host-tier-0")
    node.start()
    source, target = Memory(world, CELLS), Memory(world, CELLS)
    places = [source.whole(place) for place in range(CELLS)]
    found: list[list[bytes]] = []
    copy(node, (source, places), (target, places), 1e-6)
    node.later(1e-6, lambda: found.append(list(target.cells)))
    world.run_until(now_ms + 1)
    assert found == [source.cells]
