"""Pending blocks: the admission to the disk, the queue of writes, and the size of a batch.

    announced by a host tier → admission → queue, oldest first → the next batch, of one arena

The faster the disk, the larger a batch. A batch waits for the write budget. Blocks whose host tier
has not answered go back into the queue, after all others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import islice

from kvbm_common.errors import BusUnavailable, DeadlineExceeded, NoResponder
from kvbm_common.identity import SequenceHash
from kvbm_common.tier.blocks import Block
from kvbm_common.tier.breaker import Breaker
from kvbm_common.tier.departures import Departures
from kvbm_common.tier.layout import UNIT_BYTES
from kvbm_common.tier.tenants import Tenants, shares_of
from kvbm_common.wire.verbs import ArenaReply

from kvbm_disk_tier.core.broken_chains import BrokenChains
from kvbm_disk_tier.core.frequency_filter import FrequencyFilter
from kvbm_disk_tier.core.host_arenas import HostArenas
from kvbm_disk_tier.core.limits import Means
from kvbm_disk_tier.core.shards import Shards
from kvbm_disk_tier.core.store_status import StoreStatus
from kvbm_disk_tier.core.write_batch import Batch
from kvbm_disk_tier.core.write_budget import WriteBudget
from kvbm_disk_tier.core.write_queue import Origin, WriteQueue

SCAN_MAX = 256
"""Blocks that are searched for a batch, whose blocks are of one host tier and one size."""
TRIES_MAX = 20
"""Tries until a block is given up: with the breaker's pauses, a quarter of an hour."""
UNANSWERED = (BusUnavailable.code, DeadlineExceeded.code, NoResponder.code)
"""Failures that are worth another try: any other would come again."""
FAST_MS = 100
"""A batch that took no longer, with the wait for earlier ones, may be followed by one of twice
the size."""
SLOW_MS = 250
"""A batch that took longer is followed by one of half the size."""
BATCH_BYTES_MAX = 64 * 1024 * 1024
"""Four times what a fast disk writes in the time that any batch costs: see `BatchSize`."""
ARENA_SHARE = 32
"""A batch pins at most 1/32 of a host tier's memory, but at least one transfer."""
DROPPED_MAX = 65_536
"""Dropped blocks whose children are not written, 200 bytes each."""
CUT_OFF = "a block before it was not written"
GONE = "it had left host memory when its turn came"
FULL = "too many blocks were waiting"
OVERLOAD = (CUT_OFF, GONE, FULL)
"""Reasons that mean that the disk is too slow; others say nothing about the next block."""


class Admission:
    """The frequency filter behind the shards: other instances count and write their own."""

    def __init__(
        self, frequency_filter: FrequencyFilter, shards: Shards, counts: Counter[str]
    ) -> None:
        self.filter = frequency_filter
        self.shards = shards
        self._counts = counts
        counts["filtered_blocks"] += 0

    def chosen(
        self, names: Sequence[SequenceHash], now_ms: int, *, staging: bool
    ) -> Sequence[SequenceHash]:
        """Return the blocks that are to be written. `staging`: they exist nowhere else."""
        if not self.shards.is_alone:
            names = self.shards.owned(names)
        if staging or not self.filter.enabled:
            return names
        passing = [name for name in names if self.filter.see(name, now_ms)]
        assert len(passing) <= len(names), f"{len(passing)} of {len(names)} blocks pass"
        self._counts["filtered_blocks"] += len(names) - len(passing)
        return passing

    def uncounted(self, names: Iterable[SequenceHash], now_ms: int) -> list[SequenceHash]:
        """Return the names that the filter does not know.

        A snapshot repeats what events said: one use must not count twice.
        """
        return [name for name in names if not self.filter.count(name, now_ms)]


class BatchSize:
    """The number of transfers in a batch: it follows the disk between one and `most`.

    Lease, release, record and announcement cost the same for any batch, together more than a fast
    disk takes to write 16 MiB. On a slow disk a large batch would only wait, and so would its
    lease.
    """

    def __init__(self, most: int) -> None:
        assert most > 0, most
        self.transfers = 1
        self._most = most

    def ended(self, took_ms: int) -> None:
        """Follow a batch that is on disk, so long after it was handed over."""
        assert took_ms >= 0, f"a batch took {took_ms} ms"
        if took_ms <= FAST_MS:
            self.transfers = min(2 * self.transfers, self._most)
        elif took_ms > SLOW_MS:
            self.transfers = max(1, self.transfers // 2)

    def blocks(self, arena: ArenaReply, store: StoreStatus, block_bytes: int) -> int:
        """Return how many blocks of one size are leased, written and recorded together at most."""
        transfer = store.transfer_of.get(block_bytes) or store.transfer_blocks(block_bytes)
        if not store.kind.sized:
            return transfer
        slot_bytes = -(-block_bytes // UNIT_BYTES) * UNIT_BYTES
        in_arena = arena.slot_count * arena.slot_bytes // slot_bytes
        most = BATCH_BYTES_MAX // block_bytes
        size = min(self.transfers * transfer, most, in_arena // ARENA_SHARE)
        return max(size, transfer)


class Retries(Breaker):
    """The breaker of the host tiers' answers, with the tries of each block that has failed.

    NATS may be away for minutes, and a request then fails at once. Without a pause, all blocks in
    the queue would use up their tries within a moment.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tries: dict[SequenceHash, int] = {}

    def unanswered(self, names: Sequence[SequenceHash], now_ms: int) -> list[SequenceHash]:
        """Note a failed request for these blocks; returns those that may be tried again."""
        assert names, "a host tier is asked for blocks"
        self.trouble(now_ms)
        again: list[SequenceHash] = []
        for name in names:
            self.tries[name] = self.tries.get(name, 0) + 1
            if self.tries[name] < TRIES_MAX:
                again.append(name)
            else:
                del self.tries[name]
        return again

    def forget(self, names: Iterable[SequenceHash]) -> None:
        """Forget blocks that are done, or dropped for another reason."""
        for name in names:
            self.tries.pop(name, None)


class PendingBlocks:
    """The blocks that wait to be written, and where each came from."""

    def __init__(
        self,
        *,
        admission: Admission,
        budget: WriteBudget,
        store: StoreStatus,
        arenas: HostArenas,
        departures: Departures,
        means: Means,
    ) -> None:
        self.waiting = WriteQueue(Tenants(shares_of(means.limits.tenant_shares)))
        self.admission = admission
        self.budget = budget
        self.retries = Retries()
        self.chains = BrokenChains(DROPPED_MAX)
        self.size = BatchSize(means.limits.batch_transfers_max)
        self._store = store
        self._arenas = arenas
        self._departures = departures
        self._limits, self._counts = means.limits, means.counts

    def add(
        self, name: SequenceHash, origin: Origin, now_ms: int, parent: SequenceHash | None = None
    ) -> None:
        """Queue a block after all others, if there is room and it could be reached on disk.

        When the queue is full the newest block is refused: older ones may be its parents.
        """
        assert name not in self.waiting, f"{name.hex()} waits already"
        if not self.waiting and self.chains.dropped:
            self.chains.forget()  # The queue is empty: the disk keeps up again.
        is_full = len(self.waiting) >= self._limits.pending_max
        if not (is_full or self.chains.dropped) or self._has_room(name, origin, now_ms, parent):
            self.waiting.add(name, origin)
            self.chains.note_waiting(name, parent)

    def _has_room(
        self, name: SequenceHash, origin: Origin, now_ms: int, parent: SequenceHash | None
    ) -> bool:
        """Tell whether a block may wait although the disk is overloaded, or drop it."""
        parent = self.chains.known_parent(name, parent)
        if len(self.waiting) >= self._limits.pending_max and not self.is_cut_off(parent):
            self._drop_for(origin, now_ms)
        if not self.is_cut_off(parent) and len(self.waiting) < self._limits.pending_max:
            return True
        self.retries.forget([name])
        if self.is_cut_off(parent):
            self.cut_off([name], now_ms)
        else:
            self._counts["dropped.write_pending_full"] += 1
            self.not_written([name], FULL, now_ms)
        self.chains.note_dropped(name, parent)
        return False

    def _drop_for(self, origin: Origin, now_ms: int) -> None:
        """Drop a block of a tenant that has more of the queue for its weight."""
        dropped = self.waiting.newest_of_fullest(origin)
        if dropped is not None:
            self._drop_full(dropped, now_ms)

    def _drop_full(self, name: SequenceHash, now_ms: int) -> None:
        self.waiting.remove(name)
        self.retries.forget([name])
        self._counts["dropped.write_pending_full"] += 1
        self.not_written([name], FULL, now_ms)

    def put_back(
        self, names: Sequence[SequenceHash], origin: Origin,
        parents: Mapping[SequenceHash, SequenceHash], now_ms: int, *, first: bool,
    ) -> None:  # fmt: skip
        """Queue the blocks of a batch again that could not be written, `first` or after others.

        In front they keep their order, and the newest blocks make room: these may be children.
        """
        if not first:
            for name in names:
                self.add(name, origin, now_ms, parents.get(name))
        for name in reversed(names) if first else ():
            if self.is_cut_off(parents.get(name)):
                self.retries.forget([name])
                self._counts["dropped.write_cut_off"] += 1
                self.not_written([name], CUT_OFF, now_ms)
                continue
            if len(self.waiting) >= self._limits.pending_max:
                self._drop_full(self.waiting.newest(), now_ms)
            self.waiting.put_back(name, origin, origin.block_bytes)
            self.chains.note_waiting(name, parents.get(name))

    def is_cut_off(self, parent: SequenceHash | None) -> bool:
        """Tell whether a child of this block is not worth a write: no lookup could reach it.

        Blocks of a staging arena are always written: the arena cannot evict them before.
        """
        return self.chains.is_cut_off(parent) and not self._arenas.staging

    def reachable(
        self, leased: Sequence[tuple[Block, int]], now_ms: int
    ) -> list[tuple[Block, int]]:
        """Return the blocks whose parents are not dropped, and drop the others; parents first."""
        if not self.chains.dropped:
            return list(leased)
        kept: list[tuple[Block, int]] = []
        for block, slot in leased:
            if self.is_cut_off(block.parent):
                self.not_written([block.hash], CUT_OFF, now_ms)
                self._counts["dropped.write_cut_off"] += 1
            else:
                kept.append((block, slot))
        return kept

    def cut_off(self, names: Sequence[SequenceHash], now_ms: int) -> None:
        """Count blocks that are not written because a block before them was not."""
        self._counts["dropped.write_cut_off"] += len(names)
        self._departures.note(names, "not_written", now_ms, detail=CUT_OFF)

    def take_batch(self, now_ms: int) -> Batch | None:
        """Take the oldest blocks of one tenant, arena and size.

        None: there is no budget for them now, or no arena. Blocks whose arena is not known go to
        the end of the queue.
        """
        for queue in self.waiting.turns():
            found = self._oldest(queue)
            if found is not None:
                return self._taken(*found, now_ms)
        return None

    def _oldest(
        self, queue: Mapping[SequenceHash, Origin]
    ) -> tuple[ArenaReply, list[SequenceHash], Origin] | None:
        """Return the oldest blocks of a queue that are of one arena and size."""
        assert queue, "a tenant without blocks has no turn"
        chosen: ArenaReply | None = None
        most = size = 0
        first = Origin("")
        names: list[SequenceHash] = []
        for name, origin in list(islice(queue.items(), SCAN_MAX)):
            arena = self._arenas.lenders.get(origin.instance)
            arena = arena or self._arenas.substitute(origin.instance)
            if arena is None:
                self.waiting.move_to_end(name)
                continue
            if chosen is None:
                chosen, size = arena, origin.block_bytes or _largest(arena)
                first = Origin(arena.instance, size, origin.namespace)
                most = self.size.blocks(arena, self._store, size)
            if arena.epoch == chosen.epoch and size == (origin.block_bytes or _largest(arena)):
                names.append(name)
                if len(names) == most:
                    break
        assert (chosen is None) == (not names), f"{len(names)} blocks of arena {chosen}"
        assert len(names) <= most, f"{len(names)} blocks in a batch of {most}"
        return None if chosen is None else (chosen, names, first)

    def _taken(
        self, arena: ArenaReply, names: list[SequenceHash], origin: Origin, now_ms: int
    ) -> Batch | None:
        """Take these blocks out of the queue; None: the budget has not enough for them yet."""
        assert names, f"no blocks are taken of {origin}"
        charged, layout = 0, self._store.layout
        if self.budget.bytes_per_day and layout is not None:
            slot_bytes = layout.slot_bytes_of(origin.block_bytes)
            del names[self.budget.blocks_at_once(slot_bytes) :]
            charged = len(names) * slot_bytes
        if charged and not self.budget.take(charged, now_ms):
            return None
        self.waiting.take(names, len(names) * origin.block_bytes)
        parents = {name: self.chains.note_left_queue(name) for name in names}
        known = {name: parent for name, parent in parents.items() if parent is not None}
        self.retries.start()
        return Batch(arena, names, origin, charged, known)

    def gone(self, names: Iterable[SequenceHash], instance: str, now_ms: int) -> None:
        """Drop blocks that have left this host tier: they cannot be leased any more."""
        left = [name for name in names if self._is_of(name, instance)]
        for name in left:
            self.chains.note_left_queue(name)
            self.waiting.remove(name)
        self.retries.forget(left)
        self._counts["dropped.write_gone"] += len(left)
        self.not_written(left, GONE, now_ms)

    def _is_of(self, name: SequenceHash, instance: str) -> bool:
        origin = self.waiting.get(name)
        return origin is not None and origin.instance == instance

    def found(self, names: Iterable[SequenceHash]) -> None:
        """Drop blocks that are in the store without a write of ours."""
        for name in names:
            self.chains.note_stored(name)
            if name in self.waiting:
                self.waiting.remove(name)
                self.retries.forget([name])

    def forget(self, reason: str, now_ms: int) -> None:
        """Drop all of them: nothing new is begun."""
        names = list(self.waiting)
        self._counts[f"dropped.write_{reason}"] += len(names)
        self.waiting.clear()
        self.retries.forget(names)
        self.not_written(names, reason, now_ms)

    def not_written(self, names: Collection[SequenceHash], reason: str, now_ms: int) -> None:
        """Remember why these blocks are not here, and drop what waits below them if the disk has
        no time for so many."""
        assert reason, "blocks are not written for a reason"
        assert self.waiting.keys().isdisjoint(names), f"blocks wait: {reason}"
        self._departures.note(names, "not_written", now_ms, detail=reason)
        if reason not in OVERLOAD or self._arenas.staging:
            for name in names:
                self.chains.note_left_queue(name)
            return
        below = [name for name in self.chains.descendants(names) if name in self.waiting]
        for name in (*names, *below):
            self.chains.note_dropped(name)
            self.chains.note_left_queue(name)
            if name in self.waiting:
                self.waiting.remove(name)
        self.retries.forget(below)
        self.cut_off(below, now_ms)

    def writers_changed(self) -> None:
        """Forget what was dropped here: another instance may write it from now on."""
        self.chains.forget()

    def check(self) -> None:
        """Assert that the queue is bounded."""
        assert len(self.waiting) <= self._limits.pending_max
        self.waiting.check()
        self.chains.check(self.waiting)


def _largest(arena: ArenaReply) -> int:
    """Return the length of the longest slots of an arena: all have it, or no size was said."""
    return max(arena.sizes, default=arena.slot_bytes)
