"""The shell of a tier below the host tier: NATS around a core and its medium."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import assert_never

import msgspec
from kvbm_common.errors import DeadlineExceeded, KvbmError, RegistryUnavailable
from kvbm_common.identity import hashes_from_hex
from kvbm_common.nats.event_publisher import EventPublisher
from kvbm_common.nats.snapshots import SnapshotPages, ask_snapshot, shed
from kvbm_common.registry.records import Left, RegistryEvent
from kvbm_common.runtime import logs
from kvbm_common.runtime.logs import OncePerKind
from kvbm_common.runtime.loop import CoreLoop, monotonic_ms
from kvbm_common.runtime.metrics import metrics_of_counts, metrics_of_gauges
from kvbm_common.service.admin_verbs import CoreAnswers, tier_verbs
from kvbm_common.service.context import ServiceContext
from kvbm_common.service.tracing import Attributes, Tracer, tracer_of
from kvbm_common.wire.admin import FilterRequest, TierRequest
from kvbm_common.wire.codec import JsonCodec, WireError
from kvbm_common.wire.events import SUBJECT_PREFIX, Event, Removed
from kvbm_common.wire.explain import fates_request
from kvbm_common.wire.packed_events import events_on
from kvbm_common.wire.verbs import (
    ArenaReply,
    ArenaRequest,
    FillRequest,
    LeaseReply,
    ReleaseReply,
    ReleaseRequest,
    SnapshotRequest,
    hits_codec,
    hits_subject,
    verb_subject,
)

from kvbm_disk_tier.core.core import DiskTierCore
from kvbm_disk_tier.core.effects import (
    AnnounceLater,
    Answer,
    AppendJournal,
    AskArena,
    AskHostSnapshot,
    DropArena,
    Effect,
    LeaseHost,
    OpenStore,
    ProbeStore,
    Publish,
    ReadSlots,
    ReleaseHost,
    RewriteJournal,
    SayAccepting,
    WriteSlots,
)
from kvbm_disk_tier.core.messages import (
    AdminAsked,
    AnnounceMore,
    ArenaFailed,
    ArenaKnown,
    FillAsked,
    HitsTold,
    HostEvent,
    HostEventsLost,
    HostJoined,
    HostLeft,
    HostSnapshot,
    HostSnapshotFailed,
    Input,
    Leased,
    LeaseFailed,
    Released,
    StoreFailed,
    StoreOpened,
    Tick,
    WritersKnown,
)
from kvbm_disk_tier.core.pending import UNANSWERED
from kvbm_disk_tier.core.shards import writers_of
from kvbm_disk_tier.core.snapshot_pieces import pieces_of
from kvbm_disk_tier.shell.inbox import hand_in
from kvbm_disk_tier.shell.medium import Medium

INBOX_MAX = 10_000
"""Inputs that wait for the core: a second of a very busy host."""
TICK_MS = 1_000
HOST_DEADLINE_S = 2.0
"""The host tier answers from memory; longer means that it is in trouble."""
FILL_DEADLINE_S = 600.0
"""The request carries its own deadline; this only ends a handler that gets no answer."""
GOODBYE_S = 1.0
ANNOUNCE_DEADLINE_S = 0.25
"""The seconds that a step which announces a former life's blocks waits for the one before."""
ACCEPTING = "accepting"
"""The key in a disk tier's registry entry that says whether it takes blocks."""

log = logging.getLogger(__name__)
_arena_reply: JsonCodec[ArenaReply] = JsonCodec(ArenaReply)
_lease_reply: JsonCodec[LeaseReply] = JsonCodec(LeaseReply)
_release_reply: JsonCodec[ReleaseReply] = JsonCodec(ReleaseReply)
_fill_request: JsonCodec[FillRequest] = JsonCodec(FillRequest)


class TierShell:
    """Translates between the outside, a core and its medium."""

    def __init__(self, context: ServiceContext, core: DiskTierCore, medium: Medium) -> None:
        self._context = context
        self._token = secrets.token_hex(16)
        """The token that gives our leases back: nothing else does."""
        self._core = core
        self._snapshots = SnapshotPages(lambda _: core.view.snapshot_pages())
        self._medium = medium
        self._publisher: EventPublisher = context.bus.event_publisher(
            context.source, spec=context.events
        )
        self._dropped = context.counters.counter(
            "kvbm_bus_messages_dropped_total",
            "Messages on NATS that could not be taken.",
            labels=("reason",),
        )
        self._answers = CoreAnswers(self._dropped)
        self._log = OncePerKind(log)
        self._tracer: Tracer = tracer_of(context.settings, context.kind)
        self._accepting: dict[str, bool] = {}
        """The instances of our kind on this host, and whether they take blocks."""
        self._loop: CoreLoop[Input, Effect] = CoreLoop(
            core, self._carry_out, inbox_size=INBOX_MAX, tick=Tick, tick_ms=TICK_MS
        )

    async def run(self) -> None:
        """Serve until the context is stopping."""
        context = self._context
        recovered = await self._medium.recover()
        view = self._core.view
        context.set_stats(view.statistics)
        context.counters.include(lambda: metrics_of_gauges(view.gauges()))
        context.counters.include(
            lambda: metrics_of_counts(view.counts(), label_names={"bytes": "direction"})
        )
        context.bounds.declare(lambda: view.usages(monotonic_ms()))
        context.bounds.declare_queues(self._loop, self._publisher)
        await context.bus.subscribe(hits_subject(context.host), self._hits)
        own = {"fill": self._fill, "snapshot": self._snapshot, "fates": self._fates}
        await context.add_verbs(own | tier_verbs(context.kind, self._admin, context.audit))
        first = list(self._core.start())
        first += self._core.step(recovered, monotonic_ms()) if recovered is not None else ()
        blocks = len(recovered.replay.blocks) if isinstance(recovered, StoreOpened) else 0
        problem = recovered.reason if isinstance(recovered, StoreFailed) else ""
        found = f"not used: {problem}" if problem else f"with {blocks} blocks"
        del recovered  # 185 bytes a block, which the core needs until all are announced.
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(self._loop.run(first), name="core"),
                tasks.create_task(self._publisher.run(), name="publisher"),
                tasks.create_task(self._follow_hosts(), name="host events"),
                tasks.create_task(self._medium.run(self._loop), name="medium"),
            ]
            forget = context.registry.watch(self._registry_changed)
            context.ready(f"{self._medium.where} {found}")
            await context.stopping.wait()
            forget()
            await self._say_goodbye()
            await asyncio.to_thread(self._tracer.close)
            for task in running:
                task.cancel()

    async def _say_goodbye(self) -> None:
        for effect in self._core.stop():
            self._carry_out(effect)
        with contextlib.suppress(DeadlineExceeded):
            # What is in flight ends well if it can: a half-read fill is of no use.
            await self._loop.wait_idle(deadline_s=GOODBYE_S)
        try:
            await self._publisher.flush(deadline_s=GOODBYE_S)
        except DeadlineExceeded as error:
            log.warning("stopping with events unpublished: %s", error)

    # --- inputs -----------------------------------------------------------------------------

    def _hits(self, _subject: str, payload: bytes) -> None:
        hits = hits_codec.decode(payload)
        self._offer(HitsTold(hits.instance, hits))

    async def _follow_hosts(self) -> None:
        """Follow every event of a host tier of this host, from now on.

        Snapshots tell what was before.
        """
        subject = f"{SUBJECT_PREFIX}.{self._context.host}.*.*"
        subscription = self._context.bus.event_subscription(
            start="new",
            subject=subject,
            spec=self._context.events,
            on_stream_lost=lambda: self._loop.complete(HostEventsLost()),
        )
        async with subscription as events:
            async for batch in events:
                for message in batch:
                    self._host_events(message.subject, message.payload)

    def _host_events(self, subject: str, payload: bytes) -> None:
        source = subject.split(".")[-2]
        if not source.startswith("host-tier-"):
            return
        try:
            events = events_on(subject, payload)
        except WireError as error:
            self._dropped.labels(reason=error.kind).inc()
            return
        for event in events:
            self._offer(HostEvent(source.removeprefix("host-tier-"), event))

    def _offer(self, event: Input) -> None:
        if not self._loop.offer_nowait(event):
            self._dropped.labels(reason="inbox_full").inc()

    def _registry_changed(self, event: RegistryEvent) -> None:
        record = event.record
        if record.kind == self._context.kind and record.host == self._context.host:
            if isinstance(event, Left):
                self._accepting.pop(record.instance, None)
            else:
                self._accepting[record.instance] = record.info.get(ACCEPTING) is not False
            self._loop.complete(WritersKnown(writers_of(self._accepting)))
        if record.kind == "host-tier" and record.host == self._context.host:
            if isinstance(event, Left):
                self._loop.complete(HostLeft(record.instance))
            else:
                self._loop.complete(HostJoined(record.instance, record.epoch))

    # --- verbs ------------------------------------------------------------------------------

    async def _snapshot(self, payload: bytes) -> bytes:
        return self._snapshots.answer(payload)

    async def _fates(self, payload: bytes) -> bytes:
        names = hashes_from_hex(fates_request.decode(payload).hashes)
        return msgspec.json.encode(self._core.view.fates(names, monotonic_ms()))

    async def _fill(self, payload: bytes) -> bytes:
        request = _fill_request.decode(payload)
        outer, start_ns = self._tracer.parse(request.trace), time.time_ns()
        reply = await self._ask_core(lambda reply_to: FillAsked(reply_to, request))
        if outer is not None and self._tracer.on:
            asked: Attributes = {
                "kvbm.blocks": len(request.slots),
                "kvbm.instance": self._context.instance,
            }
            self._tracer.ended(
                "read", outer.child(), parent=outer, start_ns=start_ns, attributes=asked
            )
        return reply

    async def _admin(self, verb: str, request: TierRequest | FilterRequest) -> bytes:
        return await self._ask_core(lambda reply_to: AdminAsked(reply_to, verb, request))

    async def _ask_core(self, make: Callable[[int], Input]) -> bytes:
        # Onboarding goes ahead: a fill does not wait behind events in the inbox.
        return await self._answers.ask(
            lambda reply_to: self._loop.complete(make(reply_to)), deadline_s=FILL_DEADLINE_S
        )

    # --- effects ----------------------------------------------------------------------------

    def _carry_out(self, effect: Effect) -> Input | Awaitable[Input | None] | None:
        match effect:
            case OpenStore(slot_bytes):
                return self._medium.open(slot_bytes)
            case ProbeStore():
                return self._medium.probe(effect)
            case RewriteJournal():
                return self._medium.rewrite(effect)
            case DropArena(instance):
                self._medium.drop_arena(instance)
            case AskArena(instance):
                return self._ask_arena(instance)
            case AskHostSnapshot(instance):
                return self._host_snapshot(instance)
            case LeaseHost():
                return self._lease(effect)
            case ReleaseHost():
                return self._release(effect)
            case WriteSlots():
                return self._medium.write(effect)
            case ReadSlots():
                return self._medium.read(effect)
            case AppendJournal():
                return self._medium.append(effect)
            case Answer(reply_to, reply):
                self._answers.give(reply_to, reply)
            case Publish(event):
                self._publish(event)
            case AnnounceLater():
                return self._pause()
            case SayAccepting(accepting):
                return self._say_accepting(accepting)
            case _:
                assert_never(effect)
        return None

    async def _pause(self) -> AnnounceMore:
        """Give other tasks a turn, and NATS time: what the outbox dropped would be a gap."""
        with contextlib.suppress(DeadlineExceeded):
            await self._publisher.flush(deadline_s=ANNOUNCE_DEADLINE_S)
        return AnnounceMore()

    async def _say_accepting(self, accepting: bool) -> None:
        """Tell the others whether this one accepts blocks; unheard, a block is written twice."""
        try:
            await self._context.registration.update({ACCEPTING: accepting})
        except RegistryUnavailable as error:
            self._log.warning(error.code, f"the other disk tiers do not hear of us: {error}")

    async def _ask_arena(self, instance: str) -> ArenaKnown | ArenaFailed:
        try:
            asked = msgspec.json.encode(ArenaRequest(any_size=True))
            reply = _arena_reply.decode(await self._ask_host(instance, "arena", asked))
            _require_usable(reply, instance)
            if reply.slot_bytes:
                self._medium.use_arena(reply)
        except (KvbmError, OSError) as error:
            log.warning("no arena of host tier %s: %s", instance, error)
            return ArenaFailed(instance)
        return ArenaKnown(reply)

    async def _host_snapshot(self, instance: str) -> HostSnapshotFailed | None:
        ask = functools.partial(self._ask_host, instance, "snapshot")
        try:
            reply = await ask_snapshot(ask, SnapshotRequest(source=f"host-tier-{instance}"))
        except KvbmError as error:
            self._log.warning(error.label, f"no snapshot of host tier {instance}: {error}")
            return HostSnapshotFailed(instance)
        for piece in pieces_of(reply):
            await hand_in(self._loop, HostSnapshot(instance, piece), self._log, "a snapshot")
        await shed(reply)
        return None

    async def _lease(self, effect: LeaseHost) -> Leased | LeaseFailed:
        try:
            request = msgspec.structs.replace(effect.request, token=self._token)
            payload = await self._ask_host(effect.instance, "lease", msgspec.json.encode(request))
            return Leased(effect.write, _lease_reply.decode(payload))
        except KvbmError as error:
            return LeaseFailed(effect.write, error.code)

    async def _release(self, effect: ReleaseHost) -> Released:
        request = ReleaseRequest(lease=effect.lease, token=self._token)
        try:
            payload = await self._ask_host(effect.instance, "release", msgspec.json.encode(request))
            return Released(effect.write, _release_reply.decode(payload).valid)
        except KvbmError as error:
            log.warning("a lease could not be given back: %s", error)
            unanswered = error.code in UNANSWERED
            return Released(effect.write, valid=False, answered=not unanswered)

    async def _ask_host(self, instance: str, verb: str, payload: bytes) -> bytes:
        subject = verb_subject("host-tier", verb, host=self._context.host, instance=instance)
        return await self._context.bus.request(subject, payload, deadline_s=HOST_DEADLINE_S)

    def _publish(self, event: Event) -> None:
        if isinstance(event, Removed) and event.reason == "corrupt":
            logs.corrupt(log, event.hashes)
        self._publisher.publish_event(event)


def _require_usable(arena: ArenaReply, instance: str) -> None:
    """Raise WireError for an arena of another host tier, or slots that end after their arena.

    The core would wait without end for the arena that it has asked for.
    """
    if arena.instance != instance:
        text = f"it is of host tier {arena.instance}"
        raise WireError(text, kind="malformed", field="instance")
    if arena.slot_count * arena.slot_bytes > arena.bytes:
        text = f"{arena.slot_count} slots do not fit into {arena.bytes} bytes"
        raise WireError(text, kind="malformed", field="slot_count")


async def serve_nothing(context: ServiceContext, core: DiskTierCore, why: str) -> None:
    """Answer the questions that go to every source, so that they end."""

    snapshots = SnapshotPages(lambda _: core.view.snapshot_pages())

    async def snapshot(payload: bytes) -> bytes:
        return snapshots.answer(payload)

    context.set_stats(core.view.statistics)
    await context.add_verbs({"snapshot": snapshot})
    await context.registration.update({ACCEPTING: False})
    context.ready(f"off: {why}")
    await context.stopping.wait()
