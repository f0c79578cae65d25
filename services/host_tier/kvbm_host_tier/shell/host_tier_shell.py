"""The shell around the core: between sockets, NATS and NIXL, and inputs and effects."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable
from typing import assert_never

import msgspec
from kvbm_common.errors import DeadlineExceeded, KvbmError
from kvbm_common.identity import HASH_BYTES
from kvbm_common.nats.event_publisher import EventPublisher
from kvbm_common.registry.records import Changed, Joined, Left, RegistryEvent
from kvbm_common.runtime import logs
from kvbm_common.runtime.loop import CoreLoop, monotonic_ms
from kvbm_common.service.admin_verbs import CoreAnswers, tier_verbs
from kvbm_common.service.context import ServiceContext
from kvbm_common.service.tracing import Tracer, tracer_of
from kvbm_common.wire.events import Event, Removed
from kvbm_common.wire.local import Found, Lookup, ToHostTier
from kvbm_common.wire.verbs import (
    StatsReply,
    hits_codec,
    hits_subject,
    offer_codec,
    offers_subject,
)

from kvbm_host_tier.core.core import HostTierCore
from kvbm_host_tier.core.filter_messages import MakeFilter, NamesChanged, SwitchFilter, UseFilter
from kvbm_host_tier.core.lower_tiers import tier_of
from kvbm_host_tier.core.messages import (
    Answer,
    ArenaInfo,
    ArenaMade,
    ArenaRefused,
    AskDepartures,
    AskFill,
    AskLowerTierSnapshot,
    AttachPeer,
    DetachPeer,
    Effect,
    FromEngine,
    Input,
    LowerTierJoined,
    LowerTierLeft,
    MakeArena,
    OfferReceived,
    Publish,
    StartPull,
    TellHits,
    Tick,
    ToEngine,
)
from kvbm_host_tier.core.peer_messages import (
    AskHolders,
    OpenPeerReader,
    PeerEffect,
    PeerId,
    PullFromPeer,
    ReleaseAtPeer,
)
from kvbm_host_tier.core.scrub_messages import ScrubFound, ScrubSlots
from kvbm_host_tier.core.shard_map import HandedOver, SayPlace, ShardEffect
from kvbm_host_tier.shell.committed_table_writer import CommittedTableWriter
from kvbm_host_tier.shell.engine_socket import EngineSocket
from kvbm_host_tier.shell.explain_verbs import explain_verbs
from kvbm_host_tier.shell.figures import figures_of
from kvbm_host_tier.shell.lower_tier_client import LowerTierClient
from kvbm_host_tier.shell.miss_filter_writer import MissFilterWriter
from kvbm_host_tier.shell.peer_client import PeerClient
from kvbm_host_tier.shell.peer_reader import PeerReader, peer_devices
from kvbm_host_tier.shell.puller import BLOCKS_SETTING, Puller
from kvbm_host_tier.shell.scrub_reader import ScrubReader
from kvbm_host_tier.shell.siblings import Siblings
from kvbm_host_tier.shell.spans import OnboardSpans
from kvbm_host_tier.shell.verbs import HostTierVerbs

INBOX_MAX = 10_000
"""Inputs that wait for the core: a second of a very busy host."""
TICK_MS = 50
READ_MS_MAX = 600_000
"""The longest lease for which the arena stands ready to be read over TCP."""

log = logging.getLogger(__name__)


class HostTierShell:
    """Translates between the outside and the core."""

    def __init__(
        self, context: ServiceContext, core: HostTierCore, puller: Puller, engines: EngineSocket
    ) -> None:
        self._context = context
        self._core = core
        self._puller = puller
        self._lease_ms = context.settings.lease_ms
        """The longest lease that an engine has asked for: so long it may read."""
        self._engines = engines
        self._publisher: EventPublisher = context.bus.event_publisher(
            context.source, spec=context.events
        )
        self._tracer: Tracer = tracer_of(context.settings, context.kind)
        self._spans = OnboardSpans(self._tracer)
        self._scrubber = ScrubReader()
        self._committed_table = CommittedTableWriter(core.view, context.counters)
        self._filter = MissFilterWriter(core.view, context.host, context.source)
        devices = peer_devices(context.settings, context.bus.access)
        self._peer_reader = PeerReader(f"{context.source}-door", devices=devices)
        self._peers = PeerClient(
            context.bus, self._peer_reader, host=context.host, source=context.source,
            counters=context.counters,
        )  # fmt: skip
        self._dropped = context.counters.counter(
            "kvbm_bus_messages_dropped_total",
            "Messages on NATS that could not be taken.",
            labels=("reason",),
        )
        self._answers = CoreAnswers(self._dropped)
        self._below = LowerTierClient(context, self._dropped)
        self._loop: CoreLoop[Input, Effect] = CoreLoop(
            core,
            self._carry_out,
            inbox_size=INBOX_MAX,
            tick=Tick,
            tick_ms=TICK_MS,
            is_quiet=lambda: core.view.is_quiet,
            settle=core.settle,
        )
        self._verbs = HostTierVerbs(
            core.view, self._loop, self._answers, self._spans, self._peer_reader
        )
        self._siblings = Siblings(context, engines, core.view, self._loop.complete)

    async def run(self) -> None:
        """Serve until the context is stopping."""
        try:
            await self._run()
        finally:
            self._committed_table.close()
            self._filter.close()
            await asyncio.to_thread(self._scrubber.close)
            await asyncio.to_thread(self._tracer.close)

    async def _run(self) -> None:
        context = self._context
        self._puller.on_settled = self._loop.complete
        self._peers.on_settled = self._loop.complete
        await self._subscribe()
        await self._siblings.start()
        follow_below = self._below.follow(self._loop.offer_nowait, self._loop.complete)
        forget = context.registry.watch(self._registry_changed)
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(self._loop.run(), name="core"),
                tasks.create_task(self._publisher.run(), name="publisher"),
                tasks.create_task(self._hear_engines(), name="engines"),
                tasks.create_task(follow_below, name="disk events"),
                tasks.create_task(self._peer_reader.run(), name="peer reader"),
                tasks.create_task(self._siblings.run(), name="siblings"),
            ]
            for effect in self._core.start():
                self._carry_out(effect)
            context.ready(f"{self._engines.listens_at} {_where(self._core.view.arena)}")
            await context.stopping.wait()
            await self._siblings.hand_over()
            forget()
            await self._say_goodbye()
            for task in running:
                task.cancel()

    async def _say_goodbye(self) -> None:
        for effect in self._core.stop():
            self._carry_out(effect)
        try:
            await self._publisher.flush(deadline_s=1.0)
        except DeadlineExceeded as error:
            log.warning("stopping with events unpublished: %s", error)

    async def _subscribe(self) -> None:
        context = self._context
        context.set_stats(self._statistics)
        context.counters.include(lambda: figures_of(self._core.view))
        context.bounds.declare(lambda: self._core.view.usages(monotonic_ms()))
        context.bounds.declare_queues(self._loop, self._publisher)
        await context.bus.subscribe(offers_subject(context.host), self._offer)
        await context.add_verbs(
            {
                **self._verbs.handlers(),
                **explain_verbs(self._core.view),
                **tier_verbs(context.kind, self._verbs.admin, context.audit),
            }
        )

    def _statistics(self) -> StatsReply:
        """Return the core's figures. Without its peer reader a host tier still serves engines."""
        told, problem = self._core.view.statistics(monotonic_ms()), self._peer_reader.problem
        return msgspec.structs.replace(told, reasons=[problem]) if problem else told

    # --- inputs -----------------------------------------------------------------------------

    async def _hear_engines(self) -> None:
        await self._engines.run(self._from_engine, on_turn=self._loop.turn_nowait)

    def _from_engine(self, connection: bytes, message: ToHostTier) -> bool:
        if isinstance(message, Lookup):
            self._lease_ms = max(self._lease_ms, min(message.lease_ms, READ_MS_MAX))
        if log.isEnabledFor(logging.DEBUG) and isinstance(message, Lookup):
            ids = {"request": message.request, "engine": message.engine, "lookup": message.lookup}
            log.debug("%d blocks are looked up", len(message.hashes) // HASH_BYTES, extra=ids)
        message = self._spans.heard(connection, message)
        return self._loop.hand_in(FromEngine(connection, message), lane=connection)

    def _offer(self, _subject: str, payload: bytes) -> None:
        offer = offer_codec.decode(payload)
        # Not the lane of its link: offers of an engine do not delay its own lookups either.
        if not self._loop.offer_nowait(OfferReceived(offer), lane=offer.engine):
            self._dropped.labels(reason="inbox_full").inc()

    def _registry_changed(self, event: RegistryEvent) -> None:
        record = event.record
        if record.kind == self._context.kind:
            if record.host == self._context.host:
                self._siblings.registry_changed(event)
            peer = PeerId(record.host, record.instance)
            is_other = peer != PeerId(self._context.host, self._context.instance)
            is_read = is_other and self._context.settings.peer_pulls
            if is_read and (heard := self._peers.changed(peer, event)) is not None:
                self._loop.complete(heard)
        if record.kind == "index":
            self._peers.index_changed(event)
        found = tier_of(f"{record.kind}-{record.instance}")
        if found is None or record.host != self._context.host:
            return
        tier, instance = found
        match event:
            case Joined() | Changed():  # A new life that comes soon only changes the entry.
                self._loop.complete(LowerTierJoined(instance, tier, record.epoch))
            case Left():
                self._loop.complete(LowerTierLeft(instance, tier, record.epoch))
            case _:
                assert_never(event)

    # --- effects ----------------------------------------------------------------------------

    def _carry_out(self, effect: Effect) -> Input | Awaitable[Input | None] | None:
        match effect:
            case ToEngine(connection, message):
                if log.isEnabledFor(logging.DEBUG) and isinstance(message, Found):
                    text = "%d blocks are leased; %s"
                    ids = {"lookup": message.lookup}
                    log.debug(text, len(message.slots), message.reason or "all", extra=ids)
                if isinstance(message, Found) and message.slots:
                    self._puller.expect_reads(2 * self._lease_ms / 1000)
                self._spans.said(connection, message)
                self._engines.send(connection, message)
            case MakeArena(size_bytes):
                return self._make_arena(size_bytes)
            case AttachPeer():
                return self._puller.attach(effect)
            case DetachPeer(peer):
                self._puller.detach(peer)
            case StartPull():
                return self._puller.pull(effect)
            case AskFill():
                return self._spans.fill(effect, self._below.fill)
            case AskLowerTierSnapshot(instance, tier):
                return self._below.snapshot(instance, tier)
            case AskDepartures():
                return self._below.fates(effect)
            case Answer(reply_to, reply):
                self._answers.give(reply_to, reply)
            case Publish(event):
                self._publish(event)
            case TellHits(hits):
                subject = hits_subject(self._context.host)
                ours = msgspec.structs.replace(hits, instance=self._context.instance)
                return self._tell(subject, hits_codec.encode(ours))
            case ScrubSlots() | ScrubFound():
                return self._scrubber.carry_out(effect)
            case MakeFilter() | NamesChanged() | UseFilter() | SwitchFilter():
                return self._filter.carry_out(effect)
            case _:
                return self._carry_to_peers(effect)
        return None

    def _carry_to_peers(self, effect: PeerEffect | ShardEffect) -> Awaitable[Input | None] | None:
        match effect:
            case AskHolders():
                return self._peers.holders(effect)
            case PullFromPeer():
                return self._spans.pull(effect, self._peers.pull)
            case ReleaseAtPeer(peer, lease):
                return self._peers.release(peer, lease)
            case OpenPeerReader(path):
                self._peer_reader.want(path)
            case SayPlace():
                return self._siblings.say(effect)
            case HandedOver():
                self._siblings.handed_over.set()
            case _:
                assert_never(effect)
        return None

    async def _make_arena(self, size_bytes: int) -> ArenaMade | ArenaRefused:
        try:
            make = functools.partial(self._puller.make_arena, size_bytes, setting=BLOCKS_SETTING)
            return ArenaMade(await asyncio.to_thread(make))
        except (KvbmError, TimeoutError) as error:
            log.error("no arena of %d bytes: %s", size_bytes, error)
            return ArenaRefused(str(error) or "NIXL did not answer", self._puller.info)

    async def _tell(self, subject: str, payload: bytes) -> None:
        await self._context.bus.publish(subject, payload)

    def _publish(self, event: Event) -> None:
        if isinstance(event, Removed) and event.reason == "corrupt":
            logs.corrupt(log, event.hashes)
        self._committed_table.follow(event)
        self._publisher.publish_event(event)


def _where(arena: ArenaInfo) -> str:
    return f"arena {arena.path}" if arena.path else "arena to be made for the first engine"
