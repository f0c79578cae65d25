"""What became of blocks that a host tier misses, as this tier knows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvbm_common.identity import SequenceHash
from kvbm_common.tier.breaker import Breaker, BreakerState
from kvbm_common.tier.departures import Departures
from kvbm_common.wire.explain import FateEntry

from kvbm_disk_tier.core.admission import Admission
from kvbm_disk_tier.core.host_arenas import HostArenas
from kvbm_disk_tier.core.inventory import Inventory
from kvbm_disk_tier.core.store import Store
from kvbm_disk_tier.core.writes import Writes


@dataclass(frozen=True, slots=True, kw_only=True)
class Explainer:
    """The reasons why blocks are not read from here. It changes nothing."""

    inventory: Inventory
    departures: Departures
    writes: Writes
    admission: Admission
    store: Store
    breaker: Breaker
    arenas: HostArenas

    def explain(self, names: Sequence[SequenceHash], now_ms: int) -> list[FateEntry]:
        """Return one entry per block; empty for what another instance of this kind writes."""
        owned = set(self.admission.shards.owned(names))
        found = [self._of(name, now_ms, owned=name in owned) for name in names]
        assert len(found) == len(names)
        return found

    def _of(self, name: SequenceHash, now_ms: int, *, owned: bool) -> FateEntry:
        if self.inventory.table.find(name) is not None:
            return FateEntry(why="held")
        if self.writes.is_waiting(name):
            return FateEntry(why="waiting", detail=self._why_it_waits())
        left = self.departures.get(name)
        if left is not None:
            return FateEntry(why=left.why, ago_ms=max(0, now_ms - left.at_ms), detail=left.detail)
        if owned and self.admission.filter.enabled and not self.arenas.staging:
            return FateEntry(why="filtered", detail=self._sights(name))
        return FateEntry(why="")

    def _why_it_waits(self) -> str:
        budget = self.writes.budget
        if self.store.problem:
            return f"the store: {self.store.problem}"
        if self.breaker.state is not BreakerState.CLOSED:
            return "bypassed: it fails or is too slow"
        if budget.bytes_per_day and budget.level <= 0:
            return "the write budget is used up"
        return "its write had not begun or ended"

    def _sights(self, name: SequenceHash) -> str:
        frequency = self.admission.filter
        count = frequency.count(name)
        if not count:
            return "was wanted too long ago to count"
        return f"count {count} of {frequency.pass_count}"
