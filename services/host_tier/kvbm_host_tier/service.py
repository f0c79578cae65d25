"""The host tier's shell: sockets, NATS and NIXL around the core."""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import os
import time
from collections.abc import Awaitable, Callable
from typing import assert_never

import msgspec
from kvbm_common import logs
from kvbm_common.admin_verbs import tier_verbs
from kvbm_common.arena import remove_stale
from kvbm_common.batches import BATCH_UNIT_BYTES
from kvbm_common.counters import families_of_counts
from kvbm_common.errors import (
    BusUnavailable,
    DeadlineExceeded,
    KvbmError,
    NoResponder,
    RequestFailed,
)
from kvbm_common.event_publisher import EventPublisher
from kvbm_common.identity import HASH_BYTES
from kvbm_common.logs import OncePerKind
from kvbm_common.loop import CoreLoop, monotonic_ms
from kvbm_common.registry import Joined, Left, RegistryEvent
from kvbm_common.service import ServiceContext, run
from kvbm_common.snapshots import SnapshotPages, ask_snapshot
from kvbm_common.tracing import Tracer, tracer_of, wanted
from kvbm_common.wire.admin import PrefetchReply, PrefetchRequest, TierReply, TierRequest
from kvbm_common.wire.codec import JsonCodec, WireError
from kvbm_common.wire.events import (
    SUBJECT_PREFIX,
    Event,
    Removed,
    Tier,
    event_codec,
    event_subject,
)
from kvbm_common.wire.local import Found, Lookup, ToHostTier
from kvbm_common.wire.verbs import (
    DoorReply,
    ErrorBody,
    FillReply,
    LeaseReply,
    LeaseRequest,
    ReleaseReply,
    ReleaseRequest,
    SnapshotRequest,
    hits_codec,
    hits_subject,
    offer_codec,
    offers_subject,
    verb_subject,
)

from kvbm_host_tier.asking import ask_fates
from kvbm_host_tier.core import HostTierCore
from kvbm_host_tier.door import Door, DoorClosed
from kvbm_host_tier.engine_socket import EngineSocket
from kvbm_host_tier.explain_verbs import explain_verbs
from kvbm_host_tier.lower_tiers import LOWER
from kvbm_host_tier.messages import (
    NO_ARENA,
    AdminAsked,
    Answer,
    ArenaInfo,
    ArenaMade,
    ArenaRefused,
    AskDiskSnapshot,
    AskFates,
    AskFill,
    AttachPeer,
    DetachPeer,
    DiskEvent,
    DiskLost,
    DiskSeen,
    DiskSnapshot,
    Effect,
    FillDone,
    FillFailed,
    FromEngine,
    Input,
    LeaseAsked,
    MakeArena,
    OfferReceived,
    Publish,
    ReleaseAsked,
    StartPull,
    TellHits,
    Tick,
    ToEngine,
)
from kvbm_host_tier.peer_client import PeerClient
from kvbm_host_tier.peer_messages import (
    AskHolders,
    OpenDoor,
    PeerEffect,
    PeerId,
    PeerJoined,
    PeerLeft,
    PullFromPeer,
    ReleaseAtPeer,
)
from kvbm_host_tier.puller import Puller
from kvbm_host_tier.roster_keeper import RosterKeeper
from kvbm_host_tier.shard_messages import HandedOver, SayPlace, ShardEffect
from kvbm_host_tier.siblings import Siblings
from kvbm_host_tier.spans import OnboardSpans
from kvbm_host_tier.tier import Limits

INBOX_MAX = 10_000
"""Inputs that wait for the core: a second of a very busy host."""
TICK_MS = 50
FILL_MARGIN_S = 0.5
"""How long after a fill's deadline its answer may still arrive."""
SNAPSHOT_DEADLINE_S = 5.0
VERB_DEADLINE_S = 5.0

log = logging.getLogger(__name__)
_fill_reply: JsonCodec[FillReply] = JsonCodec(FillReply)
_lease_request: JsonCodec[LeaseRequest] = JsonCodec(LeaseRequest)
_release_request: JsonCodec[ReleaseRequest] = JsonCodec(ReleaseRequest)
_prefetch_request: JsonCodec[PrefetchRequest] = JsonCodec(PrefetchRequest)
_VerbReply = LeaseReply | ReleaseReply | TierReply | PrefetchReply


class HostTierShell:
    """Translates between the outside and the core."""

    def __init__(
        self, context: ServiceContext, core: HostTierCore, puller: Puller, engines: EngineSocket
    ) -> None:
        self._context = context
        self._core = core
        self._snapshots = SnapshotPages(lambda _: core.snapshot_pages())
        self._puller = puller
        self._engines = engines
        self._publisher: EventPublisher = context.bus.event_publisher(context.source)
        self._answers: dict[int, asyncio.Future[_VerbReply]] = {}
        self._reply_ids = itertools.count(1)
        self._limiter = OncePerKind(log)
        self._tracer: Tracer = tracer_of(context.settings, context.kind)
        self._spans = OnboardSpans(self._tracer)
        self._roster = RosterKeeper(core.tier, context.counters)
        self._door = Door(f"{context.source}-door")
        self._peers = PeerClient(
            context.bus, self._door, host=context.host, source=context.source,
            counters=context.counters,
        )  # fmt: skip
        self._dropped = context.counters.counter(
            "kvbm_bus_messages_dropped_total",
            "Messages on NATS that could not be taken.",
            labels=("reason",),
        )
        self._loop: CoreLoop[Input, Effect] = CoreLoop(
            core, self._carry_out, inbox_size=INBOX_MAX, tick=Tick, tick_ms=TICK_MS
        )
        self._siblings = Siblings(context, engines, core.sharding, self._loop.complete)

    async def run(self) -> None:
        """Serve until the context is stopping."""
        try:
            await self._run()
        finally:
            self._roster.close()
            await asyncio.to_thread(self._tracer.close)

    async def _run(self) -> None:
        context = self._context
        self._puller.on_settled = self._loop.complete
        self._peers.on_settled = self._loop.complete
        await self._subscribe()
        await self._siblings.start()
        forget = context.registry.watch(self._registry_changed)
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(self._loop.run(), name="core"),
                tasks.create_task(self._publisher.run(), name="publisher"),
                tasks.create_task(self._engines.run(self._from_engine), name="engines"),
                tasks.create_task(self._follow_disks(), name="disk events"),
                tasks.create_task(self._door.run(), name="door"),
                tasks.create_task(self._siblings.run(), name="siblings"),
            ]
            for effect in self._core.start():
                self._carry_out(effect)
            context.ready(f"{self._engines.listens_at} {_where(self._core.tier.arena)}")
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
        context.set_stats(lambda: self._core.statistics(monotonic_ms()))
        context.counters.include(
            lambda: families_of_counts(
                self._core.tier.counts, label_names={"lookup_blocks": "outcome", "bytes": "path"}
            )
        )
        await context.bus.subscribe(offers_subject(context.host), self._offer)
        await context.add_verbs(
            {
                "arena": self._arena,
                "door": self._open_door,
                "lease": self._lease,
                "release": self._release,
                "snapshot": self._snapshot,
                **explain_verbs(self._core.onboard.explain),
                **tier_verbs(self._admin, context.audit, further={"prefetch": _prefetch_request}),
            }
        )

    # --- inputs -----------------------------------------------------------------------------

    def _from_engine(self, connection: bytes, message: ToHostTier) -> bool:
        if log.isEnabledFor(logging.DEBUG) and isinstance(message, Lookup):
            ids = {"request": message.request, "engine": message.engine, "lookup": message.lookup}
            log.debug("%d blocks are looked up", len(message.hashes) // HASH_BYTES, extra=ids)
        message = self._spans.heard(connection, message)
        return self._loop.offer_nowait(FromEngine(connection, message))

    def _offer(self, _subject: str, payload: bytes) -> None:
        offer = offer_codec.decode(payload)
        if not self._loop.offer_nowait(OfferReceived(offer)):
            self._dropped.add(reason="inbox_full")

    async def _follow_disks(self) -> None:
        """Every event of a disk tier of this host, from now on; snapshots tell what was before."""
        subject = f"{SUBJECT_PREFIX}.{self._context.host}.*.*"
        async with self._context.bus.event_subscription(start="new", subject=subject) as events:
            async for batch in events:
                for message in batch:
                    self._disk_event(message.subject, message.payload)

    def _disk_event(self, subject: str, payload: bytes) -> None:
        source = subject.split(".")[-2]
        found = tier_of(source)
        if found is None:
            return
        tier, instance = found
        try:
            event: Event = event_codec.decode(payload)
            if event_subject(event) != subject:
                text = f"{event_subject(event)} on another subject"
                raise WireError(text, kind="wrong_subject")
        except WireError as error:
            self._dropped.add(reason=error.kind)
            self._limiter.warning(error.kind, f"an event on {subject} was dropped: {error}")
            return
        if not self._loop.offer_nowait(DiskEvent(instance, event, tier)):
            self._dropped.add(reason="inbox_full")

    def _registry_changed(self, event: RegistryEvent) -> None:
        record = event.record
        if record.kind == self._context.kind:
            if record.host == self._context.host:
                self._siblings.registry_changed(event)
            if (record.host, record.instance) != (self._context.host, self._context.instance):
                self._peer_changed(PeerId(record.host, record.instance), event)
        found = tier_of(f"{record.kind}-{record.instance}")
        if found is None or record.host != self._context.host:
            return
        tier, instance = found
        match event:
            case Joined():
                self._loop.complete(DiskSeen(instance, tier))
            case Left():
                self._loop.complete(DiskLost(instance, tier))
            case _:
                pass

    def _peer_changed(self, peer: PeerId, event: RegistryEvent) -> None:
        if not self._context.settings.peer_pulls:
            return
        self._peers.left(peer)
        self._loop.complete(PeerLeft(peer) if isinstance(event, Left) else PeerJoined(peer))

    # --- verbs ------------------------------------------------------------------------------

    async def _arena(self, _payload: bytes) -> bytes:
        return msgspec.json.encode(self._core.arena_reply())

    async def _open_door(self, _payload: bytes) -> bytes:
        opened, arena = self._door.opened, self._core.arena_reply()
        if opened is None or not arena.slot_bytes:
            raise DoorClosed("nobody can read here now")
        reply = DoorReply(
            epoch=arena.epoch,
            slot_bytes=arena.slot_bytes,
            slot_count=arena.slot_count,
            address=opened.address,
            agent=opened.agent,
        )
        return msgspec.json.encode(reply)

    async def _snapshot(self, payload: bytes) -> bytes:
        return self._snapshots.answer(payload)

    async def _lease(self, payload: bytes) -> bytes:
        request = _lease_request.decode(payload)
        return await self._spans.lease(
            request, self._ask_core(lambda reply_to: LeaseAsked(reply_to, request))
        )

    async def _release(self, payload: bytes) -> bytes:
        request = _release_request.decode(payload)
        return await self._ask_core(lambda reply_to: ReleaseAsked(reply_to, request))

    async def _admin(self, verb: str, request: TierRequest | PrefetchRequest) -> bytes:
        return await self._ask_core(lambda reply_to: AdminAsked(reply_to, verb, request))

    async def _ask_core(self, make: Callable[[int], Input]) -> bytes:
        reply_to = next(self._reply_ids)
        answer: asyncio.Future[_VerbReply] = asyncio.get_running_loop().create_future()
        self._answers[reply_to] = answer
        try:
            await self._loop.offer(make(reply_to), deadline_s=VERB_DEADLINE_S)
            async with asyncio.timeout(VERB_DEADLINE_S):
                return msgspec.json.encode(await answer)
        except TimeoutError as error:
            raise DeadlineExceeded("the core did not answer") from error
        finally:
            del self._answers[reply_to]

    # --- effects ----------------------------------------------------------------------------

    def _carry_out(self, effect: Effect) -> Input | Awaitable[Input | None] | None:
        match effect:
            case ToEngine(connection, message):
                if log.isEnabledFor(logging.DEBUG) and isinstance(message, Found):
                    text = "%d blocks are leased; %s"
                    ids = {"lookup": message.lookup}
                    log.debug(text, len(message.slots), message.reason or "all", extra=ids)
                self._spans.said(connection, message)
                self._engines.send(connection, message)
            case MakeArena(size_bytes):
                return self._make_arena(size_bytes)
            case AttachPeer():
                return self._puller.attach(effect)
            case DetachPeer(peer):
                self._puller.detach(peer)
            case StartPull():
                return self._puller.pull(effect, slot_bytes=self._core.tier.slot_bytes)
            case AskFill():
                return self._spans.fill(effect, self._fill)
            case AskDiskSnapshot(instance, tier):
                return self._disk_snapshot(instance, tier)
            case AskFates():
                return ask_fates(self._context, effect)
            case Answer(reply_to, reply):
                self._answer(reply_to, reply)
            case Publish(event):
                self._publish(event)
            case TellHits(hits):
                subject = hits_subject(self._context.host)
                ours = msgspec.structs.replace(hits, instance=self._context.instance)
                return self._tell(subject, hits_codec.encode(ours))
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
            case OpenDoor(path):
                self._door.want(path)
            case SayPlace():
                return self._siblings.say(effect)
            case HandedOver():
                self._siblings.handed_over.set()
            case _:
                assert_never(effect)
        return None

    async def _make_arena(self, size_bytes: int) -> ArenaMade | ArenaRefused:
        try:
            return ArenaMade(await asyncio.to_thread(self._puller.make_arena, size_bytes))
        except (KvbmError, TimeoutError) as error:
            log.error("no arena of %d bytes: %s", size_bytes, error)
            return ArenaRefused(str(error) or "NIXL did not answer")

    async def _fill(self, effect: AskFill) -> FillDone | FillFailed:
        if not self._context.bus.connected:
            # It was never sent: the slots are not lent, and an outage does not use up the arena.
            return FillFailed(effect.fill, BusUnavailable.code, settled=True)
        subject = self._disk_verb(effect.tier, effect.instance, "fill")
        left_s = (effect.request.until_ms - monotonic_ms()) / 1000 + FILL_MARGIN_S
        try:
            payload = await self._context.bus.request(
                subject, msgspec.json.encode(effect.request), deadline_s=max(left_s, 0.01)
            )
            return FillDone(effect.fill, _fill_reply.decode(payload))
        except (NoResponder, RequestFailed, WireError) as error:
            return FillFailed(effect.fill, error.code, settled=True)
        except (DeadlineExceeded, BusUnavailable) as error:
            # The request may have left before the connection broke.
            return FillFailed(effect.fill, error.code, settled=False)

    async def _disk_snapshot(self, instance: str, tier: Tier) -> DiskSnapshot | None:
        ask = functools.partial(
            self._context.bus.request,
            self._disk_verb(tier, instance, "snapshot"),
            deadline_s=SNAPSHOT_DEADLINE_S,
        )
        try:
            reply = await ask_snapshot(ask, SnapshotRequest(source=f"{tier}-tier-{instance}"))
            return DiskSnapshot(instance, reply, tier)
        except KvbmError as error:
            log.warning("no snapshot of %s tier %s: %s", tier, instance, error)
            return DiskSnapshot(instance, None, tier)

    async def _tell(self, subject: str, payload: bytes) -> None:
        await self._context.bus.publish(subject, payload)

    def _disk_verb(self, tier: Tier, instance: str, verb: str) -> str:
        return verb_subject(f"{tier}-tier", verb, host=self._context.host, instance=instance)

    def _answer(self, reply_to: int, reply: _VerbReply | ErrorBody) -> None:
        answer = self._answers.get(reply_to)
        if answer is None or answer.done():
            self._dropped.add(reason="answer_too_late")
        elif isinstance(reply, ErrorBody):
            answer.set_exception(RequestFailed(reply.code, reply.message, reply.field))
        else:
            answer.set_result(reply)

    def _publish(self, event: Event) -> None:
        if isinstance(event, Removed) and event.reason == "corrupt":
            logs.corrupt(log, event.hashes)
        self._roster.follow(event)
        event = msgspec.structs.replace(event, ts_ms=time.time_ns() // 1_000_000)
        self._publisher.publish(
            event_subject(event), event_codec.encode(event), epoch=event.epoch, seq=event.seq
        )


async def serve(context: ServiceContext) -> None:
    """Run the host tier of this host."""
    settings = context.settings
    prefix = f"kvbm-{context.host}-{context.instance}-"
    remove_stale(settings.shm_dir, prefix)
    by_count = bool(settings.cpu_cache_override_num_blocks)
    disk_only = settings.cpu_cache_bytes == 0 and not by_count
    capacity = settings.staging_bytes if disk_only else settings.cpu_cache_bytes
    name = f"{prefix}{context.epoch}"
    puller = Puller(settings.shm_dir, name=name, counters=context.counters)
    try:
        core = HostTierCore(
            host=context.host,
            instance=context.instance,
            epoch=context.epoch,
            arena=NO_ARENA if by_count else puller.make_arena(capacity),
            limits=_limits(context),
            policy=settings.eviction_policy,
            staging=disk_only,
        )
        engines = EngineSocket(
            settings.host_tier_endpoint, context.counters, instance=context.instance
        )
        async with engines:
            await HostTierShell(context, core, puller, engines).run()
    finally:
        puller.close()


def tier_of(source: str) -> tuple[Tier, str] | None:
    """The lower tier that a source is an instance of: ("disk", "0"); None: it is none."""
    for tier in LOWER:
        if source.startswith(f"{tier}-tier-"):
            return tier, source.removeprefix(f"{tier}-tier-")
    return None


def _limits(context: ServiceContext) -> Limits:
    settings = context.settings
    return Limits(
        slot_count=settings.cpu_cache_override_num_blocks,
        transfers_max=settings.max_concurrent_transfers,
        batch_blocks_max=settings.max_transfer_batch_size,
        batch_bytes=settings.max_transfer_batch_size * BATCH_UNIT_BYTES,
        peer_pulls_max=settings.peer_pulls_max if settings.peer_pulls else 0,
        peer_deadline_ms=settings.peer_deadline_ms,
        hit_window=settings.cache_stats_max_requests,
        explain_requests=settings.explain_requests,
        recompute_tokens_per_s=settings.recompute_tokens_per_s,
        traces=wanted(settings, os.environ),
    )


def _where(arena: ArenaInfo) -> str:
    return f"arena {arena.path}" if arena.path else "arena to be made for the first engine"


def main() -> None:
    """The entry point of `kvbm serve host-tier`."""
    run("host-tier", serve)
