"""A service of the simulation: a real core, with effects carried out in the world.

What the shells do (deadlines, which failure is settled, when the arena is mapped) is repeated in
`host_tier`, `disk_tier`, `index` and `consolidator` in a few lines each; everything that decides is
the product's own code.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvbm_common.identity import SequenceHash
from kvbm_common.wire.events import Event, Stored
from kvbm_common.wire.verbs import SnapshotReply

from tests.sim import invariants
from tests.sim.bus import Bus
from tests.sim.peers import Peers
from tests.sim.world import Node, World

HOST, HOST_TIER, DISK_TIER = "h", "host-tier-0", "disk-tier-0"
VERB_MS = 2_000
SNAPSHOT_MS = 5_000


class Service(Node):
    """A process on the bus."""

    def __init__(self, world: World, bus: Bus, peers: Peers, name: str) -> None:
        super().__init__(world, name)
        self.bus, self.peers = bus, peers
        self.epoch = 0
        self.announced = invariants.Announced()

    def begin(self) -> None:
        """Enter the registry under our own name."""
        self.epoch = self.bus.registry.register(self.name, self)
        self.publisher = self.bus.stream.publisher(self)

    def died(self) -> None:
        """Events that NATS has not got are lost."""
        self.publisher.died()

    def heard(self, event: object) -> None:
        """Write an input down."""
        if self.world.traced:
            self.world.note(f"{self.name} < {event}")

    def publish(self, event: Event) -> None:
        """Announce, under the eyes of the checkers."""
        if self.world.traced:
            self.world.note(f"{self.name} > {event}")
        self.announced.take(event)
        if isinstance(event, Stored):
            invariants.check_stored(event, self.contents())
        self.publisher.publish(event)

    def contents(self) -> Mapping[SequenceHash, bytes] | None:
        """What is truly in the place of each committed block; None: nobody can say."""
        return None

    def snapshot(self, _source: str) -> SnapshotReply | None:
        """What a source that lives here says that it holds."""
        return None
