"""The disk tier's core (G3): which blocks go to disk, which slot they take, and reading them back.

A write, from the moment the host tier announces a block that passes the filter:

    pending --> LEASING --leased--> WRITING --written--> RELEASING --valid--> JOURNALING --> stored
                   |                   |                     |                    |
                   +----- nothing there, failed, lease lost, journal failed ------+--> aborted

A block is announced only when its record is in the journal. A read is asked for by the host tier
(`FillAsked`), pins the block, reads and verifies, and is answered per block.

`step` is the only door; the core reads no clock and does no IO.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import assert_never

from kvbm_common.announcer import Announcer
from kvbm_common.diary import Diary
from kvbm_common.eviction import make_policy
from kvbm_common.identity import (
    IdentityError,
    SequenceHash,
    hash_from_hex,
    hashes_from_hex,
    hashes_to_hex,
)
from kvbm_common.slots import Block, SlotTable
from kvbm_common.wire.events import Event, Stored
from kvbm_common.wire.verbs import (
    ArenaReply,
    ErrorBody,
    FilledSlot,
    FillReply,
    FillRequest,
    FillSlot,
    LeaseRequest,
    SnapshotReply,
    StatsReply,
)

from kvbm_disk_tier.frequency_filter import FrequencyFilter
from kvbm_disk_tier.journal import Operation, Record
from kvbm_disk_tier.messages import (
    Answer,
    AppendJournal,
    ArenaFailed,
    ArenaKnown,
    AskArena,
    AskHostSnapshot,
    Effect,
    FillAsked,
    HitsTold,
    HostEvent,
    HostLost,
    HostSeen,
    HostSnapshot,
    Input,
    Journaled,
    JournalFailed,
    Leased,
    LeaseFailed,
    LeaseHost,
    OpenStore,
    Publish,
    ReadDone,
    ReadFailed,
    ReadSlots,
    Released,
    ReleaseHost,
    RewriteJournal,
    StoreOpened,
    Tick,
    WriteFailed,
    WriteSlots,
    Written,
)


@dataclass(frozen=True, slots=True)
class Limits:
    """Every bound of the core, from the configuration."""

    writes_max: int = 4
    writes_beside_reads_max: int = 1
    """Onboarding goes ahead of offloading: while reads are in flight, writes hold back."""
    reads_max: int = 16
    reads_waiting_max: int = 4096
    batch_blocks_max: int = 16
    pending_max: int = 65_536
    """Blocks that wait to be written; beyond that the oldest are dropped and counted."""
    lease_ms: int = 5_000
    journal_records_per_slot: int = 4
    """The journal is rewritten when it holds more than this per slot (and 65,536)."""


class Phase(Enum):
    """Where a write is in the drawing above."""

    LEASING = "leasing"
    WRITING = "writing"
    RELEASING = "releasing"
    JOURNALING = "journaling"


@dataclass(slots=True)
class Write:
    """A batch on its way to disk."""

    instance: str
    epoch: int
    """The arena that the lease is for."""
    names: list[SequenceHash]
    phase: Phase = Phase.LEASING
    lease: int = 0
    slots: list[tuple[int, Block]] = field(default_factory=list)
    """Staged file slots and what is being written into them."""


@dataclass(frozen=True, slots=True)
class Read:
    """A fill in flight: some slots pinned and being read, the rest of it already answered."""

    reply_to: int
    asked: list[FillSlot]
    slots: dict[SequenceHash, int]


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
    ) -> None:
        self.instance = instance
        self.limits = limits or Limits()
        self.announcer = Announcer(
            host=host, source=f"disk-tier-{instance}", tier="disk", epoch=epoch
        )
        self.filter = FrequencyFilter() if frequency_filter is None else frequency_filter
        self.table = SlotTable(0, make_policy(policy))
        self.slot_bytes = 0
        self.arena: ArenaReply | None = None
        self.counts: Counter[str] = Counter()
        self.diary = Diary()
        self._policy_name = policy
        self._host: str | None = None
        self._host_epoch = 0
        """The newest life of the host tier that we have heard of."""
        self._asking_arena = False
        self._opening = False
        self._order = 1
        self._journal_records = 0
        self._pending: OrderedDict[SequenceHash, str] = OrderedDict()
        self._writes: dict[int, Write] = {}
        self._writing: set[SequenceHash] = set()
        self._reads: dict[int, Read] = {}
        self._reads_waiting: deque[FillAsked] = deque()
        self._next_id = 1
        self._effects: list[Effect] = []

    def start(self) -> list[Effect]:
        """The first effects of a life."""
        return [Publish(self.announcer.cleared("start"))]

    def stop(self) -> list[Effect]:
        """The last effects: the blocks stay on disk, but nobody can read them."""
        return [Publish(self.announcer.cleared("stop"))]

    def step(self, event: Input, now_ms: int) -> Sequence[Effect]:
        """Take one input; returns the effects, in order."""
        try:
            self._handle(event, now_ms)
        except IdentityError as error:
            self.counts["dropped.malformed"] += 1
            if isinstance(event, FillAsked):
                self._emit(Answer(event.reply_to, ErrorBody(code=error.code, message=str(error))))
        self._advance_reads(now_ms)
        self._advance_writes()
        effects, self._effects = self._effects, []
        return effects

    def _handle(self, event: Input, now_ms: int) -> None:
        match event:
            case StoreOpened():
                self._opened(event, now_ms)
            case HostSeen(instance):
                self._host = instance
                self._ask_arena(instance)
            case HostLost(instance):
                self._host = None
                if self.arena is not None and self.arena.instance == instance:
                    self.arena = None
            case HostEvent(instance, host_event):
                self._host_event(instance, host_event)
            case HostSnapshot(instance, reply):
                for part in reply.parts:
                    for run in part.runs:
                        self._listed(instance, hashes_from_hex(run.hashes))
            case HitsTold(instance, hits):
                self._seen(instance, hashes_from_hex(hits.hashes))
            case ArenaKnown(arena):
                self._arena_known(arena)
            case ArenaFailed():
                self._asking_arena = False
            case Leased():
                self._leased(event, now_ms)
            case LeaseFailed(write, reason):
                self._abort_write(write, reason)
            case Written(write):
                self._written(write)
            case WriteFailed(write, reason):
                self._write_failed(write, reason)
            case Released(write, valid):
                self._released(write, valid)
            case Journaled(write):
                self._journaled(write, now_ms)
            case JournalFailed(write, reason):
                self._abort_write(write, reason)
            case FillAsked():
                self._fill_asked(event, now_ms)
            case ReadDone():
                self._read_done(event, now_ms)
            case ReadFailed():
                self._read_failed(event)
            case Tick():
                self.filter.decay_until(now_ms)
                if self._host is not None and self._wants_arena():
                    self._ask_arena(self._host)
            case _:
                assert_never(event)

    def _emit(self, *effects: Effect) -> None:
        self._effects.extend(effects)

    # --- the store --------------------------------------------------------------------------

    def _ask_arena(self, instance: str) -> None:
        if not self._asking_arena:
            self._asking_arena = True
            self._emit(AskArena(instance))

    def _wants_arena(self) -> bool:
        """There is none, it is not cut yet, or it is a dead life's: an answer may come too early."""
        arena = self.arena
        return arena is None or not arena.slot_bytes or arena.epoch < self._host_epoch

    def _host_event(self, instance: str, event: Event) -> None:
        """What is stored may deserve the disk; another epoch is another arena."""
        self._host_epoch = max(self._host_epoch, event.epoch)
        if self._wants_arena():
            self._ask_arena(instance)
        if isinstance(event, Stored):
            names = [name for run in event.runs for name in hashes_from_hex(run.hashes)]
            self._seen(instance, names)

    def _arena_known(self, arena: ArenaReply) -> None:
        """An arena is mapped. What it held before we listened is told by a snapshot."""
        self._asking_arena = False
        is_new = self.arena is None or self.arena.epoch != arena.epoch or not self.arena.slot_bytes
        self.arena = arena
        if arena.slot_bytes and is_new:
            self._emit(AskHostSnapshot(arena.instance))
        self._fit_store()

    def _fit_store(self) -> None:
        """Have a store whose slots are those of the arena, once nothing is in flight."""
        arena = self.arena
        if arena is None or arena.slot_bytes in (0, self.slot_bytes) or self._opening:
            return
        if self._writes or self._reads:
            return
        self._opening = True
        blocks = self.table.blocks()
        self.counts["dropped.store_reformatted"] += len(blocks)
        self.table = SlotTable(0, make_policy(self._policy_name))
        self.slot_bytes = 0
        self._announce_removed(blocks, "reformatted")
        self._emit(OpenStore(arena.slot_bytes))

    def _opened(self, event: StoreOpened, now_ms: int) -> None:
        """Take over what the journal says is there, and announce it."""
        assert len(self.table) == 0
        self._opening = False
        self.slot_bytes = event.slot_bytes
        self.table = SlotTable(event.slot_count, make_policy(self._policy_name))
        self._order = event.replay.next_order
        self._journal_records = event.replay.records
        self.counts["journal_damaged_records"] += event.replay.damaged
        self.table.restore(event.replay.blocks)
        blocks = self.table.blocks()
        self.counts["recovered_blocks"] += len(blocks)
        for block in blocks:
            self.diary.note(now_ms, "recovered from the journal", block.hash)
        for stored in self.announcer.stored(blocks):
            self._emit(Publish(stored))
        self._fit_store()

    # --- writes -----------------------------------------------------------------------------

    def _seen(self, instance: str, names: Sequence[SequenceHash]) -> None:
        """Blocks that are in the host tier: those that deserve it wait for their write."""
        for name in names:
            if not self._passes(name) or self._is_known(name):
                continue
            if len(self._pending) >= self.limits.pending_max:
                self._pending.popitem(last=False)
                self.counts["dropped.write_pending_full"] += 1
            self._pending[name] = instance

    def _listed(self, instance: str, names: Sequence[SequenceHash]) -> None:
        """Blocks of a snapshot: one that was counted when it was announced is not wanted twice."""
        self._seen(instance, [name for name in names if name not in self.filter])

    def _passes(self, name: SequenceHash) -> bool:
        staging = self.arena is not None and self.arena.staging
        if staging or self.filter.see(name):
            return True
        self.counts["filtered_blocks"] += 1
        return False

    def _is_known(self, name: SequenceHash) -> bool:
        return self.table.find(name) is not None or name in self._writing or name in self._pending

    def _advance_writes(self) -> None:
        """Start as many writes as may fly."""
        self._fit_store()
        fly_max = self.limits.writes_beside_reads_max if self._reads else self.limits.writes_max
        while self._pending and len(self._writes) < fly_max and self._can_write():
            assert self.arena is not None
            names = self._next_batch()
            write_id = self._take_id()
            self._writes[write_id] = Write(self.arena.instance, self.arena.epoch, names)
            self._writing.update(names)
            request = LeaseRequest(
                owner=self.announcer.source,
                epoch=self.arena.epoch,
                hashes=hashes_to_hex(names),
                lease_ms=self.limits.lease_ms,
            )
            self._emit(LeaseHost(write_id, self.arena.instance, request))

    def _can_write(self) -> bool:
        fits = self.arena is not None and self.arena.slot_bytes == self.slot_bytes
        return fits and self.slot_bytes > 0 and self.table.room() > 0 and not self._opening

    def _next_batch(self) -> list[SequenceHash]:
        count = min(self.limits.batch_blocks_max, len(self._pending))
        return [self._pending.popitem(last=False)[0] for _ in range(count)]

    def _leased(self, event: Leased, now_ms: int) -> None:
        write = self._writes[event.write]
        write.lease = event.reply.lease
        leased = {hash_from_hex(slot.hash): slot for slot in event.reply.slots}
        if self.arena is None or self.arena.epoch != write.epoch:
            leased = {}  # Those slots are of an arena that is mapped no more.
        wanted = [(name, leased[name]) for name in write.names if name in leased]
        self.counts["dropped.write_gone"] += len(write.names) - len(wanted)
        room = self._make_room(len(wanted))
        self.counts["dropped.write_no_room"] += len(wanted) - room
        sources: list[int] = []
        for name, slot in wanted[:room]:
            target = self.table.stage(name)
            assert target is not None
            block = Block(
                name,
                hash_from_hex(slot.parent),
                bytes.fromhex(slot.namespace),
                slot.checksum,
                slot.bytes,
            )
            write.slots.append((target, block))
            sources.append(slot.slot)
            self.diary.note(now_ms, f"being written from slot {slot.slot} to {target}", name)
        if not sources:
            self._emit(ReleaseHost(event.write, write.instance, write.lease))
            write.phase = Phase.RELEASING
            return
        write.phase = Phase.WRITING
        targets = tuple(target for target, _ in write.slots)
        self._emit(WriteSlots(event.write, tuple(sources), targets, self.slot_bytes))

    def _make_room(self, count: int) -> int:
        victims = self.table.policy.victims(max(0, count - self.table.counts()["reset"]))
        slots = {name: self.table.find(name) for name in victims}
        evicted = self.table.make_room(count)
        self._journal_removed([(slots[block.hash], block) for block in evicted])
        self._announce_removed(evicted, "evicted")
        return min(count, self.table.counts()["reset"])

    def _written(self, write_id: int) -> None:
        write = self._writes[write_id]
        write.phase = Phase.RELEASING
        self._emit(ReleaseHost(write_id, write.instance, write.lease))

    def _write_failed(self, write_id: int, reason: str) -> None:
        """Nothing of a failed batch is kept: which part arrived is not known."""
        write = self._writes[write_id]
        self.counts[f"dropped.write_{reason}"] += len(write.slots)
        for slot, _ in write.slots:
            self.table.abort(slot)
        write.slots.clear()
        self._written(write_id)

    def _released(self, write_id: int, valid: bool) -> None:
        write = self._writes[write_id]
        if not write.slots:
            self._end_write(write_id)
            return
        if not valid:
            self._abort_write(write_id, "lease_lost")
            return
        write.phase = Phase.JOURNALING
        records = tuple(self._record(Operation.COMMITTED, *entry) for entry in write.slots)
        self._append(write_id, records)

    def _journaled(self, write_id: int, now_ms: int) -> None:
        write = self._writes[write_id]
        for slot, block in write.slots:
            self.table.register(slot, block)
            self.diary.note(now_ms, f"committed in slot {slot}", block.hash)
        # A chain is freed leaves first: touch it once so that its root outlives its leaf.
        for slot, _ in write.slots:
            self.table.pin(slot)
        self.table.unpin(slot for slot, _ in write.slots)
        blocks = [block for _, block in write.slots]
        staging = self.arena is not None and self.arena.staging
        self.counts["offload_blocks_d2d" if staging else "offload_blocks_h2d"] += len(blocks)
        self.counts["bytes.written"] += len(blocks) * self.slot_bytes
        for event in self.announcer.stored(blocks):
            self._emit(Publish(event))
        self._end_write(write_id)

    def _abort_write(self, write_id: int, reason: str) -> None:
        write = self._writes[write_id]
        count = len(write.slots) if write.slots else len(write.names)
        self.counts[f"dropped.write_{reason}"] += count
        for slot, _ in write.slots:
            self.table.abort(slot)
        self._end_write(write_id)
        # Last: the journal may be rewritten here, and must not find this write any more.
        if write.phase is Phase.JOURNALING:
            self._journal_removed(list(write.slots))

    def _end_write(self, write_id: int) -> None:
        self._writing.difference_update(self._writes.pop(write_id).names)

    # --- the journal ------------------------------------------------------------------------

    def _record(self, operation: Operation, slot: int, block: Block) -> Record:
        self._order += 1
        return Record(operation, self._order, slot, block)

    def _journal_removed(self, entries: Sequence[tuple[int | None, Block]]) -> None:
        records = [
            self._record(Operation.REMOVED, slot, block)
            for slot, block in entries
            if slot is not None
        ]
        if records:
            self._append(None, tuple(records))

    def _append(self, write_id: int | None, records: tuple[Record, ...]) -> None:
        self._emit(AppendJournal(write_id, records))
        self._journal_records += len(records)
        longest = max(65_536, self.limits.journal_records_per_slot * self.table.slot_count)
        if self._journal_records > longest:
            self._rewrite_journal()

    def _rewrite_journal(self) -> None:
        """Keep only what is live: committed blocks, and those whose record is on its way."""
        entries = [(self.table.find(block.hash), block) for block in self.table.blocks()]
        for write in self._writes.values():
            if write.phase is Phase.JOURNALING:
                entries += write.slots
        records = [
            self._record(Operation.COMMITTED, slot, block)
            for slot, block in entries
            if slot is not None
        ]
        self._journal_records = len(records)
        self._emit(RewriteJournal(tuple(records)))

    # --- reads ------------------------------------------------------------------------------

    def _fill_asked(self, event: FillAsked, now_ms: int) -> None:
        refusal = self._refusal(event.request, now_ms)
        if refusal is not None:
            self.counts[f"dropped.fill_{refusal.code}"] += len(event.request.slots)
            self._emit(Answer(event.reply_to, refusal))
            return
        self._reads_waiting.append(event)

    def _refusal(self, request: FillRequest, now_ms: int) -> ErrorBody | None:
        arena = self.arena
        if arena is None or arena.epoch != request.epoch or arena.slot_bytes != self.slot_bytes:
            return ErrorBody(code="stale_arena", message="another arena is mapped", field="epoch")
        if now_ms >= request.until_ms:
            return ErrorBody(code="too_late", message="the deadline has passed", field="until_ms")
        if any(slot.slot >= arena.slot_count for slot in request.slots):
            return ErrorBody(code="bad_slot", message="no such arena slot", field="slots")
        for field_name in ("slot", "hash"):
            if len({getattr(slot, field_name) for slot in request.slots}) < len(request.slots):
                return ErrorBody(code="duplicate", message=f"a {field_name} twice", field="slots")
        if len(self._reads_waiting) >= self.limits.reads_waiting_max:
            return ErrorBody(code="busy", message="too many fills are waiting")
        return None

    def _advance_reads(self, now_ms: int) -> None:
        while self._reads_waiting and len(self._reads) < self.limits.reads_max:
            event = self._reads_waiting.popleft()
            refusal = self._refusal(event.request, now_ms)
            if refusal is not None:
                self.counts[f"dropped.fill_{refusal.code}"] += len(event.request.slots)
                self._emit(Answer(event.reply_to, refusal))
                continue
            self._start_read(event)

    def _start_read(self, event: FillAsked) -> None:
        slots: dict[SequenceHash, int] = {}
        targets: list[int] = []
        for asked in event.request.slots:
            name = hash_from_hex(asked.hash)
            slot = self.table.find(name)
            if slot is None:
                self.counts["dropped.fill_gone"] += 1
                continue
            self.table.pin(slot)
            slots[name] = slot
            targets.append(asked.slot)
        read = Read(event.reply_to, event.request.slots, slots)
        if not slots:
            self._emit(Answer(read.reply_to, _reply(read, {})))
            return
        read_id = self._take_id()
        self._reads[read_id] = read
        self._emit(
            ReadSlots(
                read_id,
                tuple(slots.values()),
                tuple(targets),
                tuple(self.table.block(slot) for slot in slots.values()),
                self.slot_bytes,
                event.request.until_ms,
            )
        )

    def _read_done(self, event: ReadDone, now_ms: int) -> None:
        read = self._reads.pop(event.read)
        intact: dict[SequenceHash, Block] = {}
        corrupt: list[tuple[int | None, Block]] = []
        for (name, slot), ok in zip(read.slots.items(), event.intact, strict=True):
            if ok:
                intact[name] = self.table.block(slot)
                continue
            self.diary.note(now_ms, "was corrupt", name)
            # Another read may have found it so, and it may have been written anew since.
            if self.table.find(name) == slot:
                corrupt.append((slot, self.table.block(slot)))
        self.table.unpin(read.slots.values())
        self.counts["fill_blocks"] += len(intact)
        self.counts["bytes.read"] += len(read.slots) * self.slot_bytes
        self._quarantine(corrupt)
        self._emit(Answer(read.reply_to, _reply(read, intact)))

    def _quarantine(self, corrupt: list[tuple[int | None, Block]]) -> None:
        """Blocks whose bytes are wrong: nobody finds them again, now or after a restart."""
        gone = [
            (slot, block) for slot, block in corrupt if self.table.discard(block.hash) is not None
        ]
        self._journal_removed(gone)
        self._announce_removed([block for _, block in gone], "corrupt")

    def _read_failed(self, event: ReadFailed) -> None:
        read = self._reads.pop(event.read)
        self.counts[f"dropped.fill_{event.reason}"] += len(read.slots)
        self.table.unpin(read.slots.values())
        self._emit(Answer(read.reply_to, _reply(read, {}, reason=event.reason)))

    def _announce_removed(self, blocks: Sequence[Block], reason: str) -> None:
        self.counts[f"evictions.{reason}"] += len(blocks)
        for event in self.announcer.removed(blocks, reason):
            self._emit(Publish(event))

    def _take_id(self) -> int:
        self._next_id += 1
        return self._next_id

    # --- questions --------------------------------------------------------------------------

    def snapshot(self) -> SnapshotReply:
        """Everything that is committed, as of the last event."""
        return self.announcer.snapshot(self.table.blocks())

    def statistics(self) -> StatsReply:
        """Figures for metrics and admin API."""
        figures = {name: float(value) for name, value in self.counts.items()}
        figures["writes"] = float(len(self._writes))
        figures["writes_pending"] = float(len(self._pending))
        figures["reads"] = float(len(self._reads) + len(self._reads_waiting))
        figures["filter_entries"] = float(len(self.filter))
        return StatsReply(
            kind="disk-tier",
            host=self.announcer.host,
            instance=self.instance,
            epoch=self.announcer.epoch,
            ready=True,
            seq=self.announcer.seq,
            tier="disk",
            slots=self.table.counts(),
            slot_bytes=self.slot_bytes,
            figures=figures,
        )

    def idle(self) -> bool:
        """Nothing is being written, read or waiting: a quiet point."""
        return not (self._writes or self._pending or self._reads or self._reads_waiting)

    def story(self, name: SequenceHash) -> list[str]:
        """What happened to a block lately."""
        return self.diary.story(name)

    def check(self) -> None:
        """Assert every invariant; O(slots)."""
        self.table.check()
        limits = self.limits
        assert len(self._writes) <= limits.writes_max
        assert len(self._reads) <= limits.reads_max
        assert len(self._pending) <= limits.pending_max
        staged = {slot for write in self._writes.values() for slot, _ in write.slots}
        assert staged == self.table.staged(), "a staged slot has no write"
        pins = Counter(slot for read in self._reads.values() for slot in read.slots.values())
        assert pins == self.table.pins(), "a pinned slot has no read"
        assert self._writing == {n for write in self._writes.values() for n in write.names}


def _reply(read: Read, intact: dict[SequenceHash, Block], *, reason: str = "") -> FillReply:
    """One entry per asked slot, in the asked order."""
    slots: list[FilledSlot] = []
    for asked in read.asked:
        name = hash_from_hex(asked.hash)
        block = intact.get(name)
        if block is None:
            why = reason or ("corrupt" if name in read.slots else "gone")
            slots.append(FilledSlot(hash=asked.hash, slot=asked.slot, ok=False, reason=why))
            continue
        slots.append(
            FilledSlot(
                hash=asked.hash,
                slot=asked.slot,
                ok=True,
                parent=block.parent.hex(),
                namespace=block.namespace.hex(),
                checksum=block.checksum,
                bytes=block.bytes,
            )
        )
    return FillReply(slots=slots)
