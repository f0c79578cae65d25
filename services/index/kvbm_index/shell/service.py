"""Service of the index: the event stream and the registry in, answers out."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from datetime import datetime

from kvbm_common.errors import DeadlineExceeded, KvbmError, NoResponder, RegistryUnavailable
from kvbm_common.nats.bus import Bus
from kvbm_common.nats.consumers import Resume, Start
from kvbm_common.nats.event_message import EventMessage
from kvbm_common.nats.event_subscription import EventSubscription
from kvbm_common.nats.snapshots import ask_snapshot, shed
from kvbm_common.registry.records import ENGINE, Changed, Joined, Left, RegistryEvent, ServiceRecord
from kvbm_common.runtime.logs import OncePerKind
from kvbm_common.runtime.loop import CoreLoop
from kvbm_common.service.context import ServiceContext
from kvbm_common.service.process import run
from kvbm_common.wire.codec import WireError
from kvbm_common.wire.epochs import epoch_max
from kvbm_common.wire.partitions import INDEX_GROUP
from kvbm_common.wire.verbs import (
    SnapshotRequest,
    StatsReply,
    verb_subject,
)

from kvbm_index.core import event_batch
from kvbm_index.core.core import IndexCore
from kvbm_index.core.memory import parts_of, usages_of
from kvbm_index.core.messages import (
    Effect,
    EventsReceived,
    Input,
    Limits,
    Received,
    RegistryRead,
    Restored,
    SnapshotFailed,
    SnapshotReceived,
    SourceJoined,
    SourceKey,
    SourceLeft,
    StreamLost,
    Tick,
)
from kvbm_index.core.snapshot_loader import SnapshotLoader
from kvbm_index.shell.image_store import ImageStore
from kvbm_index.shell.metrics import figures_of, metrics_of
from kvbm_index.shell.partitions import PartitionVerbs, Strangers, check_partition
from kvbm_index.shell.questions import Questions
from kvbm_index.shell.readiness import Readiness
from kvbm_index.shell.routing import Routing

INBOX_BATCHES_MAX = 64
"""Batches of up to 128 events that wait for the core: flow control holds the rest at NATS."""
TURNS = 4
"""Turns of all other tasks after each piece of work: a question needs four from its arrival on."""
INBOX_DEADLINE_S = 30.0
"""A core that takes nothing for so long is broken."""
TICK_MS = 10
LOOK_EVERY_MS = 50
SNAPSHOT_DEADLINE_S = 5.0
"""A million blocks take about a second to say."""
READY_DEADLINE_S = 3.0
"""The time that the start waits for the history of the stream, in seconds. A longer history is read
while serving."""
TIER_KINDS = ("host-tier", "disk-tier", "object-tier")

log = logging.getLogger(__name__)


class IndexShell:
    """Translates between NATS and the core."""

    def __init__(self, context: ServiceContext, core: IndexCore, events: Bus) -> None:
        """Prepare the service. `events` is another connection: no question waits behind events."""
        self._context = context
        self._events = events
        self._core = core
        self._loop: CoreLoop[Input, Effect] = CoreLoop(
            core,
            self._fetch_snapshot,
            inbox_size=INBOX_BATCHES_MAX,
            tick=Tick,
            tick_ms=TICK_MS,
            is_quiet=lambda: core.is_quiet,
        )
        self._routing = Routing(core)
        self._consolidators: dict[str, set[str]] = {}
        """The instances on each host."""
        self._partitions = context.bus.limits.partitioned
        self._own = context.settings.index_partition or 0
        self._strangers = Strangers(self._partitions, context.counters)
        self._images = ImageStore(
            context.bus,
            context.counters,
            interval_s=context.settings.index_image_s,
            partition=self._own,
        )
        self._running: list[asyncio.Task[None]] = []
        self._readiness = Readiness()
        self._log = OncePerKind(log)
        counters = context.counters
        self._dropped = counters.counter(
            "kvbm_index_messages_dropped_total",
            "Messages of the event stream that could not be read.",
            labels=("reason",),
        )
        self._lag = counters.histogram(
            "kvbm_index_event_lag_seconds",
            "From an event's time stamp to its arrival; one event of each batch.",
        )
        self._questions = Questions(core, counters)

    async def run(self) -> None:
        """Serve until the context is stopping."""
        context = self._context
        context.set_stats(self._stats)
        context.bounds.declare_queues(self._loop)
        context.bounds.declare(self._images.usages)
        context.counters.include(lambda: metrics_of(self._core.view.statistics))
        start = await self._restore()
        async with (
            self._events.event_subscription(
                start=start,
                spec=self._partitions.events(self._own),
                on_stream_lost=self._stream_lost,
            ) as events,
            asyncio.TaskGroup() as tasks,
        ):
            self._readiness.subscription = events
            self._running += [
                tasks.create_task(self._loop.run(), name="core"),
                tasks.create_task(self._follow(events), name="events"),
                tasks.create_task(self._wait_caught_up(events), name="catch up"),
                tasks.create_task(self._read_registry(), name="registry"),
                tasks.create_task(
                    self._images.run(self._core.image, lambda: self._core.view.position),
                    name="images",
                ),
            ]
            forget = context.registry.watch(self._registry_changed)
            await self._wait_ready()
            await self._add_verbs()
            context.ready(verb_subject("index", "*"))
            await context.stopping.wait()
            forget()
            for task in self._running:
                task.cancel()

    async def _add_verbs(self) -> None:
        verbs = self._questions.verbs | {"route": self._routing.answer}
        if self._partitions.count == 1:
            await self._context.add_verbs(verbs, shared=True)
            return
        verbs |= {"route": self._routing.answer_partition, "peers": self._routing.answer_peers}
        context = self._context
        merged = PartitionVerbs(
            context.bus, self._partitions, self._own, verbs, context.counters,
            self._routing.next_tie,
        )  # fmt: skip
        await context.bus.add_verbs(INDEX_GROUP, str(self._own), str(self._partitions.count), verbs)
        await context.add_verbs(merged.verbs, shared=True)

    # ---- inputs ------------------------------------------------------------------------------

    async def _restore(self) -> Start:
        """Take the newest image, if there is one; returns where the stream goes on."""
        image = await self._images.load()
        if image is None:
            return "all"
        self._loop.complete(Restored(image))
        return Resume(datetime.fromisoformat(image.stream), image.position)

    async def _follow(self, subscription: EventSubscription) -> None:
        async for batch in subscription:
            events = self._accepted(tuple(event_batch.read(batch, self._refuse)))
            if events:
                self._observe_lag(events[-1])
                stream = subscription.created
                received = EventsReceived(
                    events, batch[-1].sequence, stream.isoformat() if stream else ""
                )
                await self._loop.offer(received, deadline_s=INBOX_DEADLINE_S)
                await _let_others_run()

    def _accepted(self, events: tuple[Received, ...]) -> tuple[Received, ...]:
        """Return the events without those of a future epoch, or of another partition."""
        epoch_limit = epoch_max(time.time())
        kept = tuple(event for event in events if event.epoch <= epoch_limit)
        if len(kept) < len(events):
            self._dropped.labels(reason="future_epoch").inc(len(events) - len(kept))
            self._log.warning("future_epoch", "events whose epoch is more than a day ahead")
        return self._of_own_hosts(kept) if self._partitions.count > 1 else kept

    def _of_own_hosts(self, events: tuple[Received, ...]) -> tuple[Received, ...]:
        """Return the events without those of hosts whose partition is another one."""
        own = tuple(event for event in events if self._is_own(event.host))
        if len(own) < len(events):
            self._dropped.labels(reason="wrong_partition").inc(len(events) - len(own))
            self._log.warning("wrong_partition", "events of hosts of another partition")
        return own

    def _is_own(self, host: str) -> bool:
        return self._partitions.of(host) == self._own

    def _stream_lost(self) -> None:
        """Queue the loss of the stream after the events that wait: they came before it."""
        if not self._loop.offer_nowait(StreamLost()):
            # Later is as good: some sources are asked that need not be.
            offering = self._loop.offer(StreamLost(), deadline_s=INBOX_DEADLINE_S)
            self._running.append(asyncio.create_task(offering, name="stream lost"))

    def _refuse(self, message: EventMessage, error: WireError) -> None:
        self._dropped.labels(reason=error.kind).inc()
        self._log.warning(error.kind, f"{message.subject}: {error}")

    def _observe_lag(self, event: Received) -> None:
        lag_s = time.time() - event.ts_ms / 1000
        if event.ts_ms and 0 <= lag_s < INBOX_DEADLINE_S:
            self._lag.observe(lag_s)

    async def _wait_caught_up(self, subscription: EventSubscription) -> None:
        while not self._readiness.caught_up:
            try:
                await subscription.wait_caught_up(deadline_s=READY_DEADLINE_S)
                self._readiness.caught_up = True
            except DeadlineExceeded as error:
                self._log.warning("catch_up", f"still reading the stream: {error}")

    async def _read_registry(self) -> None:
        while not self._readiness.registry_read:
            try:
                await self._context.registry.list()
                self._loop.complete(RegistryRead())
                self._readiness.registry_read = True
            except RegistryUnavailable as error:
                self._log.warning("registry", str(error))
                await asyncio.sleep(SNAPSHOT_DEADLINE_S / 10)

    async def _wait_ready(self) -> None:
        """Wait until history and registry are read; after a deadline, serve what is known."""
        give_up_s = time.monotonic() + READY_DEADLINE_S
        while self._readiness.reasons() and time.monotonic() < give_up_s:
            if self._context.stopping.is_set():
                return
            await asyncio.sleep(TICK_MS / 1000)

    def _registry_changed(self, event: RegistryEvent) -> None:
        record = event.record
        if record.kind == "consolidator":
            self._strangers.take(event)
        if not self._is_own(record.host):
            return
        self._routing.take(event)
        if record.kind == "consolidator":
            instances = self._consolidators.setdefault(record.host, set())
            (instances.discard if isinstance(event, Left) else instances.add)(record.instance)
        key = _source_of(record)
        if key is None:
            return
        match event:
            case Joined() | Changed():
                self._loop.complete(SourceJoined(key, record.epoch))
            case Left():
                self._loop.complete(SourceLeft(key, record.epoch))

    # ---- effects -----------------------------------------------------------------------------

    async def _fetch_snapshot(self, effect: Effect) -> Input | None:
        key = effect.key
        kind, instance = self._owner_of(key)
        subject = verb_subject(kind, "snapshot", host=key.host, instance=instance)
        # Pages are long, and no question waits behind one.
        ask = functools.partial(self._events.request, subject, deadline_s=SNAPSHOT_DEADLINE_S)
        try:
            reply = await ask_snapshot(ask, SnapshotRequest(source=key.source))
        except KvbmError as error:
            # A tier is in the registry before it serves, and is asked again.
            log = self._log.info if isinstance(error, NoResponder) else self._log.warning
            log(f"snapshot_{error.label}", f"{key.host}/{key.source}: {error}")
            return SnapshotFailed(key)
        if (reply.host, reply.source) != key:
            return SnapshotFailed(key)
        loader = SnapshotLoader(reply)
        while not loader.go_on():
            await _let_others_run()
        self._loop.complete(SnapshotReceived(loader))
        await shed(reply)  # Its source is followed meanwhile.
        return None

    def _owner_of(self, key: SourceKey) -> tuple[str, str]:
        """Return what answers for a source: a tier itself, or the consolidator of its host.

        The consolidator answers for an engine, which cannot be called like a tier: the consolidator
        refuses that.
        """
        for kind in TIER_KINDS:
            if key.source.startswith(f"{kind}-"):
                return kind, key.source.removeprefix(f"{kind}-")
        return "consolidator", min(self._consolidators.get(key.host, ()), default="0")

    # ---- verbs -------------------------------------------------------------------------------

    def _stats(self) -> StatsReply:
        context = self._context
        view = self._core.view
        statistics, positions = view.statistics, view.positions
        figures = {name: float(value) for name, value in figures_of(statistics).items()}
        return StatsReply(
            kind=context.kind,
            host=context.host,
            instance=context.instance,
            epoch=context.epoch,
            ready=not self._readiness.reasons(),
            reasons=self._readiness.reasons(),
            figures=figures | {"dropped": float(sum(statistics.drops.values()))},
            positions={f"{key.host}.{key.source}": list(at) for key, at in positions.items()},
        )


async def _let_others_run() -> None:
    """Give every other task its turns."""
    for _ in range(TURNS):
        await asyncio.sleep(0)


def _source_of(record: ServiceRecord) -> SourceKey | None:
    """Return the source that a registered service is; None if it publishes no events."""
    if record.kind == ENGINE:
        return SourceKey(record.host, record.instance)
    if record.kind in TIER_KINDS:
        return SourceKey(record.host, f"{record.kind}-{record.instance}")
    return None


async def serve_index(context: ServiceContext) -> None:
    """Run the service until it is stopped."""
    limits = Limits(
        unregistered_ms=int(context.settings.registry_ttl_s * 1000), look_every_ms=LOOK_EVERY_MS
    )
    name = f"{context.bus.name}-events"
    events = await Bus.connect(context.bus.access, name, counters=context.counters)
    core = IndexCore(limits)
    context.footprint.declare(lambda: parts_of(limits, block_count=core.view.statistics.blocks))
    context.bounds.declare(lambda: usages_of(core.view.statistics, limits))
    try:
        await IndexShell(context, core, events).run()
    finally:
        await events.close()


def main() -> None:
    """Run the index: the entry point of `kvbm serve index`."""
    run("index", serve_index, check=check_partition)
