"""Writes, G2 → G3: which blocks deserve the disk, and their way there.

    pending --> LEASING --> LEASED --> WRITING --> RELEASING --> RELEASED --> JOURNALING --> stored
                   |          |           |            |                           |
                   +--- nothing there, failed, lease lost, journal failed ---------+--> aborted
                   +--- the host tier did not answer -----------------------------------> pending

A block is announced only when its record is in the journal. The disk never waits for the host tier:
as many batches as may be written are leased ahead, and one that is written makes way for the next
while host tier and journal confirm it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice

from kvbm_common.breaker import BreakerState
from kvbm_common.identity import SequenceHash, hashes_from_hex, hashes_to_hex
from kvbm_common.slots import Block
from kvbm_common.wire.verbs import ArenaReply, LeasedSlot, LeaseRequest

from kvbm_disk_tier.batch_size import BatchSize
from kvbm_disk_tier.frequency_filter import FrequencyFilter
from kvbm_disk_tier.messages import STALE_ARENA, Leased, LeaseHost, ReleaseHost, WriteSlots
from kvbm_disk_tier.retries import UNANSWERED, Retries
from kvbm_disk_tier.shards import Shards
from kvbm_disk_tier.tier import Tier
from kvbm_disk_tier.write_budget import WriteBudget

CHECKSUM_MAX = 2**64 - 1
SCAN_MAX = 256
"""Blocks that are looked at for a batch: with several host tiers a batch is of one of them."""
BATCH_BYTES_MAX = 64 * 1024 * 1024
ARENA_SHARE = 32
"""No batch pins more than one part of so many of a host tier's memory, if that is a transfer."""


class Phase(Enum):
    """Where a write is in the drawing above."""

    LEASING = "leasing"
    LEASED = "leased"
    WRITING = "writing"
    RELEASING = "releasing"
    RELEASED = "released"
    JOURNALING = "journaling"


AHEAD = (Phase.LEASING, Phase.LEASED)
COMMITTING = (Phase.RELEASING, Phase.RELEASED, Phase.JOURNALING)


@dataclass(slots=True)
class Write:
    """A batch on its way to disk."""

    instance: str
    epoch: int
    """The arena that the lease is for."""
    names: list[SequenceHash]
    phase: Phase = Phase.LEASING
    lease: int = 0
    leased: Sequence[LeasedSlot] = ()
    """Arena slots that the host tier has pinned for it."""
    slots: list[tuple[int, Block]] = field(default_factory=list)
    """Staged file slots and what is being written into them."""
    charged: int = 0
    """Bytes taken from the budget."""
    started_ms: int = 0
    released_ms: int = 0


class Writes:
    """All blocks that wait for the disk, and all batches in flight."""

    def __init__(
        self, tier: Tier, frequency_filter: FrequencyFilter, budget: WriteBudget, shards: Shards
    ) -> None:
        self.filter = frequency_filter
        self.budget = budget
        self.shards = shards
        self._tier = tier
        self._pending: OrderedDict[SequenceHash, str] = OrderedDict()
        """Block → the host tier that had it."""
        self._writes: dict[int, Write] = {}
        self._writing: set[SequenceHash] = set()
        self._retries = Retries()
        self._size = BatchSize(tier.limits.batch_transfers_max)

    def __len__(self) -> int:
        return len(self._writes)

    @property
    def pending_count(self) -> int:
        """Blocks that wait for their write."""
        return len(self._pending)

    # --- admission --------------------------------------------------------------------------

    def seen(self, names: Sequence[SequenceHash], instance: str) -> None:
        """Blocks that are in a host tier: those that deserve it wait for their write."""
        names, filtered = self.shards.owned(names), 0
        if not self._tier.staging:
            passing = [name for name in names if self.filter.see(name)]
            filtered = len(names) - len(passing)
            names = passing
        self._tier.counts["filtered_blocks"] += filtered
        for name in names:
            if not self._is_known(name):
                self._await_turn(name, instance)

    def _await_turn(self, name: SequenceHash, instance: str) -> None:
        if len(self._pending) >= self._tier.limits.pending_max:
            oldest, _ = self._pending.popitem(last=False)
            self._retries.forget([oldest])
            self._tier.counts["dropped.write_pending_full"] += 1
            self._not_written([oldest], "too many blocks were waiting")
        self._pending[name] = instance

    def listed(self, names: Sequence[SequenceHash], instance: str) -> None:
        """Blocks of a snapshot: one that was counted when it was announced is not wanted twice."""
        self.seen([name for name in names if name not in self.filter], instance)

    def _is_known(self, name: SequenceHash) -> bool:
        committed = self._tier.table.find(name) is not None
        return committed or name in self._writing or name in self._pending

    def is_waiting(self, name: SequenceHash) -> bool:
        """Is it to be written, or being written?"""
        return name in self._pending or name in self._writing

    def _not_written(self, names: Iterable[SequenceHash], reason: str) -> None:
        """Remember why, for those who miss them."""
        self._tier.fates.note(names, "not_written", self._tier.now_ms, detail=reason)

    def found(self, names: Iterable[SequenceHash]) -> None:
        """Blocks that are in the store without us need no write."""
        for name in names:
            if name in self._pending:
                del self._pending[name]
                self._retries.forget([name])

    def forget_pending(self, reason: str) -> None:
        """Nothing new is begun any more."""
        self._tier.counts[f"dropped.write_{reason}"] += len(self._pending)
        self._not_written(self._pending, reason)
        self._retries.forget(self._pending)
        self._pending.clear()

    # --- the way ----------------------------------------------------------------------------

    def advance(self, now_ms: int, *, beside_reads: bool) -> None:
        """Write as many batches as may be written, and lease as many ahead."""
        limits, breaker = self._tier.limits, self._tier.breaker
        self._journal(now_ms)
        fly_max = limits.writes_beside_reads_max if beside_reads else limits.writes_max
        for write_id in [i for i, write in self._writes.items() if write.phase is Phase.LEASED]:
            if breaker.state is BreakerState.OPEN:
                self._give_up(write_id)
            elif self._may_write(beside_reads=beside_reads) and breaker.allows(now_ms):
                self._begin(write_id, now_ms)
        while self._pending and breaker.allows(now_ms) and self._may_lease(fly_max, now_ms):
            if not self._lease(now_ms):
                break

    def _count(self, *phases: Phase) -> int:
        return sum(write.phase in phases for write in self._writes.values())

    def _may_write(self, *, beside_reads: bool) -> bool:
        limits = self._tier.limits
        writing = [write for write in self._writes.values() if write.phase is Phase.WRITING]
        if beside_reads:  # And none waits in the mover: a read would wait behind it.
            return len(writing) < limits.writes_beside_reads_max
        blocks, ahead = sum(len(write.slots) for write in writing), self._tier.ahead_blocks
        free = len(writing) < limits.writes_max + (limits.ahead_batches if ahead else 0)
        return free and blocks < limits.write_blocks_max + ahead

    def _may_lease(self, fly_max: int, now_ms: int) -> bool:
        committing = self._count(*COMMITTING)
        free = self._count(*AHEAD) < fly_max and committing < self._tier.limits.commits_max
        free = free and self._tier.may_write and self._retries.allows(now_ms)
        return free and self._tier.fits() and self._tier.table.room() > 0

    def _lease(self, now_ms: int) -> bool:
        """Lease the next batch; False: there is no budget for it now, or no arena."""
        tier = self._tier
        arena, names = self._next_batch()
        count = len(names)
        if arena is None or not self.budget.take(count * tier.slot_bytes, now_ms):
            return False
        for name in names:
            del self._pending[name]
        self._retries.start()
        write_id = tier.take_id()
        self._writes[write_id] = Write(
            arena.instance, arena.epoch, names, charged=count * tier.slot_bytes
        )
        self._writing.update(names)
        request = LeaseRequest(
            owner=tier.announcer.source,
            epoch=arena.epoch,
            hashes=hashes_to_hex(names),
            lease_ms=tier.limits.lease_ms,
        )
        tier.emit(LeaseHost(write_id, arena.instance, request))
        return True

    def _next_batch(self) -> tuple[ArenaReply | None, list[SequenceHash]]:
        """The oldest blocks of one host tier. Those whose arena is not known wait behind."""
        chosen: ArenaReply | None = None
        most = 0
        names: list[SequenceHash] = []
        for name, instance in list(islice(self._pending.items(), SCAN_MAX)):
            arena = self._tier.arena_for(instance)
            if arena is None:
                self._pending.move_to_end(name)
                continue
            if chosen is None:
                chosen, most = arena, self._batch_blocks(arena)
            if arena.epoch == chosen.epoch:
                names.append(name)
                if len(names) == most:
                    break
        return chosen, names

    def _batch_blocks(self, arena: ArenaReply) -> int:
        """How many blocks are leased, written, recorded and announced together at most."""
        tier = self._tier
        if not tier.kind.sized:
            return tier.transfer_blocks
        size = min(
            self._size.transfers * tier.transfer_blocks,
            BATCH_BYTES_MAX // tier.slot_bytes,
            arena.slot_count // ARENA_SHARE,
        )
        return max(size, tier.transfer_blocks)

    def leased(self, event: Leased) -> None:
        """The host tier holds what it had of the batch: that waits for its turn."""
        self._retries.answered()
        write = self._writes[event.write]
        write.phase = Phase.LEASED
        write.lease, write.leased = event.reply.lease, event.reply.slots

    def _begin(self, write_id: int, now_ms: int) -> None:
        write, tier = self._writes[write_id], self._tier
        arena = tier.arena_of_life(write.epoch)
        wanted = self._wanted(arena, write, write.leased)
        room = tier.make_room(len(wanted))
        tier.counts["dropped.write_no_room"] += len(wanted) - room
        blocks = [block for block, _ in wanted[:room]]
        names = [block.hash for block in blocks]
        targets = tier.table.stage_all(names)
        write.slots = list(zip(targets, blocks, strict=True))
        tier.diary.note_all(now_ms, "being written to slot {slot}", names, targets)
        self._refund(write, len(write.slots))
        if not write.slots or arena is None:
            self._release(write_id)
            return
        write.phase = Phase.WRITING
        write.started_ms = now_ms
        tier.breaker.start()
        tier.emit(
            WriteSlots(
                write_id,
                write.epoch,
                tuple(source for _, source in wanted[:room]),
                tuple(targets),
                arena.slot_bytes,
                tuple(blocks),
            )
        )

    def _give_up(self, write_id: int) -> None:
        """The disk is bypassed: a lease would have ended before it is back."""
        write = self._writes[write_id]
        self._tier.counts["dropped.write_bypassed"] += len(write.leased)
        self._not_written(write.names, "bypassed")
        self._refund(write, 0)
        self._release(write_id)

    def _wanted(
        self, arena: ArenaReply | None, write: Write, slots: Sequence[LeasedSlot]
    ) -> list[tuple[Block, int]]:
        """What was asked for and is there, with its arena slot, in the asked order."""
        if arena is None or not self._tier.usable(arena):
            slots = []  # Those slots are of an arena that is mapped no more.
        sound = [slot for slot in slots if arena is not None and _is_sound(slot, arena)]
        self._tier.counts["dropped.write_bad_lease"] += len(slots) - len(sound)
        leased = {
            block.hash: (block, slot.slot)
            for block, slot in zip(_blocks_of(sound), sound, strict=True)
        }
        table = self._tier.table  # A listing may have found one of them meanwhile.
        wanted = [leased[n] for n in write.names if n in leased and table.find(n) is None]
        gone = len(write.names) - len(wanted) - (len(slots) - len(sound))
        self._tier.counts["dropped.write_gone"] += max(0, gone)
        left = (n for n in write.names if n not in leased and table.find(n) is None)
        self._not_written(left, "it had left host memory when its turn came")
        return wanted

    def _refund(self, write: Write, blocks: int) -> None:
        """Only so many blocks go to the disk: the rest of the budget is another's."""
        kept = blocks * self._tier.slot_bytes
        self.budget.give_back(write.charged - kept)
        write.charged = kept

    def lease_failed(self, write_id: int, reason: str, now_ms: int) -> None:
        """The host tier did not answer, or refused."""
        self._refund(self._writes[write_id], 0)
        if reason in UNANSWERED:
            self._try_again(write_id, self._writes[write_id].names, reason, now_ms)
        else:
            self._retries.answered()
            self._abort(write_id, reason)

    def _try_again(
        self, write_id: int, names: Sequence[SequenceHash], reason: str, now_ms: int
    ) -> None:
        """Behind all others: what never gets an answer holds up nobody else."""
        instance = self._writes[write_id].instance
        for slot, _ in self._writes[write_id].slots:
            self._tier.table.abort(slot)
        again = self._retries.unanswered(names, now_ms)
        self._tier.counts[f"dropped.write_{reason}"] += len(names) - len(again)
        self._not_written(set(names).difference(again), reason)
        self._tier.counts["write_retries"] += len(again)
        self._end(write_id, tried_again=again)
        for name in again:
            self._await_turn(name, instance)

    def written(self, write_id: int, lost: Sequence[int], now_ms: int) -> None:
        """The bytes are in the store, but for some: had the lease held until now?"""
        write, table = self._writes[write_id], self._tier.table
        self._tier.counts["dropped.write_lost"] += len(lost)
        for index in sorted(lost, reverse=True):
            table.abort(write.slots.pop(index)[0])
        self._size.ended(now_ms - write.started_ms)
        self._tier.disk_ended(write.started_ms, now_ms, failed=False)
        self._release(write_id)

    def write_failed(self, write_id: int, reason: str, now_ms: int) -> None:
        """Nothing of a failed batch is kept: which part arrived is not known."""
        write = self._writes[write_id]
        if reason != STALE_ARENA:
            self._tier.disk_ended(write.started_ms, now_ms, failed=True)
        self._tier.counts[f"dropped.write_{reason}"] += len(write.slots)
        self._not_written((block.hash for _, block in write.slots), reason)
        for slot, _ in write.slots:
            self._tier.table.abort(slot)
        write.slots.clear()
        self._release(write_id)

    def _release(self, write_id: int) -> None:
        write = self._writes[write_id]
        write.phase = Phase.RELEASING
        self._tier.emit(ReleaseHost(write_id, write.instance, write.lease))

    def released(self, write_id: int, now_ms: int, *, valid: bool, answered: bool) -> None:
        """The host tier says whether the bytes were the right ones all the time."""
        write = self._writes[write_id]
        if not write.slots:
            self._end(write_id)
        elif not answered and not self._tier.kind.verifies_writes:
            names = [block.hash for _, block in write.slots]
            self._try_again(write_id, names, "lease_lost", now_ms)
        elif not valid and not self._tier.kind.verifies_writes:
            self._abort(write_id, "lease_lost")
        else:
            write.phase, write.released_ms = Phase.RELEASED, now_ms

    def _journal(self, now_ms: int) -> None:
        """Record what is released: at once if nothing follows, else together with what does.

        A disk is slower while it flushes, and one flush is for all that was written before it.
        """
        released = [(i, w) for i, w in self._writes.items() if w.phase is Phase.RELEASED]
        follows = self._tier.kind.sized and self._count(Phase.WRITING, Phase.RELEASING)
        oldest_ms = min((write.released_ms for _, write in released), default=now_ms)
        if follows and now_ms < oldest_ms + self._tier.limits.journal_wait_ms:
            return
        for write_id, write in released:
            write.phase = Phase.JOURNALING
            self._tier.journal_committed(write_id, write.slots)

    def journaled(self, write_ids: Sequence[int], now_ms: int) -> None:
        """Data and records are durable: commit and announce."""
        tier = self._tier
        blocks: list[Block] = []
        for write_id in write_ids:
            entries = self._writes[write_id].slots
            tier.table.register_all(entries)
            names = [block.hash for _, block in entries]
            slots = [slot for slot, _ in entries]
            tier.diary.note_all(now_ms, "committed in slot {slot}", names, slots)
            blocks += [block for _, block in entries]
            self._end(write_id)
        by_mode = "offload_blocks_d2d" if tier.staging else "offload_blocks_h2d"
        tier.counts[tier.kind.offloaded or by_mode] += len(blocks)
        tier.counts["bytes.written"] += tier.stored_bytes(blocks)
        tier.counts["bytes.payload"] += sum(block.bytes for block in blocks)
        tier.announce_stored(blocks)

    def journal_failed(self, write_id: int, reason: str, now_ms: int) -> None:
        """Whether the records are in the journal is not known: take them back."""
        self._tier.disk_ended(now_ms, now_ms, failed=True)
        entries = list(self._writes[write_id].slots)
        self._abort(write_id, reason)
        self._tier.journal_removed(entries)

    def _abort(self, write_id: int, reason: str) -> None:
        write = self._writes[write_id]
        count = len(write.slots) if write.slots else len(write.names)
        self._tier.counts[f"dropped.write_{reason}"] += count
        self._not_written(write.names, reason)
        for slot, _ in write.slots:
            self._tier.table.abort(slot)
        self._end(write_id)

    def _end(self, write_id: int, *, tried_again: Sequence[SequenceHash] = ()) -> None:
        names = self._writes.pop(write_id).names
        self._writing.difference_update(names)
        self._retries.forget(set(names).difference(tried_again))

    # --- questions --------------------------------------------------------------------------

    def committing(self) -> list[tuple[int, Block]]:
        """Slots and blocks whose record is on its way into the journal."""
        journaling = [w for w in self._writes.values() if w.phase is Phase.JOURNALING]
        return [entry for write in journaling for entry in write.slots]

    def staged_slots(self) -> set[int]:
        """Every slot that a write has staged, for `check`."""
        return {slot for write in self._writes.values() for slot, _ in write.slots}

    def check(self) -> None:
        """Assert every invariant."""
        limits = self._tier.limits
        assert self._count(Phase.WRITING) <= limits.writes_max + limits.ahead_batches
        assert self._count(*AHEAD) <= limits.writes_max
        writes_max = 2 * limits.writes_max + limits.ahead_batches + limits.commits_max
        assert len(self._writes) <= writes_max
        assert len(self._pending) <= limits.pending_max
        assert self._writing == {n for write in self._writes.values() for n in write.names}
        assert not self._writing & self._pending.keys()
        assert len(self._retries) <= len(self._pending) + len(self._writing)


def _is_sound(slot: LeasedSlot, arena: ArenaReply) -> bool:
    """Whether a leased slot can be written and journaled at all."""
    inside = slot.slot < arena.slot_count and slot.bytes <= arena.slot_bytes
    return inside and 0 <= slot.checksum <= CHECKSUM_MAX


def _blocks_of(slots: Sequence[LeasedSlot]) -> Iterator[Block]:
    names = hashes_from_hex([slot.hash for slot in slots])
    parents = hashes_from_hex([slot.parent for slot in slots])
    namespaces = {text: bytes.fromhex(text) for text in {slot.namespace for slot in slots}}
    for slot, name, parent in zip(slots, names, parents, strict=True):
        yield Block(name, parent, namespaces[slot.namespace], slot.checksum, slot.bytes)
