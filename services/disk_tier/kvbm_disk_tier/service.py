"""The shell of a tier below the host tier: NATS around a core and its medium; the disk tier."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, assert_never

import msgspec
from kvbm_common import logs
from kvbm_common.admin_verbs import tier_verbs
from kvbm_common.batches import batch_blocks
from kvbm_common.config import Settings
from kvbm_common.counters import families_of_counts, families_of_gauges
from kvbm_common.errors import DeadlineExceeded, KvbmError, RegistryUnavailable, RequestFailed
from kvbm_common.event_publisher import EventPublisher
from kvbm_common.identity import hashes_from_hex
from kvbm_common.logs import OncePerKind
from kvbm_common.loop import CoreLoop, monotonic_ms
from kvbm_common.registry import Left, RegistryEvent
from kvbm_common.service import ServiceContext, run
from kvbm_common.snapshots import SnapshotPages, ask_snapshot
from kvbm_common.tracing import Attributes, Tracer, tracer_of
from kvbm_common.wire.admin import FilterReply, FilterRequest, TierReply, TierRequest
from kvbm_common.wire.codec import JsonCodec, WireError
from kvbm_common.wire.events import SUBJECT_PREFIX, Event, Removed, event_codec, event_subject
from kvbm_common.wire.explain import fates_request
from kvbm_common.wire.verbs import (
    ArenaReply,
    ErrorBody,
    FillReply,
    FillRequest,
    LeaseReply,
    ReleaseReply,
    ReleaseRequest,
    SnapshotRequest,
    hits_codec,
    hits_subject,
    verb_subject,
)

from kvbm_disk_tier.core import DiskTierCore
from kvbm_disk_tier.depth import Tuning
from kvbm_disk_tier.disk_medium import DiskMedium
from kvbm_disk_tier.file_backend import file_mover
from kvbm_disk_tier.frequency_filter import FrequencyFilter
from kvbm_disk_tier.medium import Medium
from kvbm_disk_tier.messages import (
    AdminAsked,
    AnnounceLater,
    AnnounceMore,
    Answer,
    AppendJournal,
    ArenaFailed,
    ArenaKnown,
    AskArena,
    AskHostSnapshot,
    DropArena,
    Effect,
    FillAsked,
    HitsTold,
    HostEvent,
    HostEventsLost,
    HostLost,
    HostSeen,
    HostSnapshot,
    Input,
    Leased,
    LeaseFailed,
    LeaseHost,
    OpenStore,
    Publish,
    ReadSlots,
    Released,
    ReleaseHost,
    RewriteJournal,
    SayAccepting,
    StoreOpened,
    Tick,
    WritersKnown,
    WriteSlots,
)
from kvbm_disk_tier.mover import DiskMover
from kvbm_disk_tier.retries import UNANSWERED
from kvbm_disk_tier.shards import writers_of
from kvbm_disk_tier.store import (
    CIPHER,
    Store,
    StoreBusy,
    StoreOptions,
)
from kvbm_disk_tier.tier import limits_of

if TYPE_CHECKING:
    from kvbm_disk_tier.sealing import Keys

INBOX_MAX = 10_000
"""Inputs that wait for the core: a second of a very busy host."""
TICK_MS = 1_000
HOST_DEADLINE_S = 2.0
"""The host tier answers from memory; longer means that it is in trouble."""
FILL_DEADLINE_S = 600.0
"""The request carries its own deadline; this only ends a handler that nobody answers."""
GOODBYE_S = 1.0
LOCK_DEADLINE_S = 4.5
"""A predecessor whose place we have taken is gone by then (kvbm_common.service.EXIT_DEADLINE_S)."""
LOCK_TRY_S = 0.1
ANNOUNCE_DEADLINE_S = 0.25
"""How long the next step that announces a former life's blocks waits for the one before."""
SEALED_BATCHES = 6
"""Batches that are sealed or opened at once: a sealed store takes so much more memory."""
ACCEPTING = "accepting"
"""The key in a disk tier's registry entry that says whether it takes blocks."""

log = logging.getLogger(__name__)
_arena_reply: JsonCodec[ArenaReply] = JsonCodec(ArenaReply)
_lease_reply: JsonCodec[LeaseReply] = JsonCodec(LeaseReply)
_release_reply: JsonCodec[ReleaseReply] = JsonCodec(ReleaseReply)
_fill_request: JsonCodec[FillRequest] = JsonCodec(FillRequest)
_filter_request: JsonCodec[FilterRequest] = JsonCodec(FilterRequest)
_VerbReply = FillReply | TierReply | FilterReply


class TierShell:
    """Translates between the outside, a core and its medium."""

    def __init__(self, context: ServiceContext, core: DiskTierCore, medium: Medium) -> None:
        self._context = context
        self._core = core
        self._snapshots = SnapshotPages(lambda _: core.snapshot_pages())
        self._medium = medium
        self._publisher: EventPublisher = context.bus.event_publisher(context.source)
        self._answers: dict[int, asyncio.Future[_VerbReply]] = {}
        self._reply_ids = itertools.count(1)
        self._dropped = context.counters.counter(
            "kvbm_bus_messages_dropped_total",
            "Messages on NATS that could not be taken.",
            labels=("reason",),
        )
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
        context.set_stats(self._core.statistics)
        context.counters.include(lambda: families_of_gauges(self._core.gauges()))
        context.counters.include(
            lambda: families_of_counts(self._core.tier.counts, label_names={"bytes": "direction"})
        )
        await context.bus.subscribe(hits_subject(context.host), self._hits)
        own = {"fill": self._fill, "snapshot": self._snapshot, "fates": self._fates}
        further = {"filter": _filter_request}
        await context.add_verbs(own | tier_verbs(self._admin, context.audit, further=further))
        first = list(self._core.start())
        if recovered is not None:  # Ready is who has it in its tables.
            first += self._core.step(recovered, monotonic_ms())
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(self._loop.run(first), name="core"),
                tasks.create_task(self._publisher.run(), name="publisher"),
                tasks.create_task(self._follow_hosts(), name="host events"),
                tasks.create_task(self._medium.run(self._loop), name="medium"),
            ]
            forget = context.registry.watch(self._registry_changed)
            blocks = len(recovered.replay.blocks) if isinstance(recovered, StoreOpened) else 0
            context.ready(f"{self._medium.where} with {blocks} blocks")
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
            # What flies ends well if it can: a half-read fill is of no use to anybody.
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
        """Every event of a host tier of this host, from now on; snapshots tell what was before."""
        subject = f"{SUBJECT_PREFIX}.{self._context.host}.*.*"
        subscription = self._context.bus.event_subscription(
            start="new",
            subject=subject,
            on_stream_lost=lambda: self._loop.complete(HostEventsLost()),
        )
        async with subscription as events:
            async for batch in events:
                for message in batch:
                    self._host_event(message.subject, message.payload)

    def _host_event(self, subject: str, payload: bytes) -> None:
        source = subject.split(".")[-2]
        if not source.startswith("host-tier-"):
            return
        try:
            event: Event = event_codec.decode(payload)
        except WireError as error:
            self._dropped.add(reason=error.kind)
            return
        if (event.host, event.source) != (self._context.host, source):
            self._dropped.add(reason="wrong_subject")
            return
        self._offer(HostEvent(source.removeprefix("host-tier-"), event))

    def _offer(self, event: Input) -> None:
        if not self._loop.offer_nowait(event):
            self._dropped.add(reason="inbox_full")

    def _registry_changed(self, event: RegistryEvent) -> None:
        record = event.record
        if record.kind == self._context.kind and record.host == self._context.host:
            if isinstance(event, Left):
                self._accepting.pop(record.instance, None)
            else:
                self._accepting[record.instance] = record.info.get(ACCEPTING) is not False
            self._loop.complete(WritersKnown(writers_of(self._accepting)))
        if record.kind == "host-tier" and record.host == self._context.host:
            gone = isinstance(event, Left)
            self._loop.complete(HostLost(record.instance) if gone else HostSeen(record.instance))

    # --- verbs ------------------------------------------------------------------------------

    async def _snapshot(self, payload: bytes) -> bytes:
        return self._snapshots.answer(payload)

    async def _fates(self, payload: bytes) -> bytes:
        names = hashes_from_hex(fates_request.decode(payload).hashes)
        return msgspec.json.encode(self._core.fates(names, monotonic_ms()))

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
        reply_to = next(self._reply_ids)
        answer: asyncio.Future[_VerbReply] = asyncio.get_running_loop().create_future()
        self._answers[reply_to] = answer
        try:
            # Onboarding goes ahead: a fill does not wait behind events in the inbox.
            self._loop.complete(make(reply_to))
            async with asyncio.timeout(FILL_DEADLINE_S):
                return msgspec.json.encode(await answer)
        except TimeoutError as error:
            raise DeadlineExceeded("the core did not answer") from error
        finally:
            del self._answers[reply_to]

    # --- effects ----------------------------------------------------------------------------

    def _carry_out(self, effect: Effect) -> Input | Awaitable[Input | None] | None:
        match effect:
            case OpenStore(slot_bytes):
                return self._medium.open(slot_bytes)
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
                self._answer(reply_to, reply)
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
        """Others have their turn, and NATS its time: what the outbox dropped would be a gap."""
        with contextlib.suppress(DeadlineExceeded):
            await self._publisher.flush(deadline_s=ANNOUNCE_DEADLINE_S)
        return AnnounceMore()

    async def _say_accepting(self, accepting: bool) -> None:
        """Whoever does not hear of it goes on as before: a block is written twice, or not."""
        try:
            await self._context.registration.update({ACCEPTING: accepting})
        except RegistryUnavailable as error:
            self._log.warning(error.code, f"the other disk tiers do not hear of us: {error}")

    async def _ask_arena(self, instance: str) -> ArenaKnown | ArenaFailed:
        try:
            reply = _arena_reply.decode(await self._ask_host(instance, "arena", b"{}"))
            if reply.slot_bytes:
                self._medium.use_arena(reply)
        except (KvbmError, OSError) as error:
            log.warning("no arena of host tier %s: %s", instance, error)
            return ArenaFailed(instance)
        return ArenaKnown(reply)

    async def _host_snapshot(self, instance: str) -> HostSnapshot | None:
        ask = functools.partial(self._ask_host, instance, "snapshot")
        try:
            request = SnapshotRequest(source=f"host-tier-{instance}")
            return HostSnapshot(instance, await ask_snapshot(ask, request))
        except KvbmError as error:
            log.warning("no snapshot of host tier %s: %s", instance, error)
            return None

    async def _lease(self, effect: LeaseHost) -> Leased | LeaseFailed:
        try:
            payload = await self._ask_host(
                effect.instance, "lease", msgspec.json.encode(effect.request)
            )
            return Leased(effect.write, _lease_reply.decode(payload))
        except KvbmError as error:
            return LeaseFailed(effect.write, error.code)

    async def _release(self, effect: ReleaseHost) -> Released:
        request = ReleaseRequest(lease=effect.lease)
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
        event = msgspec.structs.replace(event, ts_ms=time.time_ns() // 1_000_000)
        self._publisher.publish(
            event_subject(event), event_codec.encode(event), epoch=event.epoch, seq=event.seq
        )


async def serve(context: ServiceContext) -> None:
    """Run a disk tier; without a disk cache it only says that it is there, and empty."""
    settings = context.settings
    keys = keys_of(settings)
    options = StoreOptions(
        directory=settings.disk_cache_dir / f"kvbm-{context.host}-{context.instance}",
        capacity_bytes=settings.disk_cache_bytes,
        slot_count=settings.disk_cache_override_num_blocks or None,
        direct=not settings.disk_disable_o_direct,
        zerofill_fallback=settings.disk_zerofill_fallback,
        cipher=CIPHER if keys is not None else "",
        sync=settings.disk_sync,
    )
    core = DiskTierCore(
        host=context.host,
        instance=context.instance,
        epoch=context.epoch,
        frequency_filter=FrequencyFilter(enabled=not settings.disable_disk_offload_filter),
        limits=limits_of(settings),
        policy=settings.disk_eviction_policy,
        write_budget=int(settings.disk_write_budget_gb_per_day * 1e9),
    )
    if options.capacity_bytes == 0 and options.slot_count is None:
        await serve_nothing(context, core, "DYN_KVBM_DISK_CACHE_GB is 0")
        return
    store = await _wait_store(options, context.stopping)
    if store is None:
        return
    limits = core.tier.limits
    tuning = Tuning(settings.disk_queue_depth, limits.batch_blocks_max, limits.batch_bytes)
    medium = DiskMedium(store, _mover(context, keys, options), tuning)
    try:
        await TierShell(context, core, medium).run()
    finally:
        medium.close()


def keys_of(settings: Settings) -> Keys | None:
    """What blocks are sealed with, None: nothing; raises BadKeys."""
    if settings.disk_keys and settings.disk_keys_file is not None:
        raise KvbmError("KVBM_DISK_KEYS and KVBM_DISK_KEYS_FILE are both set: one is enough")
    if not settings.disk_keys and settings.disk_keys_file is None:
        return None
    from kvbm_disk_tier.sealing import Keys  # Who does not seal needs no library for it.

    if settings.disk_keys_file is not None:
        return Keys.read(settings.disk_keys_file, "KVBM_DISK_KEYS_FILE")
    return Keys.parse(settings.disk_keys, "KVBM_DISK_KEYS")


def _mover(context: ServiceContext, keys: Keys | None, options: StoreOptions) -> DiskMover:
    mover = file_mover(
        f"{context.source}-{context.epoch}",
        context.settings.disk_nixl_backend,
        options.directory,
        direct=options.direct,
    )
    if keys is None:
        return DiskMover(mover=mover, counters=context.counters)
    from kvbm_disk_tier.sealed_mover import SealedMover

    limits = limits_of(context.settings)

    def pool_slots(stride: int) -> int:
        return SEALED_BATCHES * batch_blocks(limits.batch_blocks_max, limits.batch_bytes, stride)

    return SealedMover(mover=mover, counters=context.counters, keys=keys, pool_slots=pool_slots)


async def serve_nothing(context: ServiceContext, core: DiskTierCore, why: str) -> None:
    """Answer those who ask every source, so that they do not ask for ever."""

    snapshots = SnapshotPages(lambda _: core.snapshot_pages())

    async def snapshot(payload: bytes) -> bytes:
        return snapshots.answer(payload)

    context.set_stats(core.statistics)
    await context.add_verbs({"snapshot": snapshot})
    await context.registration.update({ACCEPTING: False})
    context.ready(f"off: {why}")
    await context.stopping.wait()


async def _wait_store(options: StoreOptions, stopping: asyncio.Event) -> Store | None:
    """Take the store, from a predecessor that is just ending if need be; raises StoreError."""
    give_up_s = time.monotonic() + LOCK_DEADLINE_S
    while not stopping.is_set():
        try:
            return Store(options)
        except StoreBusy:
            if time.monotonic() > give_up_s:
                raise
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOCK_TRY_S):
                await stopping.wait()
    return None


def main() -> None:
    """The entry point of `kvbm serve disk-tier`."""
    run("disk-tier", serve)
