"""Service of the consolidator: connectors and engines on ZMQ in, events and offers on NATS out."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable
from typing import assert_never

import msgspec
from kvbm_common.access.curve import refuse_open_consolidator
from kvbm_common.config.settings import Settings
from kvbm_common.copying.naming import NAMING
from kvbm_common.errors import DeadlineExceeded, KvbmError
from kvbm_common.identity import check_hash, unpack_hashes
from kvbm_common.nats.event_publisher import EventPublisher
from kvbm_common.nats.snapshots import SnapshotPages
from kvbm_common.nats.streams import CONSOLIDATED
from kvbm_common.runtime.loop import CoreLoop
from kvbm_common.service.context import ServiceContext
from kvbm_common.service.process import run
from kvbm_common.tier.announcer import Pages
from kvbm_common.wire.codec import WireError
from kvbm_common.wire.consolidator import Attach, Detach, Offered, OfferedRun, ToConsolidator
from kvbm_common.wire.local import Beat
from kvbm_common.wire.raw_events import RawEvent
from kvbm_common.wire.verbs import (
    OFFER_BLOCKS_MAX,
    Offer,
    OfferRun,
    SnapshotRequest,
    StatsReply,
    offer_codec,
    offers_subject,
)

from kvbm_connectors.consolidator.core.core import ConsolidatorCore
from kvbm_connectors.consolidator.core.memory import parts_of, usages_of
from kvbm_connectors.consolidator.core.messages import (
    AnswerRouter,
    AskEpoch,
    AskSnapshot,
    BeatReceived,
    Broadcast,
    ConsolidatorLimits,
    Describe,
    Effect,
    EngineDetached,
    EngineLeft,
    GoOnLater,
    Input,
    Learn,
    Publish,
    PublishMerged,
    Reply,
    RequestReplay,
    RevokeEpoch,
    StreamAttached,
    Subscribe,
    Tick,
    Unsubscribe,
)
from kvbm_connectors.consolidator.shell.connector_socket import ConnectorSocket, lock_of
from kvbm_connectors.consolidator.shell.engine_streams import Streams, check_endpoint
from kvbm_connectors.consolidator.shell.metrics import (
    drops_of,
    figures_of,
    metrics_of,
)
from kvbm_connectors.consolidator.shell.registrar import Registrar
from kvbm_connectors.consolidator.shell.router_sockets import OFF, RouterSockets
from kvbm_connectors.consolidator.shell.tier_feed import TierFeed

INBOX_MAX = 1_000
"""Inputs that wait for the core; beyond it the sockets fill up."""
INBOX_DEADLINE_S = 30.0
"""A core that takes nothing for so long is broken."""
TICK_MS = 50
BEATS_LOST_S = 3.0
"""Connectors beat every second: an engine is never lost for fewer than three beats."""
FLUSH_DEADLINE_S = 1.0

log = logging.getLogger(__name__)


class UnknownEngine(KvbmError):
    """This life of an engine was never attached."""

    code = "unknown_engine"
    field = "engine"


class UnknownSource(KvbmError):
    """No engine of this name is attached, or it has no epoch yet."""

    code = "unknown_source"
    field = "source"


class BadOffer(KvbmError):
    """An offer that contradicts itself."""

    code = "bad_message"
    field = "runs"


class OfferNotPassed(KvbmError):
    """This offer will not reach a host tier."""

    code = "offer_not_passed"


class ConsolidatorShell:
    """Translates between ZMQ, NATS and the core. Lives inside its task group."""

    def __init__(
        self,
        context: ServiceContext,
        core: ConsolidatorCore,
        socket: ConnectorSocket,
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._context = context
        self._core = core
        self._snapshots = SnapshotPages(self._snapshot_of)
        self._socket = socket
        self._publisher = context.bus.event_publisher(context.source, spec=context.events)
        self._merged = EventPublisher(
            context.bus,
            CONSOLIDATED,
            source=context.source,
            counters=context.counters,
            metrics_prefix="kvbm_consolidated",
        )
        settings = context.settings
        self._enabled = settings.consolidator_enabled
        self.loop: CoreLoop[Input, Effect] = CoreLoop(
            core,
            self._carry_out,
            inbox_size=INBOX_MAX,
            tick=self._tick,
            tick_ms=TICK_MS,
            is_quiet=lambda: core.is_quiet,
        )
        self.streams = Streams(tasks, context.counters, self._take)
        self._registrar = Registrar(
            context.registry,
            context.host,
            tasks=tasks,
            awaits=core.engines.awaits,
            lost=self.loop.complete,
        )
        self._feed = TierFeed(context, tasks=tasks, take=self._take, complete=self.loop.complete)
        self.routers = RouterSockets(
            settings.router_endpoint if self._enabled else OFF,
            settings.router_replay_endpoint,
            tasks=tasks,
            counters=context.counters,
            asked=self._take,
            curve_file=settings.curve_server_file,
        )
        self._offers = context.counters.counter(
            "kvbm_consolidator_offers_total", "Offers passed on to the host tier."
        )

    async def run(self, tasks: asyncio.TaskGroup) -> None:
        """Serve until the context is stopping; then all engines are said to hold nothing."""
        context = self._context
        context.set_stats(self._stats)
        context.counters.include(lambda: metrics_of(self._core.statistics()))
        context.bounds.declare_queues(self.loop, self._publisher, self._merged)
        running = [
            tasks.create_task(self.loop.run(), name="core"),
            tasks.create_task(self._publisher.run(), name="publisher"),
            tasks.create_task(self._merged.run(), name="consolidated"),
            tasks.create_task(self._socket.run(self._on_message), name="connectors"),
        ]
        if self.routers.on:
            self.routers.open(0)
        if self._enabled:
            self._feed.start()
        await context.add_verbs({"snapshot": self._snapshot})
        context.ready(self._socket.endpoint)
        await context.stopping.wait()
        running.pop().cancel()
        await self._say_goodbye()
        self._feed.close()
        self.routers.close()
        self.streams.close()
        for task in running:
            task.cancel()

    async def _say_goodbye(self) -> None:
        for engine, (epoch, _) in self._core.engines.positions().items():
            self.loop.complete(EngineLeft(engine, epoch, "stopped"))
        try:
            await self.loop.wait_idle(deadline_s=FLUSH_DEADLINE_S)
            await self._publisher.flush(deadline_s=FLUSH_DEADLINE_S)
            await self._merged.flush(deadline_s=FLUSH_DEADLINE_S)
        except DeadlineExceeded as error:
            log.warning("stopping with work undone: %s", error)
        await self._registrar.leave_all()

    # ---- inputs ------------------------------------------------------------------------------

    def _tick(self) -> Tick:
        return Tick(offers_open=self._context.bus.connected)

    async def _take(self, event: Input) -> None:
        await self.loop.offer(event, deadline_s=INBOX_DEADLINE_S)

    async def _on_message(self, peer: bytes, message: ToConsolidator) -> None:
        """Handle one message of a connector; a KvbmError is answered with Refused."""
        match message:
            case Attach():
                if message.endpoint:
                    check_endpoint(message.endpoint, "endpoint")
                if message.replay_endpoint:
                    check_endpoint(message.replay_endpoint, "replay_endpoint")
                if not self._enabled:
                    message = msgspec.structs.replace(message, endpoint="", replay_endpoint="")
                await self._take(StreamAttached(message, peer))
            case Detach(engine=engine, incarnation=incarnation):
                await self._take(EngineDetached(engine, incarnation))
            case Beat(engine=engine, incarnation=incarnation):
                await self._take(BeatReceived(engine, incarnation, peer))
            case Offered():
                await self._pass_on(message)
            case _:
                assert_never(message)

    async def _pass_on(self, offered: Offered) -> None:
        """Put an offer on the bus, or have it refused: then its blocks are free at once."""
        if not self._core.engines.knows(offered.engine, offered.incarnation):
            raise UnknownEngine(f"{offered.engine} {offered.incarnation} is not attached")
        offer = offer_of(self._context.host, offered)
        subject = offers_subject(self._context.host)
        if await self._context.bus.publish(subject, offer_codec.encode(offer)):
            self._offers.inc()
        else:
            raise OfferNotPassed("NATS is away")

    # ---- effects -----------------------------------------------------------------------------

    def _carry_out(self, effect: Effect) -> Awaitable[Input | None] | None:
        match effect:
            case Publish(event):
                self._publish(event)
            case Reply(peer, message):
                self._socket.send(peer, message)
            case Subscribe():
                self.streams.follow(effect)
            case Unsubscribe(key):
                self.streams.unfollow(key)
            case RequestReplay():
                return self.streams.replay(effect)
            case AskEpoch():
                self.routers.serve(effect.ranks)
                return self._registrar.enter(effect)
            case Describe():
                self.routers.serve(effect.ranks)
                return self._registrar.describe(effect)
            case RevokeEpoch():
                return self._registrar.leave(effect)
            case PublishMerged(event):
                self._publish_merged(event)
            case Broadcast(frame):
                if self.routers.on:
                    self.routers.broadcast(frame)
            case AnswerRouter():
                self.routers.answer(effect)
            case AskSnapshot(source):
                return self._feed.ask(source)
            case GoOnLater():
                return self._feed.go_on()
            case Learn():
                raise AssertionError("it stays inside the core")
            case _:
                assert_never(effect)
        return None

    def _publish(self, event: RawEvent) -> None:
        self._publisher.publish_event(event)

    def _publish_merged(self, event: RawEvent) -> None:
        if self._enabled:
            self._merged.publish_event(event)

    # ---- verbs -------------------------------------------------------------------------------

    async def _snapshot(self, payload: bytes) -> bytes:
        return self._snapshots.answer(payload)

    def _snapshot_of(self, request: SnapshotRequest) -> Pages:
        half = self._core.merged if request.consolidated else self._core.engines
        pages = half.snapshot_pages(request.source)
        if pages is None:
            raise UnknownSource(f"{request.source} is not attached here")
        return pages

    def _stats(self) -> StatsReply:
        context = self._context
        statistics = self._core.statistics()
        positions = self._core.engines.positions()
        waiting = [engine for engine, (epoch, _) in positions.items() if not epoch]
        figures = {name: float(value) for name, value in figures_of(statistics).items()}
        return StatsReply(
            kind=context.kind,
            host=context.host,
            instance=context.instance,
            epoch=context.epoch,
            ready=not waiting,
            reasons=[f"{engine} has no epoch yet" for engine in waiting],
            figures=figures | {"dropped": float(sum(drops_of(statistics).values()))},
            positions={engine: list(position) for engine, position in positions.items()},
            workers=self._core.engines.passing_through(),
        )


def offer_of(host: str, offered: Offered) -> Offer:
    """Return a connector's offer as it travels on NATS; raises IdentityError, BadOffer,
    WireError."""
    runs = [_offer_run(run) for run in offered.runs]
    if sum(len(run.blocks) for run in runs) > OFFER_BLOCKS_MAX:
        raise BadOffer(f"an offer has at most {OFFER_BLOCKS_MAX} blocks")
    if len(offered.namespace) != 32:
        raise WireError("a namespace digest has 32 bytes", kind="malformed")
    return Offer(
        host=host,
        engine=offered.engine,
        incarnation=offered.incarnation,
        offer=offered.offer,
        namespace=offered.namespace.hex(),
        deadline_ms=offered.deadline_ms,
        priority=offered.priority,
        runs=runs,
    )


def _offer_run(run: OfferedRun) -> OfferRun:
    hashes = unpack_hashes(run.hashes)
    if len(hashes) != len(run.blocks):
        raise BadOffer(f"{len(hashes)} hashes and {len(run.blocks)} blocks in one run")
    return OfferRun(
        parent=check_hash(run.parent).hex(),
        hashes=[block.hex() for block in hashes],
        blocks=run.blocks,
    )


async def serve_consolidator(context: ServiceContext) -> None:
    """Run the consolidator for the whole life of the service."""
    lost_after_s = max(context.settings.registry_ttl_s, BEATS_LOST_S)
    settings = context.settings
    routers = settings.consolidator_enabled and settings.router_endpoint != OFF
    limits = ConsolidatorLimits(lost_after_ms=int(lost_after_s * 1000), naming=routers)
    core = ConsolidatorCore(
        context.host,
        limits,
        dedup=settings.consolidator_mode == "dedup",
        # Epochs of two lives may be a few apart: a reader would see no gap between them.
        first_router_seq=time.time_ns() // 1_000,
        awaits_routers=True,
        hasher=NAMING.hasher,
    )
    context.footprint.declare(lambda: parts_of(core.statistics(), routers=routers))
    context.bounds.declare(lambda: usages_of(core.engines.statistics(), limits))
    connectors = ConnectorSocket(
        settings.consolidator_endpoint, context.counters, curve_file=settings.curve_server_file
    )
    async with connectors as socket:
        shell: ConsolidatorShell | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                shell = ConsolidatorShell(context, core, socket, tasks)
                await shell.run(tasks)
        finally:
            if shell is not None:
                # After a failure the sockets are still open, and `term` waits until they are not.
                shell.routers.close()
                shell.streams.close()
                shell.streams.term()
                shell.routers.term()


def main() -> None:
    """Run the service: the entry point of `kvbm serve consolidator`.

    A second process ends before it has entered itself in the registry in the first one's place.
    """
    run("consolidator", serve_consolidator, check=_check)


def _check(settings: Settings) -> None:
    """Raise ConfigError for a socket that would be open, EndpointTaken for one that is served."""
    refuse_open_consolidator(settings)
    lock = lock_of(settings.consolidator_endpoint)
    if lock is not None:
        lock.close()
