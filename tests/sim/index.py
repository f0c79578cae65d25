"""The index of the simulation: the real core, fed from the stream and the registry."""

from __future__ import annotations

from functools import partial

from kvbm_common.wire.events import Event
from kvbm_common.wire.verbs import ErrorBody, SnapshotReply
from kvbm_index import messages as index
from kvbm_index.arrival import Arrival
from kvbm_index.core import IndexCore
from kvbm_index.image import pack, unpack

from tests.sim.bus import Bus, Done
from tests.sim.peers import Peers
from tests.sim.service import HOST, SNAPSHOT_MS, Service
from tests.sim.stream import Subscription
from tests.sim.world import World

IMAGE_MS = 1_000


class Index(Service):
    """The index: reads all events from its newest image on, asks the sources for what it missed."""

    core: IndexCore
    reading: Subscription

    def __init__(self, world: World, bus: Bus, peers: Peers) -> None:
        super().__init__(world, bus, peers, "index")
        self.kept: bytes | None = None
        """The newest image, in an object store that survives us."""
        peers.index = self

    def boot(self) -> None:
        self.begin()
        self.core = IndexCore()
        resume = self._restore() if self.kept is not None else None
        self.bus.registry.watch(self, self._registry)
        lost = partial(self.step, index.StreamLost())
        self.reading = self.bus.stream.follow(
            self, lambda _: True, self._events, new=False, lost=lost, resume=resume
        )
        self.every(IMAGE_MS, self._keep)
        self.later(self.world.delay(50), lambda: self.step(index.RegistryRead()))
        self.every(200, lambda: self.step(index.Tick()))

    def step(self, event: index.Input) -> None:
        """One input."""
        self.heard(event)
        for effect in self.core.step(event, self.world.now_ms):
            self._ask_snapshot(effect.key)
        if self.due_check():
            self.core.check()

    def _registry(self, source: str, epoch: int, there: bool) -> None:
        key = index.SourceKey(HOST, source)
        if source not in ("index", "consolidator"):
            self.step(index.SourceSeen(key, epoch) if there else index.SourceLost(key, epoch))

    def _events(self, events: list[Event]) -> None:
        position, life = self.reading.position, self.reading.life
        self.step(index.EventsReceived(tuple(events), position, str(life)))

    def _keep(self) -> None:
        if self.world.bus_up and self.core.position:
            self.kept = pack(self.core.image())

    def _restore(self) -> tuple[int, int]:
        """Begin with the image; returns the life of the stream, and how far it was read."""
        assert self.kept is not None
        self.world.marks["index restored"] += 1
        image = unpack(self.kept)
        self.step(index.Restored(image))
        return int(image.stream), image.position

    def _ask_snapshot(self, key: index.SourceKey) -> None:
        self.world.marks["index asked for a snapshot"] += 1
        source = self.peers.source(key.source)

        def serve(reply: Done) -> None:
            found = source.snapshot(key.source)
            reply(found or ErrorBody(code="unknown_source", message=""))

        def done(reply: object) -> None:
            if isinstance(reply, SnapshotReply):
                self.step(index.SnapshotReceived(Arrival.whole(reply)))
            else:
                self.step(index.SnapshotFailed(key, str(reply)))

        self.bus.request(self, source, serve, done, limit_ms=SNAPSHOT_MS)
