"""The consolidator of the simulation: engines' streams in, events out; it passes offers on."""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from typing import assert_never

from kvbm_common.identity import unpack_hashes
from kvbm_common.wire.consolidator import (
    Attach,
    Detach,
    Offered,
    from_consolidator,
    to_consolidator,
)
from kvbm_common.wire.engine_events import EngineBatch
from kvbm_common.wire.events import Tier
from kvbm_common.wire.local import Beat, Refused
from kvbm_common.wire.raw_events import as_json
from kvbm_common.wire.verbs import Offer, OfferRun, SnapshotReply
from kvbm_connectors.consolidator.core import messages as con
from kvbm_connectors.consolidator.core.core import ConsolidatorCore
from kvbm_connectors.consolidator.core.engines import EnginesCore
from kvbm_host_tier.core import messages as host_tier

from tests.connectors.consolidator.model import Reader, Router, whole_of
from tests.sim.bus import Bus, Done
from tests.sim.cluster import Cluster, Host
from tests.sim.engine_node import EngineNode
from tests.sim.registry import News
from tests.sim.service import SNAPSHOT_MS, Service
from tests.sim.world import World

KINDS: dict[str, Tier] = {"host-tier": "host", "disk-tier": "disk", "object-tier": "object"}
"""The services of its host of which it hears the events on the bus."""


class Consolidator(Service):
    """The consolidator of the host: engines' streams in, events out; it passes offers on."""

    whole: ConsolidatorCore

    def __init__(self, world: World, bus: Bus, cluster: Cluster, host: Host) -> None:
        super().__init__(world, bus, cluster, host, "consolidator")
        self.readers: dict[str, Reader] = defaultdict(Reader)
        """Of the consolidated stream of each engine, over all our lives."""
        self.routers: dict[tuple[str, int], Router] = {}
        """Those that listen in this life of ours, by engine and rank."""
        host.consolidator = self

    @property
    def core(self) -> EnginesCore:
        """The half that hears the engines."""
        return self.whole.engines

    def boot(self) -> None:
        self.begin()
        # To routers disk and objects are one medium: without dedup they hear of a block twice.
        dedup = self.world.seed % 2 == 0 or self.world.plan.below == "both"
        self.whole = ConsolidatorCore(
            self.host.name, con.ConsolidatorLimits(naming=True, tier_blocks_max=16), dedup=dedup
        )
        self.routers.clear()
        self.every(100, lambda: self.step(con.Tick(self.world.bus_up)))
        for tier in self.host.tiers:
            self._follow(tier.source)
        self.bus.registry.watch(self, self._registry)

    def step(self, event: con.Input) -> None:
        """One input."""
        self.heard(event)
        for effect in self.whole.step(event, self.world.now_ms):
            self._carry_out(effect)
        self.stepped()

    def check(self) -> None:
        """Check both halves."""
        self.whole.check()

    def _follow(self, source: str) -> None:
        self.bus.stream.follow(
            self,
            lambda event: (event.host, event.source) == (self.host.name, source),
            lambda events: self.step(con.TierEvents(tuple(events))),
            new=True,
            lost=lambda: self.step(con.TierStreamLost(source)),
        )

    def _registry(self, news: News) -> None:
        host, source = news.name.split("/")
        kind = KINDS.get(source.rpartition("-")[0])
        if host == self.host.name and kind is not None:
            seen = con.TierJoined(source, kind, news.epoch)
            self.step(seen if news.is_there else con.TierLeft(source, news.epoch))

    def _ask(self, source: str) -> None:
        self.world.marks["consolidator asked a tier"] += 1
        tier = self.host.find(source)

        def serve(reply: Done) -> None:
            reply(tier.snapshot(source))

        def done(reply: object) -> None:
            if isinstance(reply, SnapshotReply):
                self.step(con.TierSnapshot(reply))
            else:
                self.step(con.TierSnapshotFailed(source))

        self.bus.request(self, tier, serve, done, limit_ms=SNAPSHOT_MS)

    def from_engine(self, connection: bytes, data: bytes) -> None:
        """A frame on the ROUTER."""
        match to_consolidator.decode(data):
            case Attach() as attach:
                self.step(con.StreamAttached(attach, connection))
            case Detach(engine=engine, incarnation=incarnation):
                self.step(con.EngineDetached(engine, incarnation))
            case Beat(engine=engine, incarnation=incarnation):
                self.step(con.BeatReceived(engine, incarnation, connection))
            case Offered() as offered if not self.world.bus_up:
                refused = Refused(about="offered", code="", message="", offer=offered.offer)
                self._carry_out(con.Reply(connection, refused))
            case Offered() as offered:
                self._pass_on(_offer_of(offered, self.host.name))

    def _pass_on(self, offer: Offer) -> None:
        """Publish an offer: every host tier of this host hears it."""
        received = host_tier.OfferReceived(offer)
        for tier in self.host.host_tiers.values():
            self.bus.publish(self, tier, partial(tier.step, received))

    def batch(self, key: con.StreamKey, seq: int, batch: EngineBatch) -> None:
        """A message on an engine's PUB."""
        self.step(con.EngineBatchesReceived(key, ((seq, batch),)))

    def died(self) -> None:
        super().died()
        for engine in self.host.engines.values():
            if engine.up:
                engine.subscribed = False

    def snapshot(self, source: str) -> SnapshotReply | None:
        return whole_of(self.core.snapshot_pages(source))

    def _carry_out(self, effect: con.Effect) -> None:
        match effect:
            case con.Publish(event):
                self.publish(as_json(event))
            case con.PublishMerged(event):
                self.readers[event.source].read(as_json(event))
            case con.Broadcast(frame):
                stream = frame.stream.engine, frame.stream.rank
                self.routers.setdefault(stream, Router()).read(frame)
            case con.AskSnapshot(source):
                self._ask(source)
            case con.GoOnLater():
                self.later(1, lambda: self.step(con.GoOn()))
            case con.AnswerRouter():
                raise AssertionError("no router asks")
            case con.Subscribe(key):
                self.later(self.world.delay(10), lambda: self._subscribe(key))
            case con.Unsubscribe(key):
                if self._engine(key).incarnation == key.incarnation:
                    self._engine(key).subscribed = False
            case con.RequestReplay():
                self._replay(effect)
            case con.AskEpoch(ask, engine):
                self.later(self.world.delay(2), lambda: self._register(engine, ask))
            case con.RevokeEpoch(engine):
                registry, name = self.bus.registry, f"{self.host.name}/{engine}"
                registry.leave(name, registry.epoch(name))
            case con.Describe() | con.Learn():
                pass
            case con.Reply(peer, message):
                receiver = self.host.engines[peer.decode().split(":")[0]]
                data = from_consolidator.encode(message)
                self.world.send(self.name, receiver, lambda: receiver.receive(peer, data))
            case _:
                assert_never(effect)

    def _engine(self, key: con.StreamKey) -> EngineNode:
        return self.host.engines[key.engine]

    def _subscribe(self, key: con.StreamKey) -> None:
        engine = self._engine(key)
        if engine.up and engine.incarnation == key.incarnation:
            engine.subscribed = True

    def _register(self, engine: str, ask: int) -> None:
        if not self.world.bus_up:
            self.step(con.EpochFailed(engine, ask))
            return
        epoch = self.bus.registry.register(
            f"{self.host.name}/{engine}",
            self,
            lambda lost: self.step(con.EngineLeft(engine, lost, "superseded")),
        )
        self.step(con.EpochGranted(engine, ask, epoch))

    def _replay(self, effect: con.RequestReplay) -> None:
        """Ask the engine's ROUTER: all that is still in its buffer, then the end."""
        engine, key, number = self._engine(effect.key), effect.key, effect.replay
        alive = engine.up and engine.incarnation == key.incarnation
        if not alive or self.world.loses(self.name, engine.name):
            self.later(500, lambda: self.step(con.ReplayFailed(key, number)))
            return
        for seq, batch in list(engine.buffer):
            if seq >= effect.from_seq:
                self._replayed(con.EngineBatchesReceived(key, ((seq, batch),), number))
        self._replayed(con.ReplayDone(key, number))

    def _replayed(self, event: con.EngineInput) -> None:
        self.later(self.world.queue("replay", self.name), partial(self.step, event))


def _offer_of(offered: Offered, host: str) -> Offer:
    runs = [
        OfferRun(
            parent=run.parent.hex(),
            hashes=[name.hex() for name in unpack_hashes(run.hashes)],
            blocks=run.blocks,
        )
        for run in offered.runs
    ]
    return Offer(
        host=host,
        engine=offered.engine,
        incarnation=offered.incarnation,
        offer=offered.offer,
        namespace=offered.namespace.hex(),
        deadline_ms=offered.deadline_ms,
        runs=runs,
    )
