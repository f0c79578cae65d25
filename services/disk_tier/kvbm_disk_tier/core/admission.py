"""Admission: which of the blocks that a host tier tells of deserve a write by this instance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from kvbm_common.identity import SequenceHash

from kvbm_disk_tier.core.frequency_filter import FrequencyFilter
from kvbm_disk_tier.core.shards import Shards


class Admission:
    """The frequency filter behind the shards: other instances count and write their own."""

    def __init__(
        self, frequency_filter: FrequencyFilter, shards: Shards, counts: Counter[str]
    ) -> None:
        self.filter = frequency_filter
        self.shards = shards
        self._counts = counts
        counts["filtered_blocks"] += 0

    def chosen(self, names: Sequence[SequenceHash], *, staging: bool) -> Sequence[SequenceHash]:
        """Return the blocks that deserve the disk. `staging`: they are nowhere else."""
        if not self.shards.is_alone:
            names = self.shards.owned(names)
        if staging or not self.filter.enabled:
            return names
        passing = [name for name in names if self.filter.see(name)]
        assert len(passing) <= len(names)
        self._counts["filtered_blocks"] += len(names) - len(passing)
        return passing

    def uncounted(self, names: Iterable[SequenceHash]) -> list[SequenceHash]:
        """Return those that the filter does not know.

        A snapshot repeats what events have told: one sight must not count twice.
        """
        return [name for name in names if name not in self.filter]
