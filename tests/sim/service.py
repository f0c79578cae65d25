"""A service of the simulation: a real core, with effects carried out in the world.

What the shells do (deadlines, which failure is settled, when the arena is mapped) is repeated in a
few lines each; everything that decides is the product's own code.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from kvbm_common.identity import SequenceHash
from kvbm_common.wire.events import Event, Stored
from kvbm_common.wire.verbs import SnapshotReply

from tests.sim import invariants
from tests.sim.bus import Bus
from tests.sim.cluster import Cluster, Host
from tests.sim.world import Node, World

VERB_MS = 2_000
SNAPSHOT_MS = 5_000


class Service(Node):
    """A process on the bus, named `<host>/<source>`."""

    def __init__(self, world: World, bus: Bus, cluster: Cluster, host: Host, source: str) -> None:
        super().__init__(world, f"{host.name}/{source}")
        self.bus, self.cluster, self.host, self.source = bus, cluster, host, source
        self.epoch = 0
        self.announced = invariants.Announced()

    def begin(self) -> None:
        """Enter the registry under our own name."""
        self.epoch = self.bus.registry.register(self.name, self)
        self.publisher = self.bus.stream.publisher(self)

    def leave(self) -> None:
        """End in order: the entry goes with the process."""
        self.bus.registry.leave(self.name, self.epoch)
        self.kill()

    def died(self) -> None:
        """Lose the events that NATS has not got."""
        self.publisher.died()

    def heard(self, event: object) -> None:
        """Write an input down."""
        if self.world.traced:
            self.world.note(f"{self.name} < {event}")

    def publish(self, event: Event, gone: Collection[str] = ()) -> None:
        """Announce, under the eyes of the checkers; blocks in `gone` have left in the same step."""
        if self.world.traced:
            self.world.note(f"{self.name} > {event}")
        self.announced.take(event)
        if isinstance(event, Stored):
            invariants.check_stored(event, self.contents(), self.world.plan.part_count, gone)
        self.publisher.publish(event)

    def contents(self) -> Mapping[SequenceHash, tuple[bytes, ...]] | None:
        """Return what is truly in the place of each committed block; None: that is not known."""
        return None

    def snapshot(self, _source: str) -> SnapshotReply | None:
        """Return what a source that lives here says that it holds."""
        return None
