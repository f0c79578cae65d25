"""Writes, G2 → G3: the way of blocks to disk, in batches.

    lease from the host tier → write → release the lease → record in the journal → commit, announce

A block is announced only when its record is in the journal. The disk never waits for the host tier:
as many batches as may be written are leased ahead, and one that is written makes way for the next
while host tier and journal confirm it. The states are those of `WRITE`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import assert_never

from kvbm_common.identity import SequenceHash, hashes_to_hex
from kvbm_common.tier.breaker import BreakerState
from kvbm_common.tier.departures import Departures
from kvbm_common.tier.slots import Block
from kvbm_common.wire.verbs import ArenaReply, LeaseRequest

from kvbm_disk_tier.core.admission import Admission
from kvbm_disk_tier.core.batch_size import BatchSize
from kvbm_disk_tier.core.disk_breaker import DiskBreaker
from kvbm_disk_tier.core.effects import LeaseHost, ReleaseHost, WriteSlots
from kvbm_disk_tier.core.host_arenas import HostArenas
from kvbm_disk_tier.core.inventory import Inventory
from kvbm_disk_tier.core.journal_writer import JournalWriter
from kvbm_disk_tier.core.limits import DiskTierLimits
from kvbm_disk_tier.core.messages import (
    STALE_ARENA,
    Journaled,
    JournalFailed,
    Leased,
    LeaseFailed,
    Released,
    WriteFailed,
    WriteInput,
    Written,
)
from kvbm_disk_tier.core.outbox import Outbox
from kvbm_disk_tier.core.pending import PendingBlocks
from kvbm_disk_tier.core.retries import UNANSWERED, Retries
from kvbm_disk_tier.core.store import Store
from kvbm_disk_tier.core.write_batch import Phase, Write, WritesInFlight, leased_blocks
from kvbm_disk_tier.core.write_budget import WriteBudget


class Writes:
    """All blocks that wait for the disk, and all batches in flight."""

    def __init__(
        self,
        *,
        owner: str,
        ids: Iterator[int],
        limits: DiskTierLimits,
        admission: Admission,
        budget: WriteBudget,
        store: Store,
        breaker: DiskBreaker,
        arenas: HostArenas,
        inventory: Inventory,
        journal: JournalWriter,
        departures: Departures,
        outbox: Outbox,
        counts: Counter[str],
    ) -> None:
        """Start without writes. Leases are `owner`'s; `ids` numbers writes and reads."""
        assert owner, "leases have an owner"
        self.flying = WritesInFlight(inventory.diary)
        self.may_begin = store.kind.sized
        """Otherwise only after a first look at what is in the store."""
        self.budget = budget
        self._retries = Retries()
        self.pending = PendingBlocks(
            limits.pending_max, retries=self._retries, departures=departures, counts=counts
        )
        self._owner = owner
        self._ids = ids
        self._limits = limits
        self._admission = admission
        self._store = store
        self._breaker = breaker
        self._arenas = arenas
        self._inventory = inventory
        self._journal = journal
        self._departures = departures
        self._outbox = outbox
        self._counts = counts
        self._size = BatchSize(limits.batch_transfers_max)

    # --- admission --------------------------------------------------------------------------

    def seen(self, names: Sequence[SequenceHash], instance: str, now_ms: int) -> None:
        """Let the blocks of a host tier that deserve the disk wait for their write."""
        find, waiting, flying = self._inventory.table.find, self.pending.waiting, self.flying.names
        for name in self._admission.chosen(names, staging=self._arenas.staging):
            if find(name) is None and name not in flying and name not in waiting:
                self.pending.add(name, instance, now_ms)

    def listed(self, names: Sequence[SequenceHash], instance: str, now_ms: int) -> None:
        """Take the blocks of a snapshot, but for those that an event has told of."""
        self.seen(self._admission.uncounted(names), instance, now_ms)

    def is_waiting(self, name: SequenceHash) -> bool:
        """Tell whether a block is to be written, or being written."""
        return name in self.pending.waiting or name in self.flying.names

    # --- what has ended ---------------------------------------------------------------------

    def take(self, event: WriteInput, now_ms: int) -> None:
        """Take the outcome of an effect."""
        match event:
            case Leased():
                self.leased(event)
            case LeaseFailed(write_id, reason):
                self.lease_failed(write_id, reason, now_ms)
            case Written(write_id, lost):
                self.written(write_id, lost, now_ms)
            case WriteFailed(write_id, reason):
                self.write_failed(write_id, reason, now_ms)
            case Released():
                self.released(event, now_ms)
            case Journaled(write_ids):
                self.journaled(write_ids)
            case JournalFailed(write_id, reason):
                self.journal_failed(write_id, reason, now_ms)
            case _:
                assert_never(event)

    # --- the turns --------------------------------------------------------------------------

    def advance(self, now_ms: int, *, beside_reads: bool) -> None:
        """Record what is released, write what is leased, and lease as many batches ahead."""
        if self.flying.phases[Phase.RELEASED]:
            self._record(now_ms)
        if self.flying.phases[Phase.LEASED]:
            self._begin_leased(now_ms, beside_reads=beside_reads)
        while self.pending.waiting and self._breaker.allows(now_ms):
            if not (self._may_lease(now_ms, beside_reads=beside_reads) and self._lease(now_ms)):
                break

    def _begin_leased(self, now_ms: int, *, beside_reads: bool) -> None:
        for write in self.flying.in_phase(Phase.LEASED):
            if self._breaker.state is BreakerState.OPEN:
                self._give_up(write, now_ms)
            elif self._may_write(beside_reads=beside_reads) and self._breaker.allows(now_ms):
                self._begin(write, now_ms)

    def _may_write(self, *, beside_reads: bool) -> bool:
        limits, writing = self._limits, self.flying.phases[Phase.WRITING]
        if beside_reads:  # And none waits in the mover: a read would wait behind it.
            return len(writing) < limits.writes_beside_reads_max
        blocks = sum(len(self.flying.by_id[write_id].slots) for write_id in writing)
        ahead = self._store.ahead_blocks
        free = len(writing) < limits.writes_max + (limits.ahead_batches if ahead else 0)
        return free and blocks < self._store.write_blocks_max + ahead

    def _may_lease(self, now_ms: int, *, beside_reads: bool) -> bool:
        limits, phases = self._limits, self.flying.phases
        fly_max = limits.writes_beside_reads_max if beside_reads else limits.writes_max
        ahead = len(phases[Phase.LEASING]) + len(phases[Phase.LEASED])
        committing = len(self.flying.by_id) - ahead - len(phases[Phase.WRITING])
        free = ahead < fly_max and committing < limits.commits_max
        free = free and self.may_begin and self._retries.allows(now_ms)
        free = free and self._store.works and len(self._arenas.usable) > 0
        table = self._inventory.table
        return free and (table.reset_count > 0 or table.room() > 0)

    def _lease(self, now_ms: int) -> bool:
        """Lease the next batch; False: there is no budget for it now, or no arena."""
        arena, names = self.pending.next_batch(self._arenas, self._batch_blocks)
        if arena is None:
            return False
        size = len(names) * self._store.slot_bytes if self.budget.bytes_per_day else 0
        if size and not self.budget.take(size, now_ms):
            return False
        self.pending.take(names)
        self._retries.start()
        write_id = next(self._ids)
        self.flying.begin(write_id, arena, names, charged=size)
        hashes, lease_ms = hashes_to_hex(names), self._limits.lease_ms
        request = LeaseRequest(
            owner=self._owner, epoch=arena.epoch, hashes=hashes, lease_ms=lease_ms
        )
        self._outbox.emit(LeaseHost(write_id, arena.instance, request))
        return True

    def _batch_blocks(self, arena: ArenaReply) -> int:
        store, transfer = self._store, self._store.transfer_blocks
        if not store.kind.sized:
            return transfer
        return self._size.blocks(arena, transfer_blocks=transfer, slot_bytes=store.slot_bytes)

    def leased(self, event: Leased) -> None:
        """Let a batch that the host tier has pinned wait for its turn."""
        write = self.flying.find(event.write)
        assert not write.leased, self.flying.story(write)
        self._retries.good()
        write.lease, write.leased = event.reply.lease, event.reply.slots
        self.flying.move(write, "leased")

    def _begin(self, write: Write, now_ms: int) -> None:
        wanted = self._wanted(write, now_ms)
        room = self._inventory.make_room(len(wanted))
        assert not write.slots, self.flying.story(write)
        assert room <= len(wanted), f"room for {room} of {len(wanted)}"
        self._counts["dropped.write_no_room"] += len(wanted) - room
        blocks = [block for block, _ in wanted[:room]]
        if write.charged:
            self._refund(write, room)
        if not blocks:
            self._release(write, "nothing left")
            return
        targets = self._inventory.stage([block.hash for block in blocks])
        write.slots = list(zip(targets, blocks, strict=True))
        write.started_ms = now_ms
        self.flying.move(write, "write")
        self._breaker.start()
        sources = tuple(source for _, source in wanted[:room])
        size = self._arenas.usable[write.epoch].slot_bytes
        self._outbox.emit(
            WriteSlots(write.id, write.epoch, sources, tuple(targets), size, tuple(blocks))
        )

    def _wanted(self, write: Write, now_ms: int) -> list[tuple[Block, int]]:
        """Return what was asked for and is there, with its arena slot, in the asked order."""
        arena, names = self._arenas.usable.get(write.epoch), write.names
        # Without an arena the slots are of one that is mapped no more.
        leased, bad = leased_blocks(write.leased, arena) if arena is not None else ({}, 0)
        self._counts["dropped.write_bad_lease"] += bad
        find = self._inventory.table.find  # A listing may have found one of them meanwhile.
        wanted = [leased[name] for name in names if name in leased and find(name) is None]
        self._counts["dropped.write_gone"] += max(0, len(names) - len(wanted) - bad)
        if len(wanted) < len(names):
            left = [name for name in names if name not in leased and find(name) is None]
            self._not_written(left, "it had left host memory when its turn came", now_ms)
        return wanted

    def _give_up(self, write: Write, now_ms: int) -> None:
        """Release a batch unwritten: its lease would have ended before the disk is back."""
        assert not write.slots, self.flying.story(write)
        self._counts["dropped.write_bypassed"] += len(write.leased)
        self._not_written(write.names, "bypassed", now_ms)
        self._refund(write, 0)
        self._release(write, "bypassed")

    def _refund(self, write: Write, blocks: int) -> None:
        """Give back the budget of a batch, but for so many blocks."""
        surplus = write.charged - blocks * self._store.slot_bytes
        if write.charged and surplus:
            assert 0 < surplus <= write.charged, self.flying.story(write)
            self.budget.give_back(surplus)
            write.charged -= surplus

    def lease_failed(self, write_id: int, reason: str, now_ms: int) -> None:
        """Try again what the host tier did not answer, and drop what it refused."""
        write = self.flying.find(write_id)
        assert not write.slots, self.flying.story(write)
        self._refund(write, 0)
        if reason in UNANSWERED:
            self._try_again(write, write.names, reason, now_ms)
        else:
            self._retries.good()
            self._abort(write, "refused", reason, now_ms)

    def _try_again(
        self, write: Write, names: Sequence[SequenceHash], reason: str, now_ms: int
    ) -> None:
        """Try again behind all others: a block without an answer delays no other."""
        self._inventory.abort(write.slots)
        again = self._retries.unanswered(names, now_ms)
        self._counts[f"dropped.write_{reason}"] += len(names) - len(again)
        self._not_written(set(names).difference(again), reason, now_ms)
        self._counts["write_retries"] += len(again)
        self._retries.forget(set(write.names).difference(again))
        self.flying.move(write, "unanswered")
        for name in again:
            self.pending.add(name, write.instance, now_ms)

    def written(self, write_id: int, lost: Sequence[int], now_ms: int) -> None:
        """Give the lease back: the bytes are in the store, but for some."""
        write = self.flying.find(write_id)
        assert all(0 <= index < len(write.slots) for index in lost), (
            f"{lost}: {self.flying.story(write)}"
        )
        self._counts["dropped.write_lost"] += len(lost)
        if lost:
            self._inventory.abort(write.slots[index] for index in lost)
            write.slots = [one for index, one in enumerate(write.slots) if index not in lost]
        self._size.ended(now_ms - write.started_ms)
        self._breaker.ended(write.started_ms, now_ms, failed=False)
        self._release(write, "written")

    def write_failed(self, write_id: int, reason: str, now_ms: int) -> None:
        """Drop a failed batch: which part of it arrived is not known."""
        write = self.flying.find(write_id)
        assert write.slots, self.flying.story(write)
        if reason != STALE_ARENA:
            self._breaker.ended(write.started_ms, now_ms, failed=True)
        self._counts[f"dropped.write_{reason}"] += len(write.slots)
        self._not_written([block.hash for _, block in write.slots], reason, now_ms)
        self._inventory.abort(write.slots)
        write.slots = []
        self._release(write, "write failed")

    def _release(self, write: Write, event: str) -> None:
        self.flying.move(write, event)
        self._outbox.emit(ReleaseHost(write.id, write.instance, write.lease))

    def released(self, event: Released, now_ms: int) -> None:
        """Believe the bytes, if the lease held all the time, or they were compared."""
        write, verified = self.flying.find(event.write), self._store.kind.verifies_writes
        if not write.slots:
            self._end(write, "nothing written")
        elif not event.answered and not verified:
            names = [block.hash for _, block in write.slots]
            self._try_again(write, names, "lease_lost", now_ms)
        elif not event.valid and not verified:
            self._abort(write, "lease lost", "lease_lost", now_ms)
        else:
            write.released_ms = now_ms
            self.flying.move(write, "held")

    def _record(self, now_ms: int) -> None:
        """Record what is released: at once if nothing follows, else together with what does.

        A disk is slower while it flushes, and one flush is for all that was written before it.
        """
        released, phases = self.flying.in_phase(Phase.RELEASED), self.flying.phases
        follows = phases[Phase.WRITING] or phases[Phase.RELEASING]
        if follows and self._store.kind.sized:
            oldest_ms = min(write.released_ms for write in released)
            if now_ms < oldest_ms + self._limits.journal_wait_ms:
                return
        assert all(write.slots for write in released), "a batch without blocks is not recorded"
        for write in released:
            self.flying.move(write, "record")
            self._journal.committed(write.id, write.slots)

    def journaled(self, write_ids: Sequence[int]) -> None:
        """Commit and announce what is durable, data and records."""
        writes = [self.flying.find(write_id) for write_id in write_ids]
        blocks = self._inventory.commit(write.slots for write in writes)
        for write in writes:
            self._end(write, "journaled")
        by_mode = "offload_blocks_d2d" if self._arenas.staging else "offload_blocks_h2d"
        self._counts[self._store.kind.offloaded or by_mode] += len(blocks)
        self._counts["bytes.written"] += self._store.bytes_of(blocks)
        self._counts["bytes.payload"] += sum(block.bytes for block in blocks)

    def journal_failed(self, write_id: int, reason: str, now_ms: int) -> None:
        """Take the records of a batch back: whether they are in the journal is not known."""
        write = self.flying.find(write_id)
        entries = write.slots
        assert entries, self.flying.story(write)
        self._breaker.ended(now_ms, now_ms, failed=True)
        self._abort(write, "journal failed", reason, now_ms)
        self._journal.removed(entries)

    def _abort(self, write: Write, event: str, reason: str, now_ms: int) -> None:
        assert reason, "a write ends early for a reason"
        self._counts[f"dropped.write_{reason}"] += len(write.slots or write.names)
        self._not_written(write.names, reason, now_ms)
        self._inventory.abort(write.slots)
        self._end(write, event)

    def _not_written(self, names: Iterable[SequenceHash], reason: str, now_ms: int) -> None:
        """Remember why blocks are not here, to explain a miss."""
        assert reason, "blocks are not written for a reason"
        self._departures.note(names, "not_written", now_ms, detail=reason)

    def _end(self, write: Write, event: str) -> None:
        if self._retries.tries:
            self._retries.forget(write.names)
        self.flying.move(write, event)

    # --- questions --------------------------------------------------------------------------

    def committing(self) -> list[tuple[int, Block]]:
        """Return slots and blocks whose record is on its way into the journal."""
        writes = self.flying.in_phase(Phase.JOURNALING)
        return [entry for write in writes for entry in write.slots]

    def staged_slots(self) -> set[int]:
        """Return every slot that a write has staged, for `check`."""
        return {slot for write in self.flying.by_id.values() for slot, _ in write.slots}

    def check(self) -> None:
        """Assert every invariant of the writes."""
        limits, phases = self._limits, self.flying.phases
        assert len(phases[Phase.WRITING]) <= limits.writes_max + limits.ahead_batches
        assert len(phases[Phase.LEASING]) + len(phases[Phase.LEASED]) <= limits.writes_max
        writes_max = 2 * limits.writes_max + limits.ahead_batches + limits.commits_max
        assert len(self.flying.by_id) <= writes_max
        self.flying.check()
        self.pending.check()
        assert not self.flying.names & self.pending.waiting.keys()
        assert len(self._retries.tries) <= len(self.pending.waiting) + len(self.flying.names)
