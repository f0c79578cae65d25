"""All processes of the simulation. They reach each other by the bus, sockets and NIXL only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvbm_common.memory.miss_filter import MissFilterReader

from tests.sim.conversations import Conversations
from tests.sim.memory import Memory
from tests.sim.world import Call, World

if TYPE_CHECKING:
    from tests.sim.bucket import Bucket
    from tests.sim.consolidator import Consolidator
    from tests.sim.engine_node import EngineNode
    from tests.sim.host_tier import HostTier
    from tests.sim.index import Index
    from tests.sim.lower_tier import LowerTier
    from tests.sim.service import Service


class Endpoint:
    """An address for engines: the life of a host tier that listens there, and what waits while
    there is none, as in ZMQ sockets that connect again."""

    def __init__(self, world: World, name: str) -> None:
        self._world, self.name = world, name
        self._owner: HostTier | None = None
        self._life = 0
        self._waiting: list[Call] = []

    @property
    def owner(self) -> HostTier | None:
        """Return the host tier that listens."""
        owner = self._owner
        return owner if owner is not None and owner.up and owner.life == self._life else None

    def take(self, node: HostTier) -> bool:
        """Listen here from now on; False: another process does."""
        if self.owner is not None:
            return False
        self._owner, self._life = node, node.life
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            node.later(0, call)
        return True

    def send(self, source: str, connection: bytes, data: bytes) -> None:
        """Send a frame to the process that listens when it arrives."""
        target = self.owner.name if self.owner is not None else self.name

        def arrive() -> None:
            if self.owner is not None:
                self.owner.from_engine(connection, data)
            else:
                self._waiting.append(arrive)

        self._world.post(source, target, arrive, lane=self.name)


@dataclass(slots=True)
class Host:
    """The processes of one host. Each enters itself."""

    name: str
    front: Endpoint
    """The well-known endpoint of its host tiers."""
    host_tiers: dict[str, HostTier] = field(default_factory=dict)
    """By instance."""
    lower: list[LowerTier] = field(default_factory=list)
    consolidator: Consolidator = field(init=False)
    engines: dict[str, EngineNode] = field(default_factory=dict)

    @property
    def tiers(self) -> list[Service]:
        """Return every tier, the nearest to the engines first."""
        return [*self.host_tiers.values(), *self.lower]

    def find(self, name: str) -> Service:
        """Return the process that speaks for a source of this host."""
        return next((tier for tier in self.tiers if tier.source == name), self.consolidator)


@dataclass(slots=True)
class Cluster:
    """All hosts, and what they share."""

    bucket: Bucket = field(init=False)
    index: Index = field(init=False)
    hosts: dict[str, Host] = field(default_factory=dict)
    arenas: dict[int, Memory] = field(default_factory=dict)
    """By epoch: a mapping outlives the process that made it."""
    filters: dict[int, MissFilterReader] = field(default_factory=dict)
    """By epoch: the newest of each life of a host tier."""
    conversations: dict[int, Conversations] = field(default_factory=dict)
    """Those that all hosts' users share, by the size of an engine's blocks."""
    endpoints: dict[str, Endpoint] = field(default_factory=dict)

    @property
    def engines(self) -> list[EngineNode]:
        """Return the engines of all hosts."""
        return [engine for host in self.hosts.values() for engine in host.engines.values()]

    @property
    def host_tiers(self) -> list[HostTier]:
        """Return the host tiers of all hosts."""
        return [tier for host in self.hosts.values() for tier in host.host_tiers.values()]

    def services(self) -> Iterator[Service]:
        """Go through all services but the index."""
        for host in self.hosts.values():
            yield from host.tiers
            yield host.consolidator

    def engine(self, name: str) -> EngineNode:
        """Return the engine of this name; no two hosts have the same."""
        return next(host.engines[name] for host in self.hosts.values() if name in host.engines)

    def endpoint(self, world: World, name: str) -> Endpoint:
        """Return the endpoint of a name."""
        return self.endpoints.setdefault(name, Endpoint(world, name))
