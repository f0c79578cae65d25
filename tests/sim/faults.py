"""Faults: what the world does to processes, to NATS and to bytes until it calms down."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from tests.sim.bus import Bus
from tests.sim.cluster import Cluster, Host
from tests.sim.disk_tier import DiskTier
from tests.sim.host_tier import HostTier
from tests.sim.world import Node, World

FIRST_MS = 2_000
POWER_TRIES = 3_000
"""Milliseconds."""
ASKING_TRIES = 400
"""Milliseconds: half of the engines that die are not struck before a lookup of theirs waits."""
Strike = Callable[[], None]
T = TypeVar("T")


class Faults:
    """Strikes at random with what the plan allows."""

    def __init__(self, world: World, bus: Bus, cluster: Cluster) -> None:
        self._world, self._bus, self._cluster = world, bus, cluster
        self._strikes: dict[str, Strike] = {
            "kill engine": lambda: self._kill_engine(ASKING_TRIES),
            "kill host": lambda: _kill(self._any(cluster.host_tiers)),
            "kill disk": lambda: _kill(self._disk()),
            "kill objects": lambda: _kill(self._below("object")),
            "kill index": lambda: _kill(cluster.index),
            "kill consolidator": lambda: _kill(self._host().consolidator),
            "stop engine": lambda: _stop(self._any(cluster.engines)),
            "stop host": lambda: _stop(self._any(cluster.host_tiers)),
            "stop disk": lambda: _stop(self._disk()),
            "stop objects": lambda: _stop(self._below("object")),
            "power": self._power,
            "outage": lambda: bus.outage(self._any((100.0, 1_000.0, 6_000.0)), stream_lost=False),
            "stream lost": lambda: bus.outage(world.rng.uniform(100, 2_000), stream_lost=True),
            "cut": self._cut,
            "rot disk": self._rot_disk,
            "rot arena": self._rot_arena,
            "kill reader": self._kill_reader,
            "part hosts": self._part_hosts,
            "drain host": lambda: self._drain("drain"),
            "undrain host": lambda: self._drain("undrain"),
            "vanish": cluster.bucket.vanish,
            "rot objects": cluster.bucket.rot,
            "bucket outage": lambda: cluster.bucket.outage(world.rng.uniform(100, 3_000)),
        }

    def start(self) -> None:
        """Strike from now on, if there is anything to strike with."""
        if self._world.plan.faults:
            self._world.later(FIRST_MS, self._again)

    def _again(self) -> None:
        world = self._world
        if not world.calm:
            fault = world.rng.choice(world.plan.faults)
            world.note(f"fault: {fault}")
            world.marks[f"fault: {fault}"] += 1
            self._strikes[fault]()
            world.later(world.rng.expovariate(1 / world.plan.fault_every_ms), self._again)

    # --- where ------------------------------------------------------------------------------

    def _any(self, choices: Sequence[T]) -> T:
        return self._world.rng.choice(choices)

    def _host(self) -> Host:
        return self._any(list(self._cluster.hosts.values()))

    def _below(self, tier: str) -> Node | None:
        """Return a tier of a host; None: a given plan has none of this kind."""
        return next((one for one in self._host().lower if one.tier == tier), None)

    def _disk(self) -> DiskTier | None:
        found = self._below("disk")
        return found if isinstance(found, DiskTier) else None

    # --- what -------------------------------------------------------------------------------

    def _kill_engine(self, tries: int) -> None:
        """Strike an engine; of two, one while its host tier brings blocks for a lookup."""
        world = self._world
        if world.rng.random() < 0.5:
            _kill(self._any(self._cluster.engines))
        else:
            self._kill_asking(self._any(self._cluster.host_tiers), tries)

    def _kill_asking(self, tier: HostTier, tries: int) -> None:
        world = self._world
        if world.calm:
            return
        waits = tier.up and tier.core.view.waiting_count > 0
        if tries and not waits:
            world.later(1, lambda: self._kill_asking(tier, tries - 1))
            return
        world.marks["engine killed while a lookup waits"] += waits
        for engine in tier.host.engines.values():
            if engine.up and (not waits or engine.core.view.epoch == tier.epoch):
                _kill(engine)
                return

    def _power(self) -> None:
        self._cut_power(self._disk(), POWER_TRIES)

    def _cut_power(self, disk: DiskTier | None, tries: int) -> None:
        """Strike when it hurts: while something on disk is not durable yet, if that is soon."""
        world = self._world
        if world.calm:
            return
        if tries and disk is not None and disk.store.is_durable:
            world.later(1, lambda: self._cut_power(disk, tries - 1))
            return
        struck = world.nodes.values() if disk is None else _of_host(world, disk)
        for node in struck:
            _kill(node)
        if disk is not None:
            disk.store.power_cut()

    def _cut(self) -> None:
        """Lose messages from one process to another for a while; the other way is free."""
        world, host = self._world, self._host()
        engine = self._any(list(host.engines.values())).name
        tier = self._any(list(host.host_tiers.values())).name
        lower = self._any(host.lower).name
        consolidator, index = host.consolidator.name, self._cluster.index.name
        ways = (
            *((engine, tier), (tier, engine), (engine, consolidator), (consolidator, engine)),
            *((tier, lower), (lower, tier), (index, tier), (consolidator, tier), (tier, index)),
        )
        self._cut_ways([world.rng.choice(ways)])

    def _cut_ways(self, ways: Sequence[tuple[str, str]]) -> None:
        world = self._world
        world.cut.update(ways)
        world.later(world.rng.uniform(200, 8_000), lambda: world.cut.difference_update(ways))

    def _part_hosts(self) -> None:
        """Let no message through between host tiers."""
        names = [tier.name for tier in self._cluster.host_tiers]
        self._cut_ways([(one, other) for one in names for other in names if one != other])

    def _rot_disk(self) -> None:
        disk = self._disk()
        if disk is None:
            return
        memory = disk.store.file
        for place in self._world.rng.sample(range(memory.unit_count), memory.unit_count // 2):
            memory.rot(place)

    def _rot_arena(self) -> None:
        tier = self._any(self._cluster.host_tiers)
        if not tier.up:
            return
        count, committed = tier.arena.unit_count, tier.core.view.blocks()
        for place in self._world.rng.sample(range(count), count // 2):
            if place in committed:  # What rots before its first checksum cannot be found.
                tier.arena.rot(place)

    def _kill_reader(self) -> None:
        tier = self._any(self._cluster.host_tiers)
        if tier.up:
            tier.peers.reader_dies()

    def _drain(self, verb: str) -> None:
        tier = self._any(self._cluster.host_tiers)
        if tier.up:
            tier.siblings.drain(verb)


def _of_host(world: World, disk: DiskTier) -> list[Node]:
    """Return the processes that lose power with a disk: the index may be elsewhere."""
    stem = f"{disk.host.name}/"
    return [node for node in world.nodes.values() if node.name.startswith(stem)]


def _kill(node: Node | None) -> None:
    if node is not None and node.up:
        node.kill()


def _stop(node: Node | None) -> None:
    if node is not None and node.up:
        node.stop()


def undrain(tiers: Sequence[HostTier]) -> None:
    """End what operators have begun, before everything comes to rest."""
    for tier in tiers:
        if tier.up and tier.statistics().figures["draining"]:
            tier.siblings.drain("undrain")
