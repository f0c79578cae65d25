"""The reader process of a host tier of the simulation: what its death leaves behind."""

from __future__ import annotations

from tests.sim.host_peers import Reader
from tests.sim.memory import Memory, copy
from tests.sim.world import Node, World

MOVED = b"moved"


def test_a_reader_that_dies_writes_nothing_more() -> None:
    """Goal: a slot whose read has failed with its reader may be used again at once.

    1. Two readers copy. 2. One dies before its copy begins. 3. Only the other's bytes arrive.
    """
    world = World(0)
    node = Node(world, "host")
    node.start()
    source, target = Memory(world, 1), Memory(world, 2)
    source.put(0, [MOVED])
    untouched = target.content(1)
    for slot in range(2):
        reader = Reader(node)
        copy(reader, (source, [source.whole(0)]), (target, [target.whole(slot)]), 10)
    reader.die()
    world.run_until(20)
    assert target.content(0) == (MOVED,)
    assert target.content(1) == untouched
