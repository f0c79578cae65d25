"""Departures: when and why blocks left a tier, or did not get into it. They explain a miss.

Where as many are known as are kept, the oldest is forgotten, and only that it was here is
remembered: see `former_blocks.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvbm_common.identity import SequenceHash
from kvbm_common.tier.former_blocks import FormerBlocks
from kvbm_common.tier.name_history import NameHistory, Noted, entries_for
from kvbm_common.wire.bounds import Usage

DEPARTURES_MAX = 262_144
"""14 MB when it is full: at 2 MiB a block, half a TiB that has come and gone."""
DEPARTURES_MIN = 4_096
REASONS_MAX = 1_024
"""Different reasons at a time; one more is noted as `unknown`."""
UNKNOWN = ("unknown", "")


def departures_for(slot_count: int, chosen: int | None = None) -> int:
    """Return how many departures a tier with so many slots keeps, unless a number is chosen."""
    return entries_for(slot_count, DEPARTURES_MIN, DEPARTURES_MAX, chosen)


class Departure(NamedTuple):
    """The departure of a block: when and why it left the tier, or was not stored."""

    at_ms: int
    why: str
    detail: str = ""


class Departures:
    """Block → its last departure."""

    def __init__(self, chosen: int | None = None, former: FormerBlocks | None = None) -> None:
        """Start empty; `former` keeps the names of departures that are forgotten.

        So many are kept as an operator has chosen; None: by the slots.
        """
        self.forgotten_ms: int | None = None
        """Departures up to this time may have been forgotten; None: none has been."""
        self.forgotten_count = 0
        self._former = former
        self._chosen = chosen
        self._by_block = NameHistory(chosen or DEPARTURES_MIN)
        """Each block's value is the number of its reason."""
        self._reasons: dict[int, tuple[str, str]] = {0: UNKNOWN}
        self._numbers: dict[tuple[str, str], int] = {UNKNOWN: 0}
        self._free = [*range(1, REASONS_MAX)]
        """Numbers that no reason has."""

    def __len__(self) -> int:
        return len(self._by_block)

    def size_for(self, slot_count: int) -> None:
        """Keep as many departures as a tier with so many slots needs, or as are chosen."""
        self._by_block.resize(departures_for(slot_count, self._chosen))

    def note(
        self, names: Iterable[SequenceHash], why: str, now_ms: int, *, detail: str = ""
    ) -> None:
        """Note that these blocks have left, or were not stored."""
        assert why, "a departure has a reason"
        number = self._number_of(why, detail)
        for name in names:
            for forgotten in self._by_block.note(name, now_ms, number):
                self._forget(forgotten, now_ms)

    def get(self, name: SequenceHash) -> Departure | None:
        """Return when and why a block last left. It may be back."""
        found = self._by_block.get(name)
        return None if found is None else Departure(found[0], *self._reasons[found[1]])

    def usage(self, now_ms: int) -> Usage:
        """Return how full this history is, and how far back it reaches."""
        since_ms = self.forgotten_ms
        reach_s = None if since_ms is None else (now_ms - since_ms) / 1000
        assert reach_s is None or reach_s >= 0, f"forgotten at {since_ms} ms, now {now_ms}"
        return Usage(len(self), self._by_block.entries_max, self.forgotten_count, reach_s)

    def knows_none_of(self, names: Sequence[SequenceHash]) -> bool:
        """Return whether no departure of any of these blocks is known."""
        return self._by_block.has_none_of(names)

    def _forget(self, oldest: Noted, now_ms: int) -> None:
        assert oldest.at_ms <= now_ms, f"left at {oldest.at_ms} ms, now {now_ms}"
        self.forgotten_ms = oldest.at_ms
        self.forgotten_count += 1
        if self._former is not None:
            self._former.note(oldest.name, now_ms)

    def _number_of(self, why: str, detail: str) -> int:
        """Return the number of a reason; a new one takes the place of those without a block."""
        known = self._numbers.get((why, detail))
        if known is not None:
            return known
        if len(self._reasons) >= REASONS_MAX:
            used = self._by_block.values(REASONS_MAX) | {0}
            self._free = [one for one in self._reasons if one not in used]
            self._reasons = {one: said for one, said in self._reasons.items() if one in used}
            self._numbers = {said: one for one, said in self._reasons.items()}
            if not self._free:
                return 0
        number: int = self._free.pop()
        self._reasons[number] = (why, detail)
        self._numbers[(why, detail)] = number
        assert len(self._numbers) + len(self._free) == REASONS_MAX, len(self._reasons)
        return number
