"""Departures: when and why blocks left a tier, or did not get into it. They explain a miss.

Blocks that left together share one record. When the table is full, the oldest is forgotten, and
only that it was here is remembered: see `former_blocks.py`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

from kvbm_common.identity import SequenceHash
from kvbm_common.tier.former_blocks import FormerBlocks
from kvbm_common.wire.bounds import Fill

DEPARTURES_MAX = 262_144
"""40 MB when it is full: at 2 MiB a block, half a TiB that has come and gone."""
DEPARTURES_MIN = 4_096
SLOTS_TIMES = 8
"""The departures of so many times the tier's blocks are kept, between these two numbers."""
ENTRY_BYTES = 350
"""What an entry takes that left by itself; blocks that left together share half of it."""


def entries_for(slot_count: int) -> int:
    """Return how many departures a tier with so many slots keeps."""
    assert slot_count > 0, f"a tier with {slot_count} slots"
    return min(DEPARTURES_MAX, max(DEPARTURES_MIN, SLOTS_TIMES * slot_count))


class Departure(NamedTuple):
    """When and why a block left the tier, or was not stored."""

    at_ms: int
    why: str
    detail: str = ""


class Departures:
    """Block → its last departure."""

    def __init__(
        self, entries_max: int = DEPARTURES_MAX, former: FormerBlocks | None = None
    ) -> None:
        """Start empty; `former` keeps the names of departures that are forgotten."""
        assert entries_max > 0
        self.forgotten_ms: int | None = None
        """Departures up to this time may have been forgotten; None: none has been."""
        self.forgotten_count = 0
        self._former = former
        self._entries_max = entries_max
        self._by_block: OrderedDict[SequenceHash, Departure] = OrderedDict()
        """Oldest first. Not a plain dict: finding its first entry walks over all deleted ones,
        0.1 to 0.4 ms for every block once this is full."""

    def __len__(self) -> int:
        return len(self._by_block)

    def size_for(self, slot_count: int) -> None:
        """Keep as many departures as a tier with so many slots needs."""
        self._entries_max = entries_for(slot_count)

    def note(
        self, names: Iterable[SequenceHash], why: str, now_ms: int, *, detail: str = ""
    ) -> None:
        """Note that these blocks have left, or were not stored."""
        assert why, "a departure has a reason"
        by_block, departure = self._by_block, Departure(now_ms, why, detail)
        for name in names:
            by_block.pop(name, None)
            by_block[name] = departure
        while len(by_block) > self._entries_max:
            name, oldest = by_block.popitem(last=False)
            self.forgotten_ms = oldest.at_ms
            self.forgotten_count += 1
            if self._former is not None:
                self._former.note(name, now_ms)
            assert self.forgotten_ms <= now_ms, f"left at {self.forgotten_ms} ms, now {now_ms}"

    def get(self, name: SequenceHash) -> Departure | None:
        """Return when and why a block last left. It may be back."""
        return self._by_block.get(name)

    def fill(self, now_ms: int) -> Fill:
        """Return how full this history is, and how far back it reaches."""
        since_ms = self.forgotten_ms
        reach_s = None if since_ms is None else (now_ms - since_ms) / 1000
        assert reach_s is None or reach_s >= 0, f"forgotten at {since_ms} ms, now {now_ms}"
        return Fill(len(self), self._entries_max, self.forgotten_count, reach_s)

    def knows_none_of(self, names: Iterable[SequenceHash]) -> bool:
        """Return whether no departure of any of these blocks is known."""
        return not self._by_block or self._by_block.keys().isdisjoint(names)
