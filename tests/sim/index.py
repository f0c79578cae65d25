"""The index of the simulation: the real core, fed from the stream and the registry."""

from __future__ import annotations

from functools import partial

from kvbm_common.wire.events import Event
from kvbm_common.wire.verbs import ErrorBody, SnapshotReply
from kvbm_index.core import messages as index
from kvbm_index.core.core import IndexCore
from kvbm_index.core.image import pack, unpack
from kvbm_index.core.snapshot_loader import SnapshotLoader

from tests.sim.bus import Bus, Done
from tests.sim.cluster import Cluster, Host
from tests.sim.registry import News
from tests.sim.service import SNAPSHOT_MS, Service
from tests.sim.stream import Subscription
from tests.sim.world import World

IMAGE_MS = 1_000
UNINDEXED = ("index", "consolidator")


class Index(Service):
    """The index: reads all events from its newest image on, asks the sources for what it missed."""

    core: IndexCore
    reading: Subscription

    def __init__(self, world: World, bus: Bus, cluster: Cluster, host: Host) -> None:
        super().__init__(world, bus, cluster, host, "index")
        self.kept: bytes | None = None
        """The newest image, in an object store that survives us."""
        cluster.index = self

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
        """Take one input."""
        self.heard(event)
        for effect in self.core.step(event, self.world.now_ms):
            self._ask_snapshot(effect.key)
        self.stepped()

    def check(self) -> None:
        """Check the core."""
        self.core.check()

    def _registry(self, news: News) -> None:
        host, source = news.name.split("/")
        if source not in UNINDEXED:
            key = index.SourceKey(host, source)
            seen, lost = index.SourceJoined(key, news.epoch), index.SourceLeft(key, news.epoch)
            self.step(seen if news.is_there else lost)

    def _events(self, events: list[Event]) -> None:
        position, life = self.reading.position, self.reading.life
        self.step(index.EventsReceived(tuple(events), position, str(life)))

    def _keep(self) -> None:
        if self.world.bus_up and self.core.position:
            self.kept = pack(self.core.image())

    def _restore(self) -> tuple[int, int]:
        """Begin with the image; return the life of the stream, and how far it was read."""
        assert self.kept is not None
        self.world.marks["index restored"] += 1
        image = unpack(self.kept)
        self.step(index.Restored(image))
        return int(image.stream), image.position

    def _ask_snapshot(self, key: index.SourceKey) -> None:
        self.world.marks["index asked for a snapshot"] += 1
        source = self.cluster.hosts[key.host].find(key.source)

        def serve(reply: Done) -> None:
            found = source.snapshot(key.source)
            reply(found or ErrorBody(code="unknown_source", message=""))

        def done(reply: object) -> None:
            if isinstance(reply, SnapshotReply):
                loader = SnapshotLoader(reply)
                assert loader.go_on(1 << 30), "a piece as large as the snapshot"
                self.step(index.SnapshotReceived(loader))
            else:
                self.step(index.SnapshotFailed(key))

        self.bus.request(self, source, serve, done, limit_ms=SNAPSHOT_MS)
