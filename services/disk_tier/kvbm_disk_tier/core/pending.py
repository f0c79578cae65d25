"""Pending blocks: which of them deserve the disk, how they wait, and how many may go at once.

    told of by a host tier → admission → wait, oldest first → the next batch, of one arena

A batch is the larger, the faster the disk is. It waits for the write budget. What no host tier has
answered for comes back, behind all others.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple

from kvbm_common.errors import BusUnavailable, DeadlineExceeded, NoResponder
from kvbm_common.identity import SequenceHash, hashes_from_hex
from kvbm_common.tier.blocks import CHECKSUM_MAX, Block
from kvbm_common.tier.breaker import Breaker
from kvbm_common.tier.departures import Departures
from kvbm_common.tier.layout import UNIT_BYTES
from kvbm_common.tier.parts import is_divisible
from kvbm_common.wire.slot_entries import LeasedSlot
from kvbm_common.wire.verbs import ArenaReply

from kvbm_disk_tier.core.frequency_filter import FrequencyFilter
from kvbm_disk_tier.core.host_arenas import HostArenas
from kvbm_disk_tier.core.limits import Means
from kvbm_disk_tier.core.shards import Shards
from kvbm_disk_tier.core.store import Store

SCAN_MAX = 256
"""Blocks that are looked at for a batch: it is of one host tier and of one size."""
TRIES_MAX = 20
"""With the breaker's pauses about a quarter of an hour; then a block is given up."""
UNANSWERED = (BusUnavailable.code, DeadlineExceeded.code, NoResponder.code)
"""Reasons that say nothing of the blocks. After any other the same would come again."""
FAST_MS = 100
"""A batch that took no longer, the wait for those before it included, may be followed by one of
twice the size."""
SLOW_MS = 250
"""One that took longer is followed by one of half the size."""
BATCH_BYTES_MAX = 64 * 1024 * 1024
ARENA_SHARE = 32
"""No batch pins more than one part of so many of a host tier's memory, if that is a transfer."""
DAY_MS = 24 * 3600 * 1000
BURST_SHARE = 1 / 24


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
        """Return the blocks that deserve the disk. `staging`: they are nowhere else."""
        if not self.shards.is_alone:
            names = self.shards.owned(names)
        if staging or not self.filter.enabled:
            return names
        passing = [name for name in names if self.filter.see(name, now_ms)]
        assert len(passing) <= len(names), f"{len(passing)} of {len(names)} blocks pass"
        self._counts["filtered_blocks"] += len(names) - len(passing)
        return passing

    def uncounted(self, names: Iterable[SequenceHash], now_ms: int) -> list[SequenceHash]:
        """Return those that the filter does not know.

        A snapshot repeats what events have told: one sight must not count twice.
        """
        return [name for name in names if not self.filter.count(name, now_ms)]


class WriteBudget:
    """The bytes that may be written: an SSD is worn out by writing, so a day has only so many.

    A bucket that holds 1/24 of the budget and fills with the other 23/24 over a day, empty at
    first: in no 24 hours, restarts included, is more written than the budget. A budget of 0 bytes a
    day has no limit.
    """

    def __init__(self, bytes_per_day: int) -> None:
        assert bytes_per_day >= 0, bytes_per_day
        self.bytes_per_day = bytes_per_day
        self.level = 0.0
        """The bytes that may be written at once, as of the last `take`."""
        self._burst = bytes_per_day * BURST_SHARE
        self._per_ms = bytes_per_day * (1 - BURST_SHARE) / DAY_MS
        self._filled_ms: int | None = None

    def take(self, size: int, now_ms: int) -> bool:
        """Take this many bytes from the budget; return False, and take none, if it lacks them.

        A batch larger than the bucket may go when the bucket is full; what it took too much is
        waited for afterwards.
        """
        assert size >= 0, f"{size} bytes are to be written"
        if self.bytes_per_day == 0:
            return True
        self._fill(now_ms)
        if self.level < min(size, self._burst):
            return False
        self.level -= size
        return True

    def settle(self, charged: int, size: int) -> None:
        """Take for what was charged the bytes that it really has: it may be more, or less."""
        if size < charged:
            self.give_back(charged - size)
        else:  # The host tier had not said how large the blocks are.
            self.spend(size - charged)

    def spend(self, size: int) -> None:
        """Take bytes that were written without asking; later ones wait for it."""
        assert size >= 0, f"{size} bytes were written"
        if self.bytes_per_day:
            self.level -= size

    def give_back(self, size: int) -> None:
        """Give back bytes that were not written after all."""
        assert size >= 0, f"{size} bytes were not written"
        if self.bytes_per_day:
            self.level = min(self._burst, self.level + size)

    def _fill(self, now_ms: int) -> None:
        if self._filled_ms is not None and now_ms > self._filled_ms:
            self.level = min(self._burst, self.level + (now_ms - self._filled_ms) * self._per_ms)
        if self._filled_ms is None or now_ms > self._filled_ms:
            self._filled_ms = now_ms
        assert self.level <= self._burst, f"{self.level} bytes in a bucket for {self._burst}"


class BatchSize:
    """How many transfers one batch has: it follows the disk between one and `most`.

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

    def blocks(self, arena: ArenaReply, store: Store, block_bytes: int) -> int:
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

    NATS may be away for seconds or minutes, and says so at once: without a pause everything that
    waits for the disk would be asked for in vain, and forgotten, in a moment.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tries: dict[SequenceHash, int] = {}

    def unanswered(self, names: Sequence[SequenceHash], now_ms: int) -> list[SequenceHash]:
        """Note that these were asked for in vain; returns those that are worth another try."""
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


class Told(NamedTuple):
    """What was told of a block that waits: one object for all that came together."""

    instance: str
    """The host tier that had it."""
    block_bytes: int
    """0: that was not said."""


class PendingBlocks:
    """Block → what was told of it."""

    def __init__(
        self,
        *,
        admission: Admission,
        budget: WriteBudget,
        store: Store,
        arenas: HostArenas,
        departures: Departures,
        means: Means,
    ) -> None:
        self.waiting: OrderedDict[SequenceHash, Told] = OrderedDict()
        self.admission = admission
        self.budget = budget
        self.retries = Retries()
        self.size = BatchSize(means.limits.batch_transfers_max)
        self._store = store
        self._arenas = arenas
        self._departures = departures
        self._limits, self._counts = means.limits, means.counts

    def add(self, name: SequenceHash, told: Told, now_ms: int) -> None:
        """Let a block wait behind all others; the oldest is dropped when there are too many."""
        assert name not in self.waiting, f"{name.hex()} waits already"
        if len(self.waiting) >= self._limits.pending_max:
            oldest, _ = self.waiting.popitem(last=False)
            self.retries.forget([oldest])
            self._counts["dropped.write_pending_full"] += 1
            self.not_written([oldest], "too many blocks were waiting", now_ms)
        self.waiting[name] = told

    def take_batch(self, now_ms: int) -> tuple[ArenaReply, list[SequenceHash], int, int] | None:
        """Take the oldest blocks of one arena and size, the size, and what the budget is charged.

        None: there is no budget for them now, or no arena. Those whose arena is not known wait
        behind.
        """
        chosen: ArenaReply | None = None
        most = size = 0
        names: list[SequenceHash] = []
        for name, told in list(islice(self.waiting.items(), SCAN_MAX)):
            arena = self._arenas.lenders.get(told.instance)
            arena = arena or self._arenas.substitute(told.instance)
            if arena is None:
                self.waiting.move_to_end(name)
                continue
            if chosen is None:
                chosen, size = arena, told.block_bytes or _largest(arena)
                most = self.size.blocks(arena, self._store, size)
            if arena.epoch == chosen.epoch and size == (told.block_bytes or _largest(arena)):
                names.append(name)
                if len(names) == most:
                    break
        assert (chosen is None) == (not names), f"{len(names)} blocks of arena {chosen}"
        assert len(names) <= most, f"{len(names)} blocks in a batch of {most}"
        charged = 0
        if self.budget.bytes_per_day and self._store.layout is not None and names:
            charged = len(names) * self._store.layout.slot_bytes_of(size)
        if chosen is None or (charged and not self.budget.take(charged, now_ms)):
            return None
        for name in names:
            del self.waiting[name]
        self.retries.start()
        return chosen, names, size, charged

    def found(self, names: Iterable[SequenceHash]) -> None:
        """Drop blocks that are in the store without a write of ours."""
        for name in names:
            if name in self.waiting:
                del self.waiting[name]
                self.retries.forget([name])

    def forget(self, reason: str, now_ms: int) -> None:
        """Drop all of them: nothing new is begun."""
        self._counts[f"dropped.write_{reason}"] += len(self.waiting)
        self.not_written(self.waiting, reason, now_ms)
        self.retries.forget(self.waiting)
        self.waiting.clear()

    def not_written(self, names: Iterable[SequenceHash], reason: str, now_ms: int) -> None:
        """Remember why blocks are not here, to explain a miss."""
        assert reason, "blocks are not written for a reason"
        self._departures.note(names, "not_written", now_ms, detail=reason)

    def check(self) -> None:
        """Assert that the queue is bounded."""
        assert len(self.waiting) <= self._limits.pending_max


def _largest(arena: ArenaReply) -> int:
    """Return the length of the longest slots of an arena: all have it, or no size was said."""
    return max(arena.sizes, default=arena.slot_bytes)


def leased_blocks(
    slots: Sequence[LeasedSlot], arena: ArenaReply
) -> tuple[dict[SequenceHash, tuple[Block, int]], int]:
    """Return the blocks of leased slots with their slot, and how many slots cannot be right."""
    sound = [slot for slot in slots if _is_sound(slot, arena)]
    names = hashes_from_hex([slot.hash for slot in sound])
    parents = hashes_from_hex([slot.parent for slot in sound])
    namespaces = {text: bytes.fromhex(text) for text in {slot.namespace for slot in sound}}
    leased: dict[SequenceHash, tuple[Block, int]] = {}
    for slot, name, parent in zip(sound, names, parents, strict=True):
        # The bytes tell the checksums of the parts when they are read: only how it is cut is kept.
        namespace = namespaces[slot.namespace]
        block = Block(name, parent, namespace, slot.checksum, slot.bytes, slot.parts)
        leased[name] = block, slot.slot
    return leased, len(slots) - len(sound)


def _is_sound(slot: LeasedSlot, arena: ArenaReply) -> bool:
    """Tell whether a leased slot can be written and journaled at all."""
    end = slot.slot * arena.slot_bytes + slot.bytes
    inside = slot.bytes > 0 and end <= arena.slot_count * arena.slot_bytes
    inside = inside and (bool(arena.sizes) or slot.bytes <= arena.slot_bytes)
    whole = is_divisible(slot.bytes, slot.parts)
    return inside and whole and 0 <= slot.checksum <= CHECKSUM_MAX
