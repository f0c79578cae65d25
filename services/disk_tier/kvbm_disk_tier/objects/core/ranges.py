"""Ranges: the parts in which a store is listed, cut by hash, and the progress of each.

    WAITING --listed from the beginning--> OPEN --a page with more after it---> OPEN
                                            | ^                                  |
                                            | +---- a failure: from the same name +
                                            +--the last page of the last namespace--> LISTED

Hashes are uniform, so a range is a sample: it has its share of the objects and of the capacity.
Objects beyond that share are deleted when they are found, without a look at the rest. A listing
that fails goes on after the last name that it has seen; a range may fail while others go on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from kvbm_common.identity import SequenceHash
from kvbm_common.tier.machine import Machine

DIGITS_MAX = 4
RANGE_OBJECTS_MAX = 20_000
"""Kept in memory for each range that is being listed: some 9 MB."""
GROWTH = 2
"""The factor by which a listing may find more objects than the one before."""
SPREAD = 3.0
"""Standard deviations that a range may hold beyond its share, as random samples do."""


class RangeState(Enum):
    """The progress of listing a range of names."""

    WAITING = "waiting"
    OPEN = "open"
    LISTED = "listed"


RANGE = Machine(
    "listed range",
    {
        (None, "planned"): RangeState.WAITING,
        (RangeState.WAITING, "begun"): RangeState.OPEN,
        (RangeState.OPEN, "page"): RangeState.OPEN,
        (RangeState.OPEN, "failed"): RangeState.OPEN,
        (RangeState.OPEN, "last page"): RangeState.LISTED,
    },
)


@dataclass(frozen=True, slots=True)
class Ranges:
    """A division of all names by the first `digits` hexadecimal digits of their hashes."""

    digits: int = 0

    def __post_init__(self) -> None:
        assert 0 <= self.digits <= DIGITS_MAX, self.digits

    @classmethod
    def for_listing(cls, capacity: int, expected: int | None) -> Ranges:
        """Return the division for a store of `capacity` objects that may hold `expected`.

        A range keeps at most its share, so the smaller of the two numbers counts.
        """
        assert capacity > 0, "a store has room"
        kept = capacity if expected is None else min(capacity, GROWTH * expected)
        digits = 0
        while digits < DIGITS_MAX and kept > RANGE_OBJECTS_MAX * 16**digits:
            digits += 1
        return cls(digits)

    @property
    def count(self) -> int:
        """Return the number of ranges."""
        return 1 << 4 * self.digits

    def of(self, name: SequenceHash) -> int:
        """Return the range that a block's name is in."""
        number = int.from_bytes(name[:2], "big") >> (16 - 4 * self.digits)
        assert 0 <= number < self.count, f"{name.hex()} is in range {number} of {self.count}"
        return number

    def share(self, capacity: int) -> int:
        """Return how many objects a range may hold."""
        assert capacity >= 0, f"a store for {capacity} objects"
        share = capacity / self.count
        most = math.ceil(share + (SPREAD * math.sqrt(share) if self.digits else 0))
        assert most * self.count >= capacity, f"{self.count} ranges of {most} hold {capacity}"
        return most

    def prefix(self, number: int) -> str:
        """Return the first digits of the hashes in a range."""
        assert 0 <= number < self.count, number
        return f"{number:0{self.digits}x}" if self.digits else ""


WHOLE = Ranges()
"""One range of all names."""


@dataclass(slots=True)
class Place:
    """The place where a range goes on: the folder, and the name to list after."""

    number: int
    folders: Sequence[str]
    """The folders of the listing, shared: there may be many, and many ranges."""
    digits: str
    state: RangeState
    at: int = 0
    after: str = ""
    pages: int = 0
    is_whole: bool = True
    """True: no page has left out names that could not be read."""

    @property
    def prefix(self) -> str:
        """Return the prefix of names that is being listed."""
        return f"{self.folders[self.at]}{self.digits}"


class Progress:
    """One listing of a store: which range is next, and where each goes on."""

    def __init__(self, ranges: Ranges, folders: Sequence[str]) -> None:
        """Plan a listing of what lies below these folders, whose names go on with a hash."""
        assert folders, "a store has a folder, if an empty one"
        self.ranges = ranges
        self.pages = self.failures = self.objects = 0
        self._places = [
            Place(number, folders, ranges.prefix(number), RANGE.next(None, "planned"))
            for number in range(ranges.count)
        ]
        self._next = 0

    @property
    def is_over(self) -> bool:
        """Tell whether every range has been listed."""
        return self._next == len(self._places) and not self.open_count

    @property
    def open_count(self) -> int:
        """Return how many ranges are being listed."""
        begun = self._places[: self._next]
        return sum(place.state is RangeState.OPEN for place in begun)

    def begin(self) -> Place | None:
        """Return the next range to list; None: there is no other."""
        if self._next == len(self._places):
            return None
        place = self._places[self._next]
        self._next += 1
        self._move(place, "begun")
        return place

    def page(self, place: Place, last_name: str, *, more: bool, objects: int) -> bool:
        """Note a page; True: the range is listed to its end."""
        assert self._places[place.number] is place, f"{place} is of another listing"
        assert objects >= 0, f"a page of {objects} objects: {place}"
        assert last_name >= place.after or not last_name, f"{last_name} after {place.after}"
        self.pages += 1
        self.objects += objects
        place.pages += 1
        if more:
            assert last_name, "a page without names has no next page"
            place.after = last_name
            self._move(place, "page")
            return False
        place.after = ""
        place.at += 1
        ended = place.at == len(place.folders)
        self._move(place, "last page" if ended else "page")
        return ended

    def failed(self, place: Place) -> None:
        """Note that a page could not be read: it is requested again."""
        assert self._places[place.number] is place, f"{place} is of another listing"
        self.failures += 1
        self._move(place, "failed")

    def _move(self, place: Place, event: str) -> None:
        place.state = RANGE.next(place.state, event, f"range {place.number} after {place.after!r}")

    def check(self) -> None:
        """Assert every invariant of a listing."""
        states = [place.state for place in self._places]
        assert all(state is RangeState.WAITING for state in states[self._next :])
        assert all(state is not RangeState.WAITING for state in states[: self._next])
