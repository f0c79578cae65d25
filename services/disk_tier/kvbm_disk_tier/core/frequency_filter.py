"""The frequency filter: a block is written to disk when it was wanted before.

KVBM's filter exactly (docs: `DYN_KVBM_DISABLE_DISK_OFFLOAD_FILTER`): a new block counts 1; each
time it is seen again its count doubles; every decay step takes 1 off all counts and drops those
that reach 0; a block passes at a count of 2 or more. Over `entries_max` the decay step is repeated
until the map fits. Operators may change the numbers while it runs.
"""

from __future__ import annotations

from kvbm_common.identity import SequenceHash

PASS_COUNT = 2
DECAY_STEP_MS = 600_000
ENTRIES_MAX = 1_000_000
COUNT_MAX = 1 << 62
"""KVBM's counts saturate in an i64."""


class FrequencyFilter:
    """Counts how often blocks were seen. Pure: time comes in with `decay_until`."""

    def __init__(self, *, enabled: bool = True, entries_max: int = ENTRIES_MAX) -> None:
        assert entries_max > 0
        self.enabled = enabled
        self.entries_max = entries_max
        self.pass_count = PASS_COUNT
        self.decay_ms = DECAY_STEP_MS
        self._counts: dict[SequenceHash, int] = {}
        self._next_decay_ms: int | None = None

    def __len__(self) -> int:
        return len(self._counts)

    def __contains__(self, block: SequenceHash) -> bool:
        return block in self._counts

    def change(self, *, enabled: bool | None, pass_count: int | None, decay_ms: int | None) -> None:
        """Change the numbers; None leaves one as it is. Counts stay, also while it is off."""
        assert pass_count is None or pass_count >= 1
        assert decay_ms is None or decay_ms >= 1
        self.enabled = self.enabled if enabled is None else enabled
        self.pass_count = pass_count or self.pass_count
        if decay_ms is not None:
            self.decay_ms, self._next_decay_ms = decay_ms, None  # A whole step from now on.

    def count(self, block: SequenceHash) -> int:
        """Return how much a block counts now; 0: it was not seen lately."""
        return self._counts.get(block, 0)

    def see(self, block: SequenceHash) -> bool:
        """Count one sight of a block; True: it deserves the disk."""
        if not self.enabled:
            return True
        count = self._counts.get(block)
        count = 1 if count is None else min(2 * count, COUNT_MAX)
        self._counts[block] = count
        while len(self._counts) > self.entries_max:
            self._decay()
        return count >= self.pass_count

    def decay_until(self, now_ms: int) -> None:
        """Do the decay steps that are due."""
        assert self.decay_ms > 0
        if self._next_decay_ms is None:
            self._next_decay_ms = now_ms + self.decay_ms
        while now_ms >= self._next_decay_ms:
            self._decay()
            self._next_decay_ms += self.decay_ms

    def _decay(self) -> None:
        self._counts = {block: count - 1 for block, count in self._counts.items() if count > 1}
