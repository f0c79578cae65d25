"""Names that have left lately, in a few bytes each: what was evicted, and asked for again.

Two sets of fingerprints. The younger one takes names until it is full, then the older one is
dropped. So names are forgotten together, in the order in which they came: the blocks of a chain
leave one after the other, and are all known or all forgotten. A table whose entries overwrite each
other would remember every second block of a chain, which is worth nothing: what is after a hole
cannot be used.

A set begins small and grows while it fills: a policy of few blocks takes little memory. A large one
is 64 tables, which grow one by one: a million entries in one table took 50 ms to move. A
fingerprint says itself where it is searched, so a table grows without the names.
"""

from __future__ import annotations

from array import array
from struct import Struct

import numpy as np
from numpy.typing import NDArray

from kvbm_common.eviction.sketch import SPREAD
from kvbm_common.identity import SequenceHash

ENTRIES_MIN = 64
ENTRIES_PER_NAME = 1.5
"""A table is at most two thirds full: then a search looks at two or three entries."""
WHOLE_MAX = 16_384
"""Fingerprints in one table; to divide it takes three milliseconds."""
PARTS = 64
PART_SPARE = 3.0
"""Standard deviations above the mean for which a table of a part has room: few grow once more."""
GROWTH_MAX, PART_GROWTH_MAX = 2, 8
"""The factor by which a full table grows, and that of a part, which is small beside its blocks."""
MARK_BITS = 32
"""Bits of a name in a table: with a million names, one of 2,000 others seems to be among them."""
MARK_MAX = (1 << MARK_BITS) - 1
REMEMBERED_MIN = 32
"""Names in one set, however few blocks are here."""

_word = Struct("<Q").unpack_from


class RecentNames:
    """The last names that were added: about as many again as blocks are here, or up to thrice."""

    def __init__(self) -> None:
        self._young = _Marks()
        self._old = _Marks()

    def add(self, name: SequenceHash, here: int) -> None:
        """Add a name, the latest one; `here`: how many blocks have not left."""
        assert here >= 0, f"{here} blocks are left"
        young = self._young
        young.add((_word(name, 8)[0] * SPREAD >> 32 & MARK_MAX) or 1, here)
        if young.count >= here and young.count >= REMEMBERED_MIN:
            self._old, self._young = young, _Marks()

    def __contains__(self, name: SequenceHash) -> bool:
        """Tell whether a name was added lately."""
        mark = _mark(name)
        return mark in self._young or mark in self._old

    @property
    def table_bytes(self) -> int:
        """Return the bytes of all tables; for tests."""
        return self._young.table_bytes + self._old.table_bytes


class _Marks:
    """A set of fingerprints: one table, or with many of them one for each of the last six bits."""

    __slots__ = ("_counts", "_mask", "_tables", "count")

    def __init__(self) -> None:
        self._tables = [_table(ENTRIES_MIN)]
        self._counts = [0]
        """The number of fingerprints in each table."""
        self._mask = 0
        self.count = 0

    def add(self, mark: int, expected: int) -> None:
        """Add a fingerprint; `expected`: how many there may be before the set is full."""
        number = mark & self._mask
        table = self._tables[number]
        entries = len(table)
        place = mark * entries >> MARK_BITS
        while table[place]:  # As in `_put`, without a call.
            if table[place] == mark:
                return
            place = place + 1 if place + 1 < entries else 0
        table[place] = mark
        self.count += 1
        count = self._counts[number] = self._counts[number] + 1
        if count * ENTRIES_PER_NAME > entries:
            if not self._mask and self.count > WHOLE_MAX:
                self._divide()
            else:
                self._tables[number] = _grown(table, self._enough(entries, expected))

    def __contains__(self, mark: int) -> bool:
        table = self._tables[mark & self._mask]
        entries = len(table)
        place = mark * entries >> MARK_BITS
        while table[place]:
            if table[place] == mark:
                return True
            place = place + 1 if place + 1 < entries else 0
        return False

    @property
    def table_bytes(self) -> int:
        """Return the bytes of all tables; for tests."""
        return sum(len(table) * table.itemsize for table in self._tables)

    def _enough(self, entries: int, expected: int) -> int:
        """Return how many entries a table of so many has next."""
        if not self._mask:
            most, growth = float(expected), GROWTH_MAX
        else:
            mean = expected / PARTS
            most, growth = mean + PART_SPARE * mean**0.5, PART_GROWTH_MAX
        return min(growth * entries, max(entries * 5 // 4, int(most * ENTRIES_PER_NAME) + 2))

    def _divide(self) -> None:
        """Have a table for each of the last six bits."""
        [whole] = self._tables
        marks = np.frombuffer(whole, np.uint32)
        marks = np.sort(marks[marks > 0])
        ours = marks & np.uint32(PARTS - 1)
        self._counts = np.bincount(ours, minlength=PARTS).tolist()
        parts = np.split(marks[np.argsort(ours, kind="stable")], np.cumsum(self._counts)[:-1])
        self._tables = [_laid_out(part, 2 * len(part) + 2) for part in parts]
        self._mask = PARTS - 1
        assert sum(self._counts) == self.count, f"{self.count} became {sum(self._counts)}"


def _mark(name: SequenceHash) -> int:
    """Return the fingerprint of a name; an empty entry is 0."""
    return (_word(name, 8)[0] * SPREAD >> 32 & MARK_MAX) or 1


def _table(entries: int) -> array[int]:
    """Return an empty table."""
    return array("I", bytes(4 * entries))


def _put(table: array[int], mark: int) -> bool:
    """Put a fingerprint into a table with room; returns False if it is there already."""
    assert 0 < mark <= MARK_MAX, f"{mark:#x} is no fingerprint"
    entries = len(table)
    place = mark * entries >> MARK_BITS
    while table[place]:
        if table[place] == mark:
            return False
        place = place + 1 if place + 1 < entries else 0
    table[place] = mark
    return True


def _grown(table: array[int], entries: int) -> array[int]:
    """Return a table of more entries with the same fingerprints."""
    old = np.frombuffer(table, np.uint32)
    assert entries > len(table), f"{entries} entries for a table of {len(table)}"
    return _laid_out(np.sort(old[old > 0]), entries)


def _laid_out(marks: NDArray[np.uint32], entries: int) -> array[int]:
    """Return a table with these fingerprints, which ascend.

    They are laid out in their order, each at its place or after the one before it.
    """
    assert len(marks) < entries, f"{len(marks)} fingerprints in {entries} entries"
    table = _table(entries)
    rows = np.arange(len(marks))
    places = (marks.astype(np.uint64) * np.uint64(entries) >> np.uint64(MARK_BITS)).astype(int)
    places = np.maximum.accumulate(places - rows) + rows
    fits = places < entries
    np.frombuffer(table, np.uint32)[places[fits]] = marks[fits]
    assert bool(np.all(np.diff(places) > 0)), "two fingerprints have one place"
    for mark in marks[~fits].tolist():
        put = _put(table, mark)
        assert put, f"fingerprint {mark:#x} is in its table twice"
    return table
