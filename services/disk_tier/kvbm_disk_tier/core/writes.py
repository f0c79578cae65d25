"""Writes, G2 → G3: blocks are written to disk in batches.

    lease from the host tier → write → release the lease → record in the journal → commit, announce

A block is announced only when its record is in the journal. The disk never waits for the host tier:
batches are leased ahead, as many as may be written at a time. The next batch is written while the
host tier and the journal confirm the last one. `WRITE` has the states of a batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from kvbm_common.identity import SequenceHash, hashes_to_hex
from kvbm_common.tier.slots import Block
from kvbm_common.wire.verbs import LeaseRequest

from kvbm_disk_tier.core.effects import LeaseHost, ReleaseHost, WriteSlots
from kvbm_disk_tier.core.health import Cause, DiskHealth
from kvbm_disk_tier.core.host_arenas import HostArenas
from kvbm_disk_tier.core.inventory import Inventory
from kvbm_disk_tier.core.limits import Means
from kvbm_disk_tier.core.messages import (
    STALE_ARENA,
    Journaled,
    JournalFailed,
    Leased,
    LeaseFailed,
    Released,
    WriteFailed,
    Written,
)
from kvbm_disk_tier.core.pending import GONE, UNANSWERED, PendingBlocks
from kvbm_disk_tier.core.store_status import StoreStatus
from kvbm_disk_tier.core.write_batch import Phase, Write, WritesInFlight, leased_blocks
from kvbm_disk_tier.core.write_queue import Origin


class Writes:
    """All blocks that wait for the disk, and all batches in flight."""

    def __init__(
        self,
        *,
        owner: str,
        ids: Iterator[int],
        pending: PendingBlocks,
        store: StoreStatus,
        health: DiskHealth,
        arenas: HostArenas,
        inventory: Inventory,
        means: Means,
    ) -> None:
        """Start without writes. `owner` is the holder of leases; `ids` numbers writes and reads."""
        assert owner, "leases have an owner"
        self.in_flight = WritesInFlight(inventory.diary)
        self.may_begin = store.kind.sized
        """True if writes may begin; in a bucket only after a first look at what is stored."""
        self.pending = pending
        self._retries = pending.retries
        self._owner = owner
        self._ids = ids
        self._limits, self._counts, self._emit = means.limits, means.counts, means.emit
        self._store = store
        self._health = health
        self._arenas = arenas
        self._inventory = inventory
        self._journal = inventory.journal
        self._share_is_full = False
        """True if the host tier lends no more until one of this tier's leases has ended."""

    # --- admission --------------------------------------------------------------------------

    def consider(
        self,
        names: Sequence[SequenceHash],
        origin: Origin,
        now_ms: int,
        parents: Mapping[SequenceHash, SequenceHash] | None = None,
    ) -> None:
        """Queue those of the blocks that a host tier has named which the admission lets pass.

        `parents`: block → parent, as far as it is known. Blocks that are here, or on their way, are
        not counted by the frequency filter.
        """
        find, waiting = self._inventory.table.find, self.pending.waiting
        in_flight = self.in_flight.names
        absent = [
            name
            for name in names
            if find(name) is None and name not in in_flight and name not in waiting
        ]
        staging = self._arenas.staging
        for name in self.pending.admission.chosen(absent, now_ms, staging=staging):
            if name not in waiting:  # A message may name a block twice.
                parent = parents.get(name) if parents else None
                if parent is not None and find(parent) is not None:
                    self.pending.chains.note_stored(parent)
                self.pending.add(name, origin, now_ms, parent)

    def consider_listed(self, names: Sequence[SequenceHash], origin: Origin, now_ms: int) -> None:
        """Take the blocks of a snapshot, except those that an event has named before."""
        self.consider(self.pending.admission.uncounted(names, now_ms), origin, now_ms)

    def is_waiting(self, name: SequenceHash) -> bool:
        """Tell whether a block is to be written, or being written."""
        return name in self.pending.waiting or name in self.in_flight.names

    # --- the turns --------------------------------------------------------------------------

    def advance(self, now_ms: int, *, beside_reads: bool) -> None:
        """Record released batches, write leased ones, and lease the next ones ahead."""
        if self.in_flight.phases[Phase.RELEASED]:
            self._record(now_ms)
        for write in self.in_flight.in_phase(Phase.LEASED):
            if not self._health.writes:
                self._give_up(write, now_ms)
            elif self._may_write(beside_reads=beside_reads):
                self._begin(write, now_ms)
        while self.pending.waiting and self._health.writes:
            if not (self._may_lease(now_ms, beside_reads=beside_reads) and self._lease(now_ms)):
                break

    def _may_write(self, *, beside_reads: bool) -> bool:
        limits, writing = self._limits, self.in_flight.phases[Phase.WRITING]
        if beside_reads:  # None may wait in the mover: the next read would wait for it.
            return len(writing) < limits.writes_beside_reads_max
        store, by_id = self._store, self.in_flight.by_id
        most = limits.writes_max + (limits.ahead_batches if store.ahead_load else 0)
        load = sum([by_id[write_id].load for write_id in writing])
        return len(writing) < most and load < store.write_load_max + store.ahead_load

    def _may_lease(self, now_ms: int, *, beside_reads: bool) -> bool:
        limits, phases = self._limits, self.in_flight.phases
        fly_max = limits.writes_beside_reads_max if beside_reads else limits.writes_max
        ahead = len(phases[Phase.LEASING]) + len(phases[Phase.LEASED])
        committing = len(self.in_flight.by_id) - ahead - len(phases[Phase.WRITING])
        assert committing >= 0, (
            f"{len(self.in_flight.by_id)} writes, {ahead} of them wait for a turn"
        )
        may_lease = ahead < fly_max and committing < limits.commits_max
        may_lease = may_lease and self.may_begin
        may_lease = may_lease and not (self._share_is_full and self.in_flight.holds_leases())
        may_lease = may_lease and self._retries.allows(now_ms)
        may_lease = may_lease and self._store.works and len(self._arenas.usable) > 0
        return may_lease and self._inventory.table.has_room

    def _lease(self, now_ms: int) -> bool:
        """Lease the next batch; False: none may go now."""
        batch = self.pending.take_batch(now_ms)
        if batch is None:
            return False
        arena, names, origin, charged, parents = batch
        write = Write(next(self._ids), arena.instance, arena.epoch, names, origin, charged, parents)
        self.in_flight.begin(write)
        request = LeaseRequest(
            owner=self._owner, epoch=arena.epoch, hashes=hashes_to_hex(names),
            lease_ms=self._limits.lease_ms,
        )  # fmt: skip
        self._emit(LeaseHost(write.id, arena.instance, request))
        return True

    def leased(self, event: Leased, now_ms: int) -> None:
        """Note that the host tier has leased a batch, which then waits for its turn."""
        write, reply = self.in_flight.find(event.write), event.reply
        assert not write.leased, self.in_flight.story(write)
        over_share = frozenset(reply.over_share)
        later = [name for name in write.names if name.hex() in over_share]
        holds = bool(reply.slots) or self.in_flight.holds_leases()
        if later and not holds:
            self._retries.trouble(now_ms)  # Leases of an earlier life use the share up.
        else:
            self._retries.good()
        write.lease, write.leased = reply.lease, reply.slots
        if later:
            self._share_is_full = True
            self._refund(write, write.charged * (len(write.names) - len(later)) // len(write.names))
            self.in_flight.drop(write, later)
            self.pending.put_back(later, write.origin, write.parents, now_ms, first=holds)
        self.in_flight.move(write, "leased")

    def _begin(self, write: Write, now_ms: int) -> None:
        assert not write.slots, self.in_flight.story(write)
        sources: list[int] = []
        for alike in self._wanted(write, now_ms):
            self._stage(write, alike, now_ms)
            sources += [source for _, source in alike[: len(write.slots) - len(sources)]]
        assert len(sources) == len(write.slots), self.in_flight.story(write)
        blocks = tuple(block for _, block in write.slots)
        if write.charged:
            self._refund(write, write.load)
        if not blocks:
            self._release(write, "nothing left")
            return
        write.started_ms = now_ms
        self.in_flight.move(write, "write")
        targets = self._inventory.table.places([slot for slot, _ in write.slots])
        unit = self._arenas.usable[write.epoch].slot_bytes
        self._emit(WriteSlots(write.id, write.epoch, tuple(sources), tuple(targets), blocks, unit))

    def _stage(self, write: Write, alike: Sequence[tuple[Block, int]], now_ms: int) -> None:
        """Take slots for as many of these blocks of one size as there is room for."""
        size = alike[0][0].bytes
        names, namespace = [block.hash for block, _ in alike], alike[0][0].namespace
        slots = self._inventory.stage(names, size, now_ms, namespace)
        if left := [block.hash for block, _ in alike[len(slots) :]]:
            reason = self._inventory.why_no_room(size)
            self._counts[f"dropped.write_{reason}"] += len(left)
            self.pending.not_written(left, reason, now_ms)
        write.slots += zip(slots, [block for block, _ in alike], strict=False)
        if slots:
            write.load += len(slots) * self._inventory.table.pool.known[size].slot_bytes

    def _wanted(self, write: Write, now_ms: int) -> list[list[tuple[Block, int]]]:
        """Return the leased blocks still to be written, with arena slots, by block size."""
        arena, names = self._arenas.usable.get(write.epoch), write.names
        # Without an arena, the leased slots are in one that is not mapped any more.
        leased, bad = leased_blocks(write.leased, arena) if arena is not None else ({}, 0)
        self._counts["dropped.write_bad_lease"] += bad
        find = self._inventory.table.find  # A listing of the bucket may have found some meanwhile.
        wanted = [leased[name] for name in names if name in leased and find(name) is None]
        if left := [name for name in names if name not in leased and find(name) is None]:
            self._counts["dropped.write_gone"] += max(0, len(left) - bad)
            self.pending.not_written(left, GONE, now_ms)
        wanted = self.pending.reachable(wanted, now_ms)
        sizes = dict.fromkeys([block.bytes for block, _ in wanted])
        return [[one for one in wanted if one[0].bytes == size] for size in sizes]

    def _give_up(self, write: Write, now_ms: int) -> None:
        """Release a batch unwritten: its lease would have ended before the disk is back."""
        assert not write.slots, self.in_flight.story(write)
        self._counts["dropped.write_bypassed"] += len(write.leased)
        self.pending.not_written(write.names, "bypassed", now_ms)
        self._refund(write, 0)
        self._release(write, "bypassed")

    def _refund(self, write: Write, size: int) -> None:
        """Give the budget of a batch back, except `size` bytes."""
        if write.charged:
            self.pending.budget.settle(write.charged, size)
            write.charged = size

    def lease_failed(self, event: LeaseFailed, now_ms: int) -> None:
        """Queue a batch again if the host tier did not answer, or drop it if it was refused."""
        write = self.in_flight.find(event.write)
        assert not write.slots, self.in_flight.story(write)
        self._refund(write, 0)
        if event.reason in UNANSWERED:
            self._try_again(write, write.names, event.reason, now_ms)
        else:
            self._retries.good()
            self._abort(write, "refused", event.reason, now_ms)

    def _try_again(
        self, write: Write, names: Sequence[SequenceHash], reason: str, now_ms: int
    ) -> None:
        """Queue blocks again after all others, so that they delay no other."""
        self._inventory.abort(write.slots)
        again = self._retries.unanswered(names, now_ms)
        self._counts[f"dropped.write_{reason}"] += len(names) - len(again)
        self.pending.not_written(set(names).difference(again), reason, now_ms)
        self._counts["write_retries"] += len(again)
        self._retries.forget(set(write.names).difference(again))
        self.in_flight.move(write, "unanswered")
        for name in again:
            self.pending.add(name, write.origin, now_ms, write.parents.get(name))

    def written(self, event: Written, now_ms: int) -> None:
        """Release the lease of a written batch; the store lacks the blocks in `event.lost`."""
        write, lost = self.in_flight.find(event.write), event.lost
        assert all(index in range(len(write.slots)) for index in lost), self.in_flight.story(write)
        self._counts["dropped.write_lost"] += len(lost)
        if lost:
            names = [write.slots[index][1].hash for index in lost]
            self.pending.not_written(names, "lost", now_ms)
            self._inventory.abort(write.slots[index] for index in lost)
            write.slots = [one for index, one in enumerate(write.slots) if index not in lost]
            write.load = sum(self._inventory.table.slot_bytes(slot) for slot, _ in write.slots)
        self.pending.size.ended(now_ms - write.started_ms)
        if event.failure:
            self._health.trouble(Cause.WRITE, event.failure, now_ms)
        else:
            self._health.good(Cause.WRITE, write.started_ms, now_ms)
        self._release(write, "written")

    def write_failed(self, event: WriteFailed, now_ms: int) -> None:
        """Drop a failed batch: it is not known which of its blocks were written."""
        write, reason = self.in_flight.find(event.write), event.reason
        assert write.slots, self.in_flight.story(write)
        if reason != STALE_ARENA:
            self._health.trouble(Cause.WRITE, event.detail or reason, now_ms)
        self._counts[f"dropped.write_{reason}"] += len(write.slots)
        self.pending.not_written([block.hash for _, block in write.slots], reason, now_ms)
        self._inventory.abort(write.slots)
        write.slots = []
        self._release(write, "write failed")

    def _release(self, write: Write, event: str) -> None:
        self.in_flight.move(write, event)
        self._emit(ReleaseHost(write.id, write.instance, write.lease))

    def released(self, event: Released, now_ms: int) -> None:
        """Keep a batch if its lease held until now, or its bytes were verified."""
        write, verified = self.in_flight.find(event.write), self._store.kind.verifies_writes
        self._share_is_full = self._share_is_full and not write.leased
        if not write.slots:
            self._end(write, "nothing written")
        elif not event.answered and not verified:
            names = [block.hash for _, block in write.slots]
            self._try_again(write, names, "lease_lost", now_ms)
        elif not event.valid and not verified:
            self._abort(write, "lease lost", "lease_lost", now_ms)
        else:
            write.released_ms = now_ms
            self.in_flight.move(write, "held")

    def _record(self, now_ms: int) -> None:
        """Record released batches: at once, or together with batches that follow soon.

        A disk is slower while it flushes, and one flush serves all batches written before it.
        """
        released, phases = self.in_flight.in_phase(Phase.RELEASED), self.in_flight.phases
        follows = phases[Phase.WRITING] or phases[Phase.RELEASING]
        if follows and self._store.kind.sized:
            oldest_ms = min(write.released_ms for write in released)
            if now_ms < oldest_ms + self._limits.journal_wait_ms:
                return
        assert all(write.slots for write in released), "a batch without blocks is not recorded"
        for write in released:
            self.in_flight.move(write, "record")
            write.recorded_ms = now_ms
            self._journal.committed(write.id, write.slots)

    def journaled(self, event: Journaled, now_ms: int) -> None:
        """Commit and announce batches whose data and records are durable."""
        writes = [self.in_flight.find(write_id) for write_id in event.writes]
        blocks = self._inventory.commit((write.slots for write in writes), now_ms)
        for write in writes:
            self._health.good(Cause.JOURNAL, write.recorded_ms, now_ms)
            self._end(write, "journaled")
        by_mode = "offload_blocks_d2d" if self._arenas.staging else "offload_blocks_h2d"
        self._counts[self._store.kind.offloaded or by_mode] += len(blocks)
        payload, sized = sum([block.bytes for block in blocks]), self._store.kind.sized
        self._counts["bytes.written"] += sum([write.load for write in writes]) if sized else payload
        self._counts["bytes.payload"] += payload

    def journal_failed(self, event: JournalFailed, now_ms: int) -> None:
        """Drop a batch whose records may be in the journal, and record its blocks as removed."""
        self._health.trouble(Cause.JOURNAL, event.detail or event.reason, now_ms)
        if event.write is None:
            self._journal.not_removed()
            return
        write = self.in_flight.find(event.write)
        assert write.slots, self.in_flight.story(write)
        self._abort(write, "journal failed", event.reason, now_ms)
        self._journal.removed(write.slots)

    def look_for_stalls(self, now_ms: int) -> None:
        """Report writes that take too long to `DiskHealth`: a stalled disk gives no error."""
        phases = (Phase.WRITING, Phase.JOURNALING)
        in_flight = [write for phase in phases for write in self.in_flight.in_phase(phase)]
        if in_flight:
            started_ms = (write.recorded_ms or write.started_ms for write in in_flight)
            self._health.stalled(min(started_ms), now_ms)

    def _abort(self, write: Write, event: str, reason: str, now_ms: int) -> None:
        assert reason, "a write ends early for a reason"
        self._counts[f"dropped.write_{reason}"] += len(write.slots or write.names)
        self.pending.not_written(write.names, reason, now_ms)
        self._inventory.abort(write.slots)
        self._end(write, event)

    def _end(self, write: Write, event: str) -> None:
        if self._retries.tries:
            self._retries.forget(write.names)
        self.in_flight.move(write, event)

    # --- questions --------------------------------------------------------------------------

    def committing(self) -> list[tuple[int, Block]]:
        """Return slots and blocks whose record is on its way into the journal."""
        writes = self.in_flight.in_phase(Phase.JOURNALING)
        return [entry for write in writes for entry in write.slots]

    def staged_slots(self) -> set[int]:
        """Return every slot that a write has staged, for `check`."""
        return {slot for write in self.in_flight.by_id.values() for slot, _ in write.slots}

    def check(self) -> None:
        """Assert every invariant of the writes."""
        limits, phases = self._limits, self.in_flight.phases
        assert len(phases[Phase.WRITING]) <= limits.writes_max + limits.ahead_batches
        assert len(phases[Phase.LEASING]) + len(phases[Phase.LEASED]) <= limits.writes_max
        writes_max = 2 * limits.writes_max + limits.ahead_batches + limits.commits_max
        assert len(self.in_flight.by_id) <= writes_max
        self.in_flight.check()
        self.pending.check()
        assert not self.in_flight.names & self.pending.waiting.keys()
        assert len(self._retries.tries) <= len(self.pending.waiting) + len(self.in_flight.names)
