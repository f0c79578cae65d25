"""Faults: what the world does to processes, to NATS and to bytes until it calms down."""

from __future__ import annotations

from tests.sim.bus import Bus
from tests.sim.memory import Memory
from tests.sim.peers import Peers
from tests.sim.world import Node, World

FIRST_MS = 2_000
POWER_TRIES = 500


class Faults:
    """Strikes at random with what the plan allows."""

    def __init__(self, world: World, bus: Bus, peers: Peers) -> None:
        self._world, self._bus, self._peers = world, bus, peers

    def start(self) -> None:
        """Strike from now on, if there is anything to strike with."""
        if self._world.plan.faults:
            self._world.later(FIRST_MS, self._again)

    def _again(self) -> None:
        world = self._world
        if not world.calm:
            self._strike(world.rng.choice(world.plan.faults))
            world.later(world.rng.expovariate(1 / world.plan.fault_every_ms), self._again)

    def _strike(self, fault: str) -> None:
        world, rng, bus, peers = self._world, self._world.rng, self._bus, self._peers
        world.note(f"fault: {fault}")
        world.marks[f"fault: {fault}"] += 1
        match fault:
            case "kill engine":
                _kill(rng.choice(list(peers.engines.values())))
            case "kill host":
                _kill(peers.host_tier)
            case "kill disk":
                _kill(peers.disk_tier)
            case "kill index":
                _kill(peers.index)
            case "kill consolidator":
                _kill(peers.consolidator)
            case "stop engine":
                _stop(rng.choice(list(peers.engines.values())))
            case "stop host":
                _stop(peers.host_tier)
            case "stop disk":
                _stop(peers.disk_tier)
            case "power":
                self._cut_power(POWER_TRIES)
            case "outage":
                bus.outage(rng.choice((100.0, 1_000.0, 6_000.0)), stream_lost=False)
            case "stream lost":
                bus.outage(rng.uniform(100, 2_000), stream_lost=True)
            case "cut":
                self._cut()
            case "rot disk":
                self._rot(peers.disk_tier.store.file, spared=set())
            case "rot arena":
                if peers.host_tier.up:
                    # Nobody can tell what rots before its first checksum.
                    self._rot(
                        peers.host_tier.arena, spared=peers.host_tier.core.tier.table.staged()
                    )
            case _:
                raise AssertionError(f"no such fault: {fault}")

    def _cut_power(self, tries: int) -> None:
        """When it hurts: while something on disk is not durable yet, if that happens soon."""
        world, store = self._world, self._peers.disk_tier.store
        if world.calm:
            return
        if tries and store.is_durable:
            world.later(1, lambda: self._cut_power(tries - 1))
            return
        for node in world.nodes.values():
            _kill(node)
        store.power_cut()

    def _cut(self) -> None:
        """Messages from one process to another are lost for a while; the other way is free."""
        world, peers = self._world, self._peers
        engine = world.rng.choice(list(peers.engines))
        host, disk = peers.host_tier.name, peers.disk_tier.name
        consolidator, index = peers.consolidator.name, peers.index.name
        ways = (
            *((engine, host), (host, engine), (engine, consolidator), (consolidator, engine)),
            *((host, disk), (disk, host), (index, host), (consolidator, host)),
        )
        way = world.rng.choice(ways)
        world.cut.add(way)
        world.later(world.rng.uniform(200, 8_000), lambda: world.cut.discard(way))

    def _rot(self, memory: Memory, *, spared: set[int]) -> None:
        count = len(memory.slots)
        for slot in self._world.rng.sample(range(count), count // 2):
            if slot not in spared:
                memory.rot(slot)


def _kill(node: Node) -> None:
    if node.up:
        node.kill()


def _stop(node: Node) -> None:
    if node.up:
        node.stop()
