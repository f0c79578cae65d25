"""The registry of the simulation is as forgiving as the product's."""

from __future__ import annotations

import pytest

from tests.sim.registry import Registry
from tests.sim.world import STALL_MS, Node, World


@pytest.fixture
def world() -> World:
    """Return a world in which nothing else happens."""
    return World(0)


def test_what_is_said_without_nats_is_heard_with_a_later_heartbeat(world: World) -> None:
    """A registration of the product keeps what it has to say, and every heartbeat says it."""
    registry, node = Registry(world), Node(world, "h/host-tier-0")
    node.start()
    epoch = registry.register(node.name, node)
    world.bus_up = False
    registry.update(node, epoch, {"endpoint": "old"})
    registry.update(node, epoch, {"endpoint": "new"})
    world.run_until(2 * Registry.TTL_MS)
    assert registry.entries[node.name].info == {}
    world.bus_up = True
    world.run_until(4 * Registry.TTL_MS)
    assert registry.entries[node.name].info == {"endpoint": "new"}


def test_of_two_writes_that_overtake_each_other_the_later_word_stands() -> None:
    """A registration of the product writes what it has been told last, whichever write that is."""
    for seed in range(50):
        world = World(seed, stalls=0.5)
        registry, node = Registry(world), Node(world, "h/host-tier-0")
        node.start()
        epoch = registry.register(node.name, node)
        for version in range(3):
            registry.update(node, epoch, {"version": version})
        world.run_until(STALL_MS)
        assert registry.entries[node.name].info == {"version": 2}


def test_what_a_dead_life_has_said_without_nats_is_never_heard(world: World) -> None:
    """Only a process that lives sends heartbeats."""
    registry, node = Registry(world), Node(world, "h/host-tier-0")
    node.start()
    epoch = registry.register(node.name, node)
    heard: list[object] = []
    other = Node(world, "h/index")
    other.start()
    registry.watch(other, lambda news: heard.append(news.info))
    world.bus_up = False
    registry.update(node, epoch, {"endpoint": "old"})
    node.kill()
    world.bus_up = True
    world.run_until(4 * Registry.TTL_MS)
    assert heard == [{}, {}]
    assert node.name not in registry.entries
