"""The frequency filter: a block is written to disk when it was wanted before.

KVBM's rule (docs: `DYN_KVBM_DISABLE_DISK_OFFLOAD_FILTER`): a new block counts 1; each time it is
seen again its count doubles; a count loses 1 with every decay step, and at 0 the block is new; a
block passes at a count of 2 or more. Operators may change the numbers while it runs.

Four things differ. A step is four hours, not ten minutes: agents pause for longer than that. The
steps of a count begin with its last sight. Counts have a bound. Beyond `entries_max` blocks, those
not seen for longest are forgotten.
"""

from __future__ import annotations

from kvbm_common.identity import SequenceHash
from kvbm_common.tier.name_history import NameHistory, entries_for

PASS_COUNT = 2
DECAY_STEP_MS = 4 * 3600 * 1000
"""Longer brings nothing more with pauses of two hours: see `benchmarks/admission.py`."""
SIGHTS_MAX = 1_000_000
SIGHTS_MIN = 16_384
COUNT_MAX = 4
"""One doubling above what is needed to pass. Stored blocks are not counted, so a higher count would
only measure failed writes."""
PASS_COUNT_MAX = (1 << 20) - 1


def sights_for(slot_count: int) -> int:
    """Return how many blocks are noted for a store with so many slots."""
    return entries_for(slot_count, SIGHTS_MIN, SIGHTS_MAX)


class FrequencyFilter:
    """Counts how often blocks were seen lately. Pure: every question comes with the time."""

    def __init__(self, *, enabled: bool = True, entries_max: int = SIGHTS_MAX) -> None:
        assert entries_max > 0, entries_max
        self.enabled = enabled
        self._limit = entries_max
        self.pass_count = PASS_COUNT
        self.decay_ms = DECAY_STEP_MS
        self._sights = NameHistory(entries_max)
        """Each block's value is its count at its last sight."""

    @property
    def entries_max(self) -> int:
        """The number of blocks that are noted, at most."""
        return self._sights.entries_max

    def __len__(self) -> int:
        """Return how many blocks are noted, with those whose count has decayed to 0."""
        return len(self._sights)

    def size_for(self, slot_count: int) -> None:
        """Note as many blocks as a store with so many slots needs; if these are fewer than it has
        noted, begin again."""
        assert slot_count > 0, f"a store with {slot_count} slots"
        entries_max = min(self._limit, sights_for(slot_count))
        if len(self) > entries_max:
            self._sights = NameHistory(entries_max)
        self._sights.resize(entries_max)

    def change(self, *, enabled: bool | None, pass_count: int | None, decay_ms: int | None) -> None:
        """Change the numbers; None leaves one as it is. Sights stay, also while it is off."""
        assert pass_count is None or 1 <= pass_count <= PASS_COUNT_MAX, pass_count
        assert decay_ms is None or decay_ms >= 1
        self.enabled = self.enabled if enabled is None else enabled
        self.pass_count = pass_count or self.pass_count
        self.decay_ms = decay_ms or self.decay_ms

    def count(self, block: SequenceHash, now_ms: int) -> int:
        """Return how much a block counts now; 0: it was not seen lately."""
        sight = self._sights.get(block)
        if sight is None:
            return 0
        seen_ms, count = sight
        assert count > 0, f"{block.hex()} was noted without a sight"
        return max(0, count - (now_ms - seen_ms) // self.decay_ms)

    def see(self, block: SequenceHash, now_ms: int) -> bool:
        """Count one sight of a block; True: it deserves the disk."""
        if not self.enabled:
            return True
        count = min(2 * self.count(block, now_ms), max(COUNT_MAX, self.pass_count)) or 1
        self._sights.note(block, now_ms, count)
        assert len(self) <= self.entries_max, f"{len(self)} of {self.entries_max} are noted"
        return count >= self.pass_count
