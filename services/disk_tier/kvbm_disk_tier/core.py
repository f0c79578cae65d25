"""The disk tier's core (G3): a synchronous machine that owns the slots of a store of blocks.

`step` is the only door. It takes what the shell has heard and returns what the shell shall do; it
reads no clock and does no IO. The paths are in `writes` (G2 → G3) and `reads` (G3 → G2); the store,
its journal and the announcements are in `tier`. Here is who the host tier is, and which arena it
has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import assert_never

from kvbm_common.breaker import BreakerState
from kvbm_common.identity import IdentityError, SequenceHash, hashes_from_hex
from kvbm_common.slots import SlotTable
from kvbm_common.tier_admin import TierAdmin
from kvbm_common.wire.admin import FilterReply, FilterRequest
from kvbm_common.wire.events import Event, Stored
from kvbm_common.wire.explain import FatesReply
from kvbm_common.wire.verbs import ErrorBody, SnapshotReply, StatsReply

from kvbm_disk_tier.fate_of import fates_of
from kvbm_disk_tier.frequency_filter import FrequencyFilter
from kvbm_disk_tier.hosts import Hosts
from kvbm_disk_tier.messages import (
    AdminAsked,
    AnnounceMore,
    Answer,
    ArenaFailed,
    ArenaKnown,
    Effect,
    FillAsked,
    HitsTold,
    HostEvent,
    HostEventsLost,
    HostLost,
    HostSeen,
    HostSnapshot,
    Input,
    Journaled,
    JournalFailed,
    Leased,
    LeaseFailed,
    Publish,
    ReadDone,
    ReadFailed,
    ReadLanded,
    Released,
    SayAccepting,
    StoreDown,
    StoreFailed,
    StoreOpened,
    StoreUp,
    Tick,
    WriteFailed,
    WritersKnown,
    Written,
)
from kvbm_disk_tier.reads import Reads
from kvbm_disk_tier.shards import Shards
from kvbm_disk_tier.tier import DISK, Limits, StoreKind, Tier
from kvbm_disk_tier.write_budget import WriteBudget
from kvbm_disk_tier.writes import Writes

__all__ = ["DiskTierCore", "Limits"]


class DiskTierCore:
    """One disk tier instance in one life (`epoch`)."""

    def __init__(
        self,
        *,
        host: str,
        instance: str,
        epoch: int,
        frequency_filter: FrequencyFilter | None = None,
        limits: Limits | None = None,
        policy: str = "lru",
        write_budget: int = 0,
        kind: StoreKind = DISK,
    ) -> None:
        """`write_budget`: bytes in 24 hours, 0 without a limit."""
        self.instance = instance
        self.tier = Tier(
            host=host,
            instance=instance,
            epoch=epoch,
            limits=limits or Limits(),
            policy=policy,
            kind=kind,
        )
        # Not `or`: a filter that has seen nothing is empty, and false.
        given = FrequencyFilter() if frequency_filter is None else frequency_filter
        self.writes = Writes(self.tier, given, WriteBudget(write_budget), Shards(instance))
        self.reads = Reads(self.tier)
        self.admin = TierAdmin(self.tier)
        self.hosts = Hosts(self.tier)
        self._said_accepting = True

    @property
    def table(self) -> SlotTable:
        """The store's slots; another table after the store was made anew."""
        return self.tier.table

    def start(self) -> list[Effect]:
        """The first effects of a life."""
        return [Publish(self.tier.announcer.cleared("start"))]

    def stop(self) -> list[Effect]:
        """The last effects: the blocks stay on disk, but nobody can read them."""
        self.tier.stopping = True
        return [Publish(self.tier.announcer.cleared("stop"))]

    def step(self, event: Input, now_ms: int) -> Sequence[Effect]:
        """Take one input; returns the effects, in order."""
        self.tier.now_ms = now_ms
        try:
            self._handle(event, now_ms)
        except IdentityError as error:
            self._reject(event, error)
        self._advance(now_ms)
        effects, self.tier.effects = self.tier.effects, []
        return effects

    def _handle(self, event: Input, now_ms: int) -> None:
        match event:
            case StoreOpened():
                self.tier.opened(event, now_ms)
                self.writes.budget.spend(event.depth.written_bytes)
            case AnnounceMore():
                self.tier.announce_former()
            case StoreFailed():
                self.tier.open_failed(event, now_ms)
            case StoreDown(reason):
                self.tier.went_down(reason)
            case StoreUp():
                self.tier.came_up()
            case HostSeen(instance):
                self.hosts.seen(instance)
            case HostLost(instance):
                self.hosts.lost(instance)
            case HostEvent(instance, host_event):
                self._host_event(instance, host_event)
            case HostEventsLost():
                self.hosts.ask_snapshots()
            case HostSnapshot(instance, reply):
                for part in reply.parts:
                    for run in part.runs:
                        self.writes.listed(hashes_from_hex(run.hashes), instance)
            case HitsTold(instance, hits):
                self.writes.seen(hashes_from_hex(hits.hashes), instance)
            case ArenaKnown(arena):
                self.hosts.known(arena)
            case ArenaFailed(instance):
                self.hosts.failed(instance)
            case Leased():
                self.writes.leased(event)
            case LeaseFailed(write, reason):
                self.writes.lease_failed(write, reason, now_ms)
            case Written(write, lost):
                self.writes.written(write, lost, now_ms)
            case WriteFailed(write, reason):
                self.writes.write_failed(write, reason, now_ms)
            case Released(write, valid, answered):
                self.writes.released(write, now_ms, valid=valid, answered=answered)
            case Journaled(writes):
                self.writes.journaled(writes, now_ms)
            case JournalFailed(write, reason):
                self.writes.journal_failed(write, reason, now_ms)
            case FillAsked():
                self.reads.asked(event, now_ms)
            case ReadLanded(read):
                self.reads.landed(read)
            case ReadDone():
                self.reads.done(event, now_ms)
            case ReadFailed():
                self.reads.failed(event, now_ms)
            case WritersKnown(instances):
                self.writes.shards.set(instances)
            case AdminAsked():
                self._admin(event, now_ms)
            case Tick():
                self._tick(now_ms)
            case _:
                assert_never(event)

    def _admin(self, asked: AdminAsked, now_ms: int) -> None:
        if isinstance(asked.request, FilterRequest):
            self.tier.emit(Answer(asked.reply_to, self._set_filter(asked.request)))
            return
        answer = self.admin.answer(asked.verb, asked.request, now_ms)
        self.tier.emit(Answer(asked.reply_to, answer))

    def _set_filter(self, request: FilterRequest) -> FilterReply:
        now = self.writes.filter
        now.change(
            enabled=request.enabled, pass_count=request.pass_count, decay_ms=request.decay_ms
        )
        return FilterReply(
            enabled=now.enabled,
            pass_count=now.pass_count,
            decay_ms=now.decay_ms,
            entries=len(now),
        )

    def _reject(self, event: Input, error: IdentityError) -> None:
        """A peer's mistake that only a look inside the message could find."""
        self.tier.counts["dropped.malformed"] += 1
        if isinstance(event, FillAsked | AdminAsked):
            self.tier.emit(Answer(event.reply_to, ErrorBody(code=error.code, message=str(error))))

    def _advance(self, now_ms: int) -> None:
        """What every input may have made possible. Reads go first."""
        self.reads.advance(now_ms)
        if not len(self.writes) and not len(self.reads):
            self.tier.fit_store(now_ms)
        if self.tier.stopping or self.tier.draining:
            self.writes.forget_pending("stopping" if self.tier.stopping else "draining")
        self.writes.advance(now_ms, beside_reads=len(self.reads) > 0)
        self.tier.rewrite_long_journal(self.writes.committing)
        if self.tier.accepting != self._said_accepting:
            self._said_accepting = self.tier.accepting
            self.tier.emit(SayAccepting(self._said_accepting))

    # --- the host tiers ---------------------------------------------------------------------

    def _host_event(self, instance: str, event: Event) -> None:
        """What is stored may deserve the disk."""
        self.hosts.heard(instance, event.epoch)
        if isinstance(event, Stored):
            names = [name for run in event.runs for name in hashes_from_hex(run.hashes)]
            self.writes.seen(names, instance)

    def _tick(self, now_ms: int) -> None:
        self.writes.filter.decay_until(now_ms)
        self.tier.end_leases(self.tier.leases.expire(now_ms))
        # A bypassed disk that nobody asks for would stay so: when its pause is over, it takes
        # blocks again, and the first write is the probe.
        self.tier.breaker.allows(now_ms)
        self.hosts.tick()

    # --- questions --------------------------------------------------------------------------

    def snapshot(self) -> SnapshotReply:
        """Everything that is committed and announced, as of the last event."""
        return self.tier.announcer.snapshot(self.tier.told_blocks())

    def snapshot_pages(self) -> Sequence[Callable[[], SnapshotReply]]:
        """The same in pages, to be made later: whoever asks is answered by one at a time."""
        return self.tier.announcer.moment(self.tier.told_blocks())

    def statistics(self) -> StatsReply:
        """Figures for metrics and admin API."""
        tier = self.tier
        figures = {name: float(value) for name, value in tier.counts.items()}
        figures["writes"] = float(len(self.writes))
        figures["writes_pending"] = float(self.writes.pending_count)
        figures["reads"] = float(len(self.reads) + self.reads.waiting_count)
        figures["filter_entries"] = float(len(self.writes.filter))
        figures["filter_enabled"] = float(self.writes.filter.enabled)
        figures["filter_pass_count"] = float(self.writes.filter.pass_count)
        figures["draining"] = float(tier.draining)
        figures |= self.gauges()
        return StatsReply(
            kind=tier.kind.service,
            host=tier.announcer.host,
            instance=self.instance,
            epoch=tier.announcer.epoch,
            ready=not tier.problem,
            reasons=[tier.problem] if tier.problem else [],
            seq=tier.announcer.seq,
            tier=tier.kind.tier,
            slots=tier.table.counts(),
            slot_bytes=tier.slot_bytes,
            block_bytes=tier.table.block_bytes,
            policy=tier.policy_name,
            leases=len(tier.leases),
            figures=figures,
        )

    def fates(self, names: Sequence[SequenceHash], now_ms: int) -> FatesReply:
        """What has become of blocks that a host tier misses."""
        return FatesReply(fates=fates_of(self.tier, self.writes, names, now_ms))

    def gauges(self) -> dict[str, float]:
        """Figures of now that are worth a curve."""
        counts = self.tier.counts
        payload = counts["bytes.payload"]
        on_disk = counts["bytes.written"] + counts["bytes.journal"]
        return {
            "disk_bypassed": float(self.tier.breaker.state is not BreakerState.CLOSED),
            "disk_read_depth_blocks": float(self.tier.limits.read_blocks_max),
            "disk_write_depth_blocks": float(self.tier.limits.write_blocks_max),
            "write_amplification": on_disk / payload if payload else 1.0,
            "write_budget_bytes": self.writes.budget.level,
            "writers": float(len(self.writes.shards.instances)),
        }

    def idle(self) -> bool:
        """Nothing is being written, read or waiting: a quiet point."""
        waiting = self.writes.pending_count + self.reads.waiting_count
        return not (len(self.writes) + len(self.reads) + waiting)

    def story(self, name: SequenceHash) -> list[str]:
        """What happened to a block lately."""
        return self.tier.diary.story(name)

    def check(self) -> None:
        """Assert every invariant; O(slots)."""
        self.tier.table.check()
        self.writes.check()
        self.reads.check()
        assert self.writes.staged_slots() == self.tier.table.staged(), "a staged slot has no write"
        self.tier.leases.check()
        pins = Counter(slot for lease in self.tier.leases.all() for slot in lease.slots)
        pins.update(self.reads.pins())
        assert pins == self.tier.table.pins(), "a pinned slot has no read and no lease"
