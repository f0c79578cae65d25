"""Names that have left lately, in a few bytes each: what was evicted, and asked for again.

Two tables of fingerprints. The younger one takes names until it is full, then the older one is
dropped. So names are forgotten together, in the order in which they came: the blocks of a chain
leave one after the other, and are all known or all forgotten. A table whose entries overwrite each
other would remember every second block of a chain, which is worth nothing: what is behind a hole
cannot be used.

A table begins small and grows while it fills: a policy of few blocks takes little memory. A
fingerprint says itself where it is searched, so a table grows without the names.
"""

from __future__ import annotations

from array import array
from struct import Struct

import numpy as np

from kvbm_common.eviction.sketch import SPREAD
from kvbm_common.identity import SequenceHash

ENTRIES_MIN = 64
ENTRIES_PER_NAME = 1.5
"""A table is at most two thirds full: then a search looks at two or three entries."""
MARK_BITS = 32
"""Bits of a name in a table: with a million names, one of 2,000 others seems to be among them."""
MARK_MAX = (1 << MARK_BITS) - 1
REMEMBERED_MIN = 32
"""Names in one table, however few blocks are here."""

_word = Struct("<Q").unpack_from


class RecentNames:
    """The last names that were added: about as many again as blocks are here, or up to thrice."""

    def __init__(self) -> None:
        self._young = _table(ENTRIES_MIN)
        self._old = self._young[:]
        self._young_count = 0

    def add(self, name: SequenceHash, here: int) -> None:
        """Add a name, the latest one; `here`: how many blocks have not left."""
        assert here >= 0, f"{here} blocks are left"
        if not _put(self._young, _mark(name)):
            return
        self._young_count += 1
        if self._young_count >= here and self._young_count >= REMEMBERED_MIN:
            self._old, self._young, self._young_count = self._young, _table(ENTRIES_MIN), 0
        elif self._young_count * ENTRIES_PER_NAME > len(self._young):
            entries = len(self._young)
            enough = max(entries * 5 // 4, int(here * ENTRIES_PER_NAME) + 2)
            self._young = _grown(self._young, min(2 * entries, enough))

    def __contains__(self, name: SequenceHash) -> bool:
        """Tell whether a name was added lately."""
        mark = _mark(name)
        for table in (self._young, self._old):
            entries = len(table)
            place = mark * entries >> MARK_BITS
            while table[place]:
                if table[place] == mark:
                    return True
                place = place + 1 if place + 1 < entries else 0
        return False

    @property
    def table_bytes(self) -> int:
        """Return the bytes of both tables."""
        return (len(self._young) + len(self._old)) * self._young.itemsize


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
    """Return a table of more entries with the same fingerprints.

    They are laid out in their order, each at its place or behind the one before it. A million take
    some 50 ms.
    """
    old = np.frombuffer(table, np.uint32)
    marks = np.sort(old[old > 0])
    assert entries > len(table), f"{entries} entries for a table of {len(table)}"
    larger = _table(entries)
    rows = np.arange(len(marks))
    places = (marks.astype(np.uint64) * np.uint64(len(larger)) >> np.uint64(MARK_BITS)).astype(int)
    places = np.maximum.accumulate(places - rows) + rows
    fits = places < len(larger)
    np.frombuffer(larger, np.uint32)[places[fits]] = marks[fits]
    assert bool(np.all(np.diff(places) > 0)), "two fingerprints have one place"
    for mark in marks[~fits].tolist():
        put = _put(larger, mark)
        assert put, f"fingerprint {mark:#x} is in its table twice"
    return larger
