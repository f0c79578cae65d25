"""The disk tier's core (G3): a synchronous machine that owns the slots of a store of blocks.

`step` is the only door in. It takes what the shell has heard and returns what the shell shall do;
it reads no clock and does no IO. `view` answers what the shell may ask. Both paths of a block are
in `writes` (G2 → G3) and `reads` (G3 → G2), the blocks in `inventory`. This module makes the parts,
gives each what it needs, and sends every input to the part that it is for.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import assert_never

from kvbm_common.identity import HASH_BYTES, IdentityError, SequenceHash, hashes_from_hex
from kvbm_common.tier.admin import TierAdmin
from kvbm_common.tier.announcer import Announcer
from kvbm_common.tier.breaker import BreakerState
from kvbm_common.tier.departures import Departures
from kvbm_common.tier.diary import Diary
from kvbm_common.wire.admin import FilterReply, FilterRequest
from kvbm_common.wire.events import Event, Stored
from kvbm_common.wire.verbs import ErrorBody

from kvbm_disk_tier.core.admission import Admission
from kvbm_disk_tier.core.announcements import Announcements
from kvbm_disk_tier.core.departures import Explainer
from kvbm_disk_tier.core.disk_breaker import DiskBreaker
from kvbm_disk_tier.core.effects import Answer, Effect, OpenStore, SayAccepting
from kvbm_disk_tier.core.frequency_filter import FrequencyFilter
from kvbm_disk_tier.core.host_arenas import HostArenas
from kvbm_disk_tier.core.inventory import Inventory
from kvbm_disk_tier.core.journal_writer import JournalWriter
from kvbm_disk_tier.core.limits import DISK, DiskTierLimits, StoreKind
from kvbm_disk_tier.core.messages import (
    AdminAsked,
    AnnounceMore,
    ArenaFailed,
    ArenaKnown,
    FillAsked,
    HitsTold,
    HostEvent,
    HostEventsLost,
    HostInput,
    HostJoined,
    HostLeft,
    HostSnapshot,
    Input,
    Journaled,
    JournalFailed,
    Leased,
    LeaseFailed,
    ReadDone,
    ReadFailed,
    ReadLanded,
    Released,
    StoreDown,
    StoreFailed,
    StoreInput,
    StoreOpened,
    StoreUp,
    Tick,
    WriteFailed,
    WritersKnown,
    Written,
)
from kvbm_disk_tier.core.outbox import Outbox
from kvbm_disk_tier.core.reads import Reads
from kvbm_disk_tier.core.shards import Shards
from kvbm_disk_tier.core.store import Store
from kvbm_disk_tier.core.view import View
from kvbm_disk_tier.core.write_budget import WriteBudget
from kvbm_disk_tier.core.writes import Writes


class DiskTierCore:
    """One disk tier instance in one life (`epoch`).

    The shell has `start`, `step`, `stop`, `story`, `check` and `view`. The parts are for tests.
    """

    def __init__(
        self,
        *,
        host: str,
        instance: str,
        epoch: int,
        frequency_filter: FrequencyFilter | None = None,
        limits: DiskTierLimits | None = None,
        policy: str = "lru",
        write_budget: int = 0,
        kind: StoreKind = DISK,
    ) -> None:
        """Create an empty core; `write_budget` is in bytes per 24 hours, 0 without a limit."""
        assert instance, "an instance has a name"
        assert epoch >= 0
        limits = limits or DiskTierLimits()
        source = f"{kind.service}-{instance}"
        announcer = Announcer(host=host, source=source, tier=kind.tier, epoch=epoch)
        # Not `or`: a filter that has seen nothing is empty, and false.
        given = FrequencyFilter() if frequency_filter is None else frequency_filter
        ids = itertools.count(2)
        self.counts: Counter[str] = Counter()
        self.outbox = Outbox()
        self.diary = Diary()
        self.departures = Departures()
        """What became of the blocks that were here, or should have come here."""
        self.announcements = Announcements(announcer, self.outbox)
        self.breaker = DiskBreaker(self.counts)
        self.store = Store(kind, limits, self.counts)
        self.arenas = HostArenas(self.store, self.outbox)
        self.admission = Admission(given, Shards(instance), self.counts)
        self.journal = JournalWriter(
            has_file=kind.sized,
            records_per_slot=limits.journal_records_per_slot,
            outbox=self.outbox,
            diary=self.diary,
            counts=self.counts,
        )
        self.inventory = self._make_inventory(limits, policy, first_lease=(epoch % 2**31 << 32) + 1)
        self.writes = self._make_writes(limits, source, ids, WriteBudget(write_budget))
        self.reads = self._make_reads(limits, ids)
        self.admin = TierAdmin(self.inventory)
        self.view = self._make_view(instance)
        self._said_accepting = True

    # --- the parts --------------------------------------------------------------------------

    def _make_inventory(
        self, limits: DiskTierLimits, policy: str, *, first_lease: int
    ) -> Inventory:
        return Inventory(
            policy=policy,
            first_lease=first_lease,
            announced_max=limits.announced_blocks_max,
            journal=self.journal,
            announcements=self.announcements,
            diary=self.diary,
            departures=self.departures,
            outbox=self.outbox,
            counts=self.counts,
        )

    def _make_writes(
        self, limits: DiskTierLimits, owner: str, ids: Iterator[int], budget: WriteBudget
    ) -> Writes:
        return Writes(
            owner=owner,
            ids=ids,
            limits=limits,
            admission=self.admission,
            budget=budget,
            store=self.store,
            breaker=self.breaker,
            arenas=self.arenas,
            inventory=self.inventory,
            journal=self.journal,
            departures=self.departures,
            outbox=self.outbox,
            counts=self.counts,
        )

    def _make_reads(self, limits: DiskTierLimits, ids: Iterator[int]) -> Reads:
        return Reads(
            ids=ids,
            limits=limits,
            store=self.store,
            breaker=self.breaker,
            arenas=self.arenas,
            inventory=self.inventory,
            outbox=self.outbox,
            counts=self.counts,
        )

    def _make_view(self, instance: str) -> View:
        explainer = Explainer(
            inventory=self.inventory,
            departures=self.departures,
            writes=self.writes,
            admission=self.admission,
            store=self.store,
            breaker=self.breaker,
            arenas=self.arenas,
        )
        return View(
            instance=instance,
            store=self.store,
            breaker=self.breaker,
            admission=self.admission,
            inventory=self.inventory,
            announcements=self.announcements,
            writes=self.writes,
            reads=self.reads,
            explainer=explainer,
            tallies=self.counts,
        )

    # --- the doors --------------------------------------------------------------------------

    def start(self) -> Sequence[Effect]:
        """Return the first effects of a life."""
        self.announcements.start()
        return self.outbox.drain()

    def stop(self) -> Sequence[Effect]:
        """Return the last effects: the blocks stay in the store, but cannot be read."""
        self.reads.stopped = True
        self.announcements.stop()
        return self.outbox.drain()

    def step(self, event: Input, now_ms: int) -> Sequence[Effect]:
        """Take one input; returns the effects, in order."""
        assert now_ms >= self.inventory.now_ms, f"{now_ms} ms after {self.inventory.now_ms} ms"
        self.inventory.now_ms = now_ms
        try:
            self._take(event, now_ms)
        except IdentityError as error:
            self._reject(event, error)
        self._advance(now_ms)
        return self.outbox.drain()

    def story(self, name: SequenceHash) -> list[str]:
        """Return what happened to a block lately."""
        assert len(name) == HASH_BYTES, name
        return self.diary.story(name)

    # --- inputs -----------------------------------------------------------------------------

    def _take(self, event: Input, now_ms: int) -> None:
        match event:
            case HostEvent(instance, host_event):
                self._host_event(instance, host_event, now_ms)
            case (
                Leased() | LeaseFailed() | Written() | WriteFailed()
                | Released() | Journaled() | JournalFailed()
            ):  # fmt: skip
                self.writes.take(event, now_ms)
            case FillAsked() | ReadLanded() | ReadDone() | ReadFailed():
                self.reads.take(event, now_ms)
            case StoreOpened() | StoreFailed() | AnnounceMore() | StoreDown() | StoreUp():
                self._take_of_store(event, now_ms)
            case (
                HostJoined() | HostLeft() | HostEventsLost() | HostSnapshot() | HitsTold()
                | ArenaKnown() | ArenaFailed()
            ):  # fmt: skip
                self._take_of_host(event, now_ms)
            case WritersKnown(instances):
                self.admission.shards.set(instances)
            case AdminAsked():
                self._admin(event, now_ms)
            case Tick():
                self._tick(now_ms)
            case _:
                assert_never(event)

    def _host_event(self, instance: str, event: Event, now_ms: int) -> None:
        """Take an announcement of a host tier: what is stored may deserve the disk."""
        self.arenas.heard(instance, event.epoch)
        if isinstance(event, Stored):
            names = [name for run in event.runs for name in hashes_from_hex(run.hashes)]
            self.writes.seen(names, instance, now_ms)

    def _take_of_host(self, event: HostInput, now_ms: int) -> None:
        match event:
            case HostEvent(instance, host_event):
                self._host_event(instance, host_event, now_ms)
            case HostJoined(instance):
                self.arenas.joined(instance)
            case HostLeft(instance):
                self.arenas.left(instance)
            case HostEventsLost():
                self.arenas.ask_snapshots()
            case HostSnapshot(instance, reply):
                for part in reply.parts:
                    for run in part.runs:
                        self.writes.listed(hashes_from_hex(run.hashes), instance, now_ms)
            case HitsTold(instance, hits):
                self.writes.seen(hashes_from_hex(hits.hashes), instance, now_ms)
            case ArenaKnown(arena):
                self.arenas.known(arena)
            case ArenaFailed(instance):
                self.arenas.failed(instance)
            case _:
                assert_never(event)

    def _take_of_store(self, event: StoreInput, now_ms: int) -> None:
        match event:
            case StoreOpened():
                self.store.opened(event)
                self.inventory.opened(event)
                self.arenas.refit()
                self.writes.budget.spend(event.depth.written_bytes)
            case StoreFailed(reason):
                self.store.open_failed(reason, now_ms)
                self.arenas.refit()
            case AnnounceMore():
                self.inventory.announce_former()
            case StoreDown(reason):
                self.store.went_down(reason)
            case StoreUp():
                self.store.came_up()
            case _:
                assert_never(event)

    def _admin(self, asked: AdminAsked, now_ms: int) -> None:
        assert asked.verb, "a request has a verb"
        if isinstance(asked.request, FilterRequest):
            self.outbox.emit(Answer(asked.reply_to, self._set_filter(asked.request)))
            return
        answer = self.admin.answer(asked.verb, asked.request, now_ms)
        self.outbox.emit(Answer(asked.reply_to, answer))

    def _set_filter(self, request: FilterRequest) -> FilterReply:
        now = self.admission.filter
        now.change(
            enabled=request.enabled, pass_count=request.pass_count, decay_ms=request.decay_ms
        )
        assert now.pass_count > 0
        return FilterReply(
            enabled=now.enabled,
            pass_count=now.pass_count,
            decay_ms=now.decay_ms,
            entries=len(now),
        )

    def _tick(self, now_ms: int) -> None:
        self.admission.filter.decay_until(now_ms)
        self.inventory.end_leases(self.inventory.leases.expire(now_ms))
        # A bypassed disk without requests would stay so: when its pause is over, it takes
        # blocks again, and the first write is the probe.
        self.breaker.allows(now_ms)
        self.arenas.tick()

    def _reject(self, event: Input, error: IdentityError) -> None:
        """Drop an input with a hash that only a look inside the message could find invalid."""
        assert error.code, "an error has a code"
        self.counts["dropped.malformed"] += 1
        if isinstance(event, FillAsked | AdminAsked):
            body = ErrorBody(code=error.code, message=str(error))
            self.outbox.emit(Answer(event.reply_to, body))

    # --- what follows -----------------------------------------------------------------------

    def _advance(self, now_ms: int) -> None:
        """Begin what the input may have made possible. Reads go first."""
        if self.reads.waiting:
            self.reads.advance(now_ms)
        flying, reading = self.writes.flying.by_id, self.reads.flying
        if self.store.misfits and not flying and not reading:
            self._fit_store(now_ms)
        if self.writes.pending.waiting and (self.announcements.stopped or self.inventory.draining):
            self.writes.pending.forget(
                "stopping" if self.announcements.stopped else "draining", now_ms
            )
        if flying or self.writes.pending.waiting:
            self.writes.advance(now_ms, beside_reads=bool(reading))
        # Folded blocks are more urgent than a long journal.
        if self.journal.record_count > self.journal.longest:
            self._rewrite_journal()
        if self._said_accepting != self._is_accepting():
            self._said_accepting = not self._said_accepting
            self.outbox.emit(SayAccepting(self._said_accepting))

    def _fit_store(self, now_ms: int) -> None:
        """Replace the store by one whose slots are an arena's."""
        assert not self.writes.flying.by_id, "a write is in flight"
        assert not self.reads.flying, "a read is in flight"
        if self.announcements.stopped or not self.store.may_open(now_ms):
            return
        sizes = self.arenas.sizes()
        self.store.open()
        self.inventory.reformat()
        self.arenas.refit()
        self.outbox.emit(OpenStore(max(sizes, default=0)))

    def _rewrite_journal(self) -> None:
        table = self.inventory.table
        if not table.folded_count:
            live = [(table.find(block.hash), block) for block in table.blocks()]
            self.journal.rewrite([*live, *self.writes.committing()])

    def _is_accepting(self) -> bool:
        """Tell whether blocks are well placed here: else other instances write ours, too."""
        sound = not self.store.problem and self.breaker.state is not BreakerState.OPEN
        return sound and not self.announcements.stopped and not self.inventory.draining

    def check(self) -> None:
        """Assert every invariant; O(slots)."""
        self.inventory.check()
        self.store.check()
        self.arenas.check()
        self.writes.check()
        self.reads.check()
        table = self.inventory.table
        assert self.writes.staged_slots() == table.staged(), "a staged slot has no write"
        pins = Counter(slot for lease in self.inventory.leases.all() for slot in lease.slots)
        pins.update(self.reads.pins())
        assert pins == table.pins(), "a pinned slot has no read and no lease"
