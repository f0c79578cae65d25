"""The disk tier's core (G3): a synchronous machine that owns the slots of a store of blocks.

`step` is the only door in. It takes what the shell has heard and returns what the shell shall do;
it reads no clock and does no IO. `view` answers what the shell may ask. Both paths of a block are
in `writes` (G2 → G3) and `reads` (G3 → G2), the blocks in `inventory`. This module makes the parts,
gives each what it needs, and sends every input to the part that it is for.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import assert_never

from kvbm_common.identity import HASH_BYTES, IdentityError, SequenceHash, hashes_from_hex
from kvbm_common.tier.admin import TierAdmin
from kvbm_common.tier.announcer import Announcer
from kvbm_common.wire.admin import FilterReply, FilterRequest, RemoveReply, RemoveRequest
from kvbm_common.wire.events import Event, Removed, Stored
from kvbm_common.wire.verbs import ErrorBody

from kvbm_disk_tier.core.effects import Answer, Effect, OpenStore, Publish, SayAccepting
from kvbm_disk_tier.core.frequency_filter import FrequencyFilter
from kvbm_disk_tier.core.health import DiskHealth
from kvbm_disk_tier.core.host_arenas import HostArenas
from kvbm_disk_tier.core.inventory import Inventory
from kvbm_disk_tier.core.limits import DISK, DiskTierLimits, Means, StoreKind
from kvbm_disk_tier.core.messages import (
    AdminAsked,
    AnnounceMore,
    ArenaFailed,
    ArenaKnown,
    DeletesAnswered,
    DeletesRefused,
    FillAsked,
    HitsTold,
    HostEvent,
    HostEventsLost,
    HostInput,
    HostJoined,
    HostLeft,
    HostSnapshot,
    HostSnapshotFailed,
    Input,
    Journaled,
    JournalFailed,
    JournalPartWritten,
    JournalRewritten,
    Leased,
    LeaseFailed,
    ReadDone,
    ReadFailed,
    ReadLanded,
    Released,
    StoreAbsent,
    StoreDown,
    StoreFailed,
    StoreInput,
    StoreOpened,
    StoreProbed,
    StoreUp,
    Synchronised,
    Tick,
    WriteFailed,
    WritersKnown,
    Written,
)
from kvbm_disk_tier.core.pending import Admission, PendingBlocks
from kvbm_disk_tier.core.reads import Reads
from kvbm_disk_tier.core.shards import Shards
from kvbm_disk_tier.core.store_status import STORE_FAULT, StoreStatus, may_come_back
from kvbm_disk_tier.core.view import View
from kvbm_disk_tier.core.write_budget import WriteBudget
from kvbm_disk_tier.core.write_queue import Origin
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
        source = f"{kind.service}-{instance}"
        # Not `or`: a filter that has seen nothing is empty, and false.
        given = FrequencyFilter() if frequency_filter is None else frequency_filter
        self.counts: Counter[str] = Counter()
        self._outbox: list[Effect] = []
        self._emit = self._outbox.append
        self.limits = limits or DiskTierLimits()
        means = Means(self.limits, self.counts, self._emit)
        self.health = DiskHealth(self.counts, self._emit, called=kind.called)
        self.store = StoreStatus(kind, means)
        self.arenas = HostArenas(self.store, self._emit)
        announcer = Announcer(host=host, source=source, tier=kind.tier, epoch=epoch)
        self.inventory = Inventory(announcer, policy=policy, has_journal=kind.sized, means=means)
        self.pending = PendingBlocks(
            admission=Admission(given, Shards(instance), self.counts),
            budget=WriteBudget(write_budget),
            store=self.store,
            arenas=self.arenas,
            departures=self.inventory.departures,
            means=means,
        )
        self.writes, self.reads = self._make_transfers(source, means)
        self.admin = TierAdmin(self.inventory, self.inventory.leases)
        self.view = View(instance=instance, _core=self)
        self._said_accepting = True
        self._now_ms = 0

    # --- the parts --------------------------------------------------------------------------

    def _make_transfers(self, owner: str, means: Means) -> tuple[Writes, Reads]:
        ids = itertools.count(2)
        writes = Writes(
            owner=owner,
            ids=ids,
            pending=self.pending,
            store=self.store,
            health=self.health,
            arenas=self.arenas,
            inventory=self.inventory,
            means=means,
        )
        reads = Reads(
            ids=ids,
            store=self.store,
            health=self.health,
            arenas=self.arenas,
            inventory=self.inventory,
            means=means,
        )
        return writes, reads

    # --- the doors --------------------------------------------------------------------------

    def start(self) -> Sequence[Effect]:
        """Return the first effects of a life: nothing of the life before can be read."""
        assert self.inventory.announcer.seq == 0, "a life starts once"
        return [Publish(self.inventory.announcer.cleared("start"))]

    def stop(self) -> Sequence[Effect]:
        """Return the last effects: the blocks stay in the store, but cannot be read."""
        assert self.inventory.announcer.seq > 0, "this life has not started"
        self.reads.stopped = self.inventory.stopped = True
        return [Publish(self.inventory.announcer.cleared("stop"))]

    def step(self, event: Input, now_ms: int) -> Sequence[Effect]:
        """Take one input; returns the effects, in order."""
        assert now_ms >= self._now_ms, f"{now_ms} ms after {self._now_ms} ms"
        self._now_ms = now_ms
        try:
            self._take(event, now_ms)
        except IdentityError as error:
            self._reject(event, error)
        self._advance(now_ms)
        effects = self._outbox[:]
        self._outbox.clear()
        return effects

    def story(self, name: SequenceHash) -> list[str]:
        """Return what happened to a block lately."""
        assert len(name) == HASH_BYTES, name
        return self.inventory.diary.story(name)

    # --- inputs -----------------------------------------------------------------------------

    def _take(self, event: Input, now_ms: int) -> None:
        match event:
            case HostEvent(instance, host_event):
                self._host_event(instance, host_event, now_ms)
            case Leased():
                self.writes.leased(event, now_ms)
            case LeaseFailed():
                self.writes.lease_failed(event, now_ms)
            case Written():
                self.writes.written(event, now_ms)
            case WriteFailed():
                self.writes.write_failed(event, now_ms)
            case Released():
                self.writes.released(event, now_ms)
            case Journaled():
                self.writes.journaled(event, now_ms)
            case JournalFailed():
                self.writes.journal_failed(event, now_ms)
            case FillAsked():
                self.reads.asked(event, now_ms)
            case ReadLanded(read_id):
                self.reads.landed(read_id)
            case ReadDone():
                self.reads.done(event, now_ms)
            case ReadFailed():
                self.reads.failed(event, now_ms)
            case (
                StoreOpened() | StoreFailed() | StoreAbsent() | AnnounceMore() | StoreDown()
                | StoreUp() | DeletesRefused() | DeletesAnswered()
            ):  # fmt: skip
                self._take_of_store(event, now_ms)
            case JournalPartWritten():
                self.inventory.journal.part_written()
            case StoreProbed() | JournalRewritten() | Synchronised():
                if isinstance(event, JournalRewritten):
                    self.inventory.journal.rewritten(event, now_ms)
                self.health.heard(event, now_ms)
            case (
                HostJoined() | HostLeft() | HostEventsLost() | HostSnapshot()
                | HostSnapshotFailed() | HitsTold() | ArenaKnown() | ArenaFailed()
            ):  # fmt: skip
                self._take_of_host(event, now_ms)
            case WritersKnown(instances):
                self.pending.admission.shards.set(instances)
                self.pending.writers_changed()
            case AdminAsked():
                self._admin(event, now_ms)
            case Tick():
                self._tick(now_ms)
            case _:
                assert_never(event)

    def _host_event(self, instance: str, event: Event, now_ms: int) -> None:
        """Take an announcement of a host tier: what is stored may deserve the disk."""
        if event.epoch not in self.arenas.usable:
            self.arenas.heard(instance, event.epoch)
        if isinstance(event, Stored):
            names: list[SequenceHash] = []
            parents: dict[SequenceHash, SequenceHash] = {}
            for run in event.runs:
                chain = hashes_from_hex(run.hashes)
                parents.update(zip(chain, hashes_from_hex([run.parent]) + chain, strict=False))
                names += chain
            origin = Origin(instance, event.block_bytes, bytes.fromhex(event.namespace))
            self.writes.consider(names, origin, now_ms, parents)
        elif isinstance(event, Removed) and self.pending.waiting:
            self.pending.gone(hashes_from_hex(event.hashes), instance, now_ms)

    def _take_of_host(self, event: HostInput, now_ms: int) -> None:
        match event:
            case HostEvent(instance, host_event):
                self._host_event(instance, host_event, now_ms)
            case HostJoined(instance, epoch):
                self.arenas.joined(instance, epoch)
            case HostLeft(instance):
                self.arenas.left(instance)
            case HostEventsLost():
                self.arenas.ask_snapshots()
            case HostSnapshot(instance, reply):
                for part in reply.parts:
                    origin = Origin(instance, part.block_bytes, bytes.fromhex(part.namespace))
                    for run in part.runs:
                        self.writes.consider_listed(hashes_from_hex(run.hashes), origin, now_ms)
            case HostSnapshotFailed(instance):
                self.arenas.snapshot_failed(instance)
            case HitsTold(instance, hits):
                origin = Origin(instance, hits.block_bytes, bytes.fromhex(hits.namespace))
                self.writes.consider(hashes_from_hex(hits.hashes), origin, now_ms)
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
                self.inventory.opened(event, now_ms)
                if event.write_failure:
                    self.health.takes_no_blocks(event.write_failure, now_ms)
                self.pending.admission.filter.size_for(event.layout.slot_count)
                self.arenas.refit()
                self.pending.budget.spend(event.depth.written_bytes + event.replay.moved_bytes)
            case StoreFailed(reason):
                self.store.open_failed(reason, now_ms)
                self.arenas.refit()
            case StoreAbsent():
                self.store.absent()
                self.arenas.refit()
            case AnnounceMore():
                self.inventory.announce_former()
            case StoreDown(reason):
                self.store.went_down(reason)
            case StoreUp():
                self.store.came_up()
            case DeletesRefused() | DeletesAnswered():
                self.store.deletes_told(event)
            case _:
                assert_never(event)

    def _admin(self, asked: AdminAsked, now_ms: int) -> None:
        assert asked.verb, "a request has a verb"
        if isinstance(asked.request, FilterRequest):
            self._emit(Answer(asked.reply_to, self._set_filter(asked.request)))
            return
        problem = self._removal_problem() if asked.verb == "reset" else ""
        if problem:
            self._emit(Answer(asked.reply_to, may_come_back(STORE_FAULT, problem)))
            return
        answer = self.admin.answer(asked.verb, asked.request, now_ms)
        if asked.verb == "reset" and isinstance(answer, RemoveReply):
            assert isinstance(asked.request, RemoveRequest), f"{asked.request} resets nothing"
            order = self.inventory.journal.removal_order
            answer = self.store.after_reset(asked.request.job, answer, order)
        self._emit(Answer(asked.reply_to, answer))

    def _removal_problem(self) -> str:
        """Return why the store may keep what is removed from the table; empty: it does not."""
        bypass = "" if self.health.reads else self.health.problem
        return self.store.removal_problem or bypass or self.inventory.journal.problem

    def _set_filter(self, request: FilterRequest) -> FilterReply:
        now = self.pending.admission.filter
        now.change(
            enabled=request.enabled, pass_count=request.pass_count, decay_ms=request.decay_ms
        )
        assert now.pass_count > 0
        return FilterReply(
            enabled=now.enabled, pass_count=now.pass_count, decay_ms=now.decay_ms, entries=len(now)
        )

    def _tick(self, now_ms: int) -> None:
        self.inventory.table.tenants.tick(now_ms)
        for lease in self.inventory.leases.expire(now_ms):
            self.inventory.table.unpin(lease.slots)
        if self.store.kind.sized:
            self.writes.look_for_stalls(now_ms)
        self.health.tick(now_ms)
        self.arenas.tick(now_ms)

    def _reject(self, event: Input, error: IdentityError) -> None:
        """Drop an input with a hash that only a look inside the message could find invalid."""
        assert error.code, "an error has a code"
        self.counts["dropped.malformed"] += 1
        if isinstance(event, FillAsked | AdminAsked):
            body = ErrorBody(code=error.code, message=str(error))
            self._emit(Answer(event.reply_to, body))

    # --- what follows -----------------------------------------------------------------------

    def _advance(self, now_ms: int) -> None:
        """Begin what the input may have made possible. Reads go first."""
        if self.reads.waiting or self.reads.early.fills:
            self.reads.advance(now_ms)
        in_flight, reading = self.writes.in_flight.by_id, self.reads.in_flight
        if self.store.wants_opening and not in_flight and not reading:
            self._fit_store(now_ms)
        if self.pending.waiting and (self.inventory.stopped or self.inventory.draining):
            self.pending.forget("stopping" if self.inventory.stopped else "draining", now_ms)
        if in_flight or self.pending.waiting:
            self.writes.advance(now_ms, beside_reads=bool(reading))
        self.inventory.journal.advance(self.inventory.table, self.writes.committing, now_ms)
        # Blocks that are not well placed here are for other instances to write.
        sound = not self.store.problem and self.health.writes
        accepting = sound and not self.inventory.stopped and not self.inventory.draining
        if accepting != self._said_accepting:
            self._said_accepting = accepting
            self._emit(SayAccepting(accepting))

    def _fit_store(self, now_ms: int) -> None:
        """Replace the store by one that is cut for the largest blocks of the arenas."""
        assert not self.writes.in_flight.by_id, "a write is in flight"
        assert not self.reads.in_flight, "a read is in flight"
        if self.inventory.stopped or not self.store.may_open(now_ms):
            return
        sizes = self.arenas.sizes()
        self.store.open()
        self.inventory.reformat(now_ms)
        self.arenas.refit()
        self._emit(OpenStore(max(sizes, default=0)))

    def check(self) -> None:
        """Assert every invariant; O(slots)."""
        self.inventory.check()
        self.store.check()
        self.health.check()
        self.arenas.check()
        self.writes.check()
        self.reads.check()
        table = self.inventory.table
        assert self.writes.staged_slots() == table.staged(), "a staged slot has no write"
        pins = Counter(slot for lease in self.inventory.leases.all() for slot in lease.slots)
        pins.update(self.reads.pins())
        assert pins == table.pins(), "a pinned slot has no read and no lease"
