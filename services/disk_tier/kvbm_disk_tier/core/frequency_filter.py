"""The frequency filter: a block is written to disk when it was wanted before.

KVBM's rule (docs: `DYN_KVBM_DISABLE_DISK_OFFLOAD_FILTER`): a new block counts 1; each time it is
seen again its count doubles; a count loses 1 with every decay step, and at 0 the block is new; a
block passes at a count of 2 or more. Operators may change the numbers while it runs.

Four things differ. A step is four hours, not ten minutes: agents pause for longer than that. The
steps of a count begin with its last sight. Counts have a bound. Of more than `entries_max` blocks
those are forgotten that were not seen for longest, a few with each sight, so that none costs more:

    young ── full ──► old ── the next young is full ──► dropped, a few entries with each sight
"""

from __future__ import annotations

from kvbm_common.identity import SequenceHash

PASS_COUNT = 2
DECAY_STEP_MS = 4 * 3600 * 1000
"""Longer brings nothing more with pauses of two hours: see `benchmarks/admission.py`."""
ENTRIES_MAX = 1_000_000
ENTRY_BYTES = 175
"""Measured. Of the blocks that fit, the last half is always known."""
ENTRIES_MIN = 16_384
SLOTS_TIMES = 8
"""Sights of so many times the store's blocks are kept, between these two numbers."""
COUNT_MAX = 4
"""A sight more than a pass needs. A block that is here is not counted: more would only say how
often its writes have failed."""
DROPPED_PER_SIGHT = 2
"""Entries that are freed with one sight: `old` is empty long before the next one replaces it."""
_COUNT_BITS = 20
"""Bits of an entry that count; above them is the time of the last sight."""


def entries_for(slot_count: int) -> int:
    """Return how many blocks are noted for a store with so many slots."""
    return min(ENTRIES_MAX, max(ENTRIES_MIN, SLOTS_TIMES * slot_count))


class FrequencyFilter:
    """Counts how often blocks were seen lately. Pure: every question comes with the time."""

    def __init__(self, *, enabled: bool = True, entries_max: int = ENTRIES_MAX) -> None:
        assert entries_max >= 2, entries_max
        self.enabled = enabled
        self._limit = entries_max
        self.entries_max = entries_max
        self.pass_count = PASS_COUNT
        self.decay_ms = DECAY_STEP_MS
        self._young: dict[SequenceHash, int] = {}
        self._old: dict[SequenceHash, int] = {}
        self._dropped: dict[SequenceHash, int] = {}

    def __len__(self) -> int:
        """Return how many blocks are noted, with those whose count has decayed to 0."""
        return len(self._young) + len(self._old)

    def size_for(self, slot_count: int) -> None:
        """Note as many blocks as a store with so many slots needs; if these are fewer than it has
        noted, begin again."""
        assert slot_count > 0, f"a store with {slot_count} slots"
        self.entries_max = min(self._limit, entries_for(slot_count))
        if len(self) + len(self._dropped) > self.entries_max:
            self._young, self._old, self._dropped = {}, {}, {}

    def change(self, *, enabled: bool | None, pass_count: int | None, decay_ms: int | None) -> None:
        """Change the numbers; None leaves one as it is. Sights stay, also while it is off."""
        assert pass_count is None or 1 <= pass_count < 1 << _COUNT_BITS, pass_count
        assert decay_ms is None or decay_ms >= 1
        self.enabled = self.enabled if enabled is None else enabled
        self.pass_count = pass_count or self.pass_count
        self.decay_ms = decay_ms or self.decay_ms

    def count(self, block: SequenceHash, now_ms: int) -> int:
        """Return how much a block counts now; 0: it was not seen lately."""
        entry = self._young.get(block) or self._old.get(block)
        if entry is None:
            return 0
        seen_ms, count = entry >> _COUNT_BITS, entry & (1 << _COUNT_BITS) - 1
        assert count > 0, f"{block.hex()} was noted without a sight"
        return max(0, count - (now_ms - seen_ms) // self.decay_ms)

    def see(self, block: SequenceHash, now_ms: int) -> bool:
        """Count one sight of a block; True: it deserves the disk."""
        if not self.enabled:
            return True
        count = min(2 * self.count(block, now_ms), max(COUNT_MAX, self.pass_count)) or 1
        self._make_room(block)
        self._young[block] = now_ms << _COUNT_BITS | count
        for _ in range(min(DROPPED_PER_SIGHT, len(self._dropped))):
            self._dropped.popitem()
        return count >= self.pass_count

    def _make_room(self, block: SequenceHash) -> None:
        """Take a block that is noted elsewhere out of there; a full `young` becomes `old`."""
        if block in self._young:
            return
        self._old.pop(block, None)
        if len(self._young) >= self.entries_max // 2:
            assert not self._dropped, f"{len(self._dropped)} entries wait to be freed"
            self._dropped, self._old, self._young = self._old, self._young, {}
