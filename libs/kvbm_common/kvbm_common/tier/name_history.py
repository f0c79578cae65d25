"""Name histories: the names that were noted last, with a time and a number for each.

An entry takes 60 bytes at most; in a dict it took 350, and growing the dict blocked the tier for
65 ms. Rows are columns of numbers, linked from the oldest to the newest. A table finds a name's
row, by linear probing (Knuth, TAOCP 6.4, algorithms L and R):

    key   = the last 8 bytes of the hash, or both halves of it, times secret odd numbers
    place = the high bits of key
    entry = the low 12 bits of key << 20 | row; 0: empty

An engine chooses its names. A service draws the numbers when it starts, so that no engine can
choose names that stand side by side: each note would read all of them.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from struct import Struct
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvbm_common.identity import HASH_BYTES, SequenceHash
from kvbm_common.tier.small_pages import small_pages

ENTRY_BYTES = 60
"""Bytes of an entry at most: 36 in its row, 12 to 24 in the table."""
ROW_BITS = 20
ROW_MASK = (1 << ROW_BITS) - 1
ENTRIES_MOST = ROW_MASK
"""A 32-bit entry has 20 bits for the row."""
TAG_MASK = 0xFFF
FREE = -1
"""The time of a row that holds no name."""
SHED_PER_NOTE = 2
"""Entries that are forgotten with each note where fewer are kept than before."""
FEW = 32
"""Up to this many hashes a Python loop is faster than numpy."""
SLOTS_TIMES = 8
"""The histories of a tier keep so many times its blocks, within bounds of their own."""
NAME = np.dtype((np.void, HASH_BYTES))
BITS_64 = (1 << 64) - 1
FACTORS = 3
FACTORS_BYTES = 8 * FACTORS
_factors = [0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB]
"""Factors for the head, and for both rounds: those of SplitMix64 until a process draws its own."""
_halves_of = Struct("<QQ").unpack_from


def set_factors(drawn: bytes) -> None:
    """Set the secret numbers by which histories that are made from now on place names."""
    assert len(drawn) == FACTORS_BYTES, f"{len(drawn)} bytes for {FACTORS} factors"
    _factors[:] = [number | 1 for number in np.frombuffer(drawn, "<u8").tolist()]


def secret_factors() -> tuple[int, int, int]:
    """Return the numbers by which tables that are made now place names."""
    head, first, second = _factors
    assert head & first & second & 1, "a factor is even"
    return head, first, second


def entries_for(
    slot_count: int, entries_min: int, entries_max: int, chosen: int | None = None
) -> int:
    """Return how many names the history of a tier with so many slots keeps.

    A number that an operator has chosen counts as it is.
    """
    assert slot_count > 0, f"a tier with {slot_count} slots"
    assert chosen is None or 0 < chosen <= ENTRIES_MOST, f"{chosen} entries"
    if chosen is not None:
        return chosen
    return min(entries_max, max(entries_min, SLOTS_TIMES * slot_count))


class Noted(NamedTuple):
    """A name, when it was noted last, and its number then."""

    name: SequenceHash
    at_ms: int
    value: int


class NameHistory:
    """The last `entries_max` names."""

    def __init__(self, entries_max: int, *, by_tail: bool = False) -> None:
        """Start without names; at most a million are kept.

        With `by_tail`, names with the same last 8 bytes have one key, so that `alike` finds them.
        The caller keeps few of them then.
        """
        head, self._first, self._second = secret_factors()
        self._head = 0 if by_tail else head
        self._count = 0
        self._row_count = 0
        """Rows that were ever used."""
        self._free = 0
        """The first of them that holds no name, or 0."""
        self._allocate(entries_max)

    def __len__(self) -> int:
        return self._count

    def resize(self, entries_max: int) -> None:
        """Set how many names are kept. After the first note, memory only grows; surplus names go
        with the next notes."""
        if not self._row_count:
            self._allocate(entries_max)
            return
        if entries_max <= self._capacity:
            self.entries_max = entries_max
            return
        former, rows = self._memory, 1 + self._row_count
        columns = self._columns_of(former, self._capacity)
        count, free = self._count, self._free
        self._allocate(entries_max)
        for column, kept in zip(
            self._columns_of(self._memory, self._capacity), columns, strict=True
        ):
            column[:rows] = kept[:rows]
        self._count, self._row_count, self._free = count, rows - 1, free
        self._place_all()

    def note(self, name: SequenceHash, at_ms: int, value: int) -> list[Noted]:
        """Make a name the newest, with these numbers; returns the oldest that are forgotten."""
        assert at_ms >= 0, f"noted at {at_ms} ms"
        key = self._key(name, 0)
        place, row = self._find(name, key)
        forgotten: list[Noted] = []
        if row:
            self._unlink(row)
        else:
            while self._count >= self.entries_max and len(forgotten) < SHED_PER_NOTE:
                forgotten.append(self._pop_oldest())
            if forgotten:
                place, _ = self._find(name, key)
            row = self._new_row()
            self._memory[row * HASH_BYTES : (row + 1) * HASH_BYTES] = name
            self._table[place] = (key & TAG_MASK) << ROW_BITS | row
        self._at_ms[row], self._values[row] = at_ms, value
        newest = self._older[0]
        self._older[row], self._newer[row] = newest, 0
        self._newer[newest] = self._older[0] = row
        return forgotten

    def get(self, name: SequenceHash) -> tuple[int, int] | None:
        """Return the time and the number of a name."""
        _, row = self._find(name, self._key(name, 0))
        return (self._at_ms[row], self._values[row]) if row else None

    def alike(self, name: SequenceHash) -> list[Noted]:
        """Return the names with the same last 8 bytes, in the order in which they came in.

        If the history was made larger since, their order is any.
        """
        assert not self._head, "names with the same last 8 bytes have several keys"
        key = self._key(name, 0)
        place, tag = key >> self._shift, key & TAG_MASK
        found: list[Noted] = []
        while entry := self._table[place]:
            row = entry & ROW_MASK
            if entry >> ROW_BITS == tag and self._key(self._memory, row * HASH_BYTES) == key:
                found.append(Noted(self._name(row), self._at_ms[row], self._values[row]))
            place = (place + 1) & self._mask
        assert len(found) <= self._count, f"{len(found)} of {self._count} names"
        return found

    def remove(self, name: SequenceHash) -> None:
        """Forget a name that is known."""
        place, row = self._find(name, self._key(name, 0))
        assert row, f"{name.hex()} is not known"
        self._drop(place, row)

    def has_none_of(self, names: Sequence[SequenceHash]) -> bool:
        """Return whether no name is known."""
        if not self._count:
            return True
        if len(names) <= FEW:
            return all(self.get(name) is None for name in names)
        places, tags = self._places_and_tags(np.frombuffer(b"".join(names), NAME))
        which = np.arange(len(names))
        while len(which):
            found = self._entries[places]
            alike = which[(found != 0) & (found >> np.uint32(ROW_BITS) == tags)]
            if any(self.get(names[number]) is not None for number in alike.tolist()):
                return False
            rest = found != 0
            which, tags = which[rest], tags[rest]
            places = (places[rest] + 1) & self._mask
        return True

    def values(self, below: int) -> set[int]:
        """Return the different values of all names, each less than `below`; nothing is sorted."""
        used = np.zeros(below, np.bool_)
        used[np.frombuffer(self._values, np.uint32)[self._used_rows()]] = True
        return set(np.flatnonzero(used).tolist())

    # --- rows -------------------------------------------------------------------------------

    def _allocate(self, entries_max: int) -> None:
        assert 0 < entries_max <= ENTRIES_MOST, f"{entries_max} entries"
        self.entries_max = self._capacity = entries_max
        self._count = self._row_count = self._free = 0
        self._memory: mmap.mmap = small_pages((entries_max + 1) * (HASH_BYTES + 20))
        numbers = memoryview(self._memory)
        times, values, older, newer, end = (
            (entries_max + 1) * size for size in (HASH_BYTES, 24, 28, 32, 36)
        )
        self._at_ms, self._values = numbers[times:values].cast("q"), numbers[values:older].cast("I")
        self._older, self._newer = numbers[older:newer].cast("I"), numbers[newer:end].cast("I")
        """Row 0 stands before the oldest and after the newest."""
        bits = (3 * entries_max).bit_length()
        self._shift, self._mask = 64 - bits, (1 << bits) - 1
        table = small_pages(4 << bits)
        self._table, self._entries = memoryview(table).cast("I"), np.frombuffer(table, np.uint32)

    @staticmethod
    def _columns_of(memory: mmap.mmap, capacity: int) -> list[NDArray[np.void]]:
        """Return names, times, values and both links, one row more than the capacity each."""
        columns, start = [], 0
        for size in (HASH_BYTES, 8, 4, 4, 4):
            column = np.frombuffer(memory, np.dtype((np.void, size)), capacity + 1, start)
            columns.append(column)
            start += (capacity + 1) * size
        return columns

    def _new_row(self) -> int:
        self._count += 1
        if self._free:
            row = self._free
            self._free = self._newer[row]
            assert self._at_ms[row] == FREE, f"row {row} is not free"
            return row
        self._row_count += 1
        assert self._row_count <= self._capacity, f"{self._row_count} rows of {self._capacity}"
        return self._row_count

    def _used_rows(self) -> NDArray[np.int64]:
        times = np.frombuffer(self._at_ms, np.int64)[1 : self._row_count + 1]
        rows = 1 + np.flatnonzero(times != FREE)
        assert len(rows) == self._count, f"{len(rows)} rows of {self._count} names"
        return rows

    def _unlink(self, row: int) -> None:
        older, newer = self._older[row], self._newer[row]
        self._newer[older], self._older[newer] = newer, older

    def _pop_oldest(self) -> Noted:
        row = self._newer[0]
        assert row, "no entry is left"
        name = self._name(row)
        noted = Noted(name, self._at_ms[row], self._values[row])
        place = self._key(name, 0) >> self._shift
        while self._table[place] & ROW_MASK != row:
            assert self._table[place], f"row {row} has no place"
            place = (place + 1) & self._mask
        self._drop(place, row)
        return noted

    def _drop(self, place: int, row: int) -> None:
        """Free the row of a name, and its place in the table."""
        assert self._table[place] & ROW_MASK == row, f"row {row} is not at place {place}"
        self._unlink(row)
        self._remove_entry(place)
        self._at_ms[row], self._newer[row] = FREE, self._free
        self._free = row
        self._count -= 1

    def _name(self, row: int) -> SequenceHash:
        return SequenceHash(self._memory[row * HASH_BYTES : (row + 1) * HASH_BYTES])

    # --- the table --------------------------------------------------------------------------

    def _key(self, names: bytes | mmap.mmap, at: int) -> int:
        """Return the key of the name that begins at a byte."""
        halves: tuple[int, int] = _halves_of(names, at)
        key = (halves[1] + halves[0] * self._head) * self._first & BITS_64
        return (key ^ key >> 32) * self._second & BITS_64

    def _find(self, name: SequenceHash, key: int) -> tuple[int, int]:
        """Return a name's place and row; row 0: it is not known, and the place is empty."""
        place, tag = key >> self._shift, key & TAG_MASK
        table, mask = self._table, self._mask
        while found := table[place]:
            if found >> ROW_BITS == tag and self._name(found & ROW_MASK) == name:
                return place, found & ROW_MASK
            place = (place + 1) & mask
        return place, 0

    def _remove_entry(self, place: int) -> None:
        """Empty a place, and move those after it that would not be found beyond a gap."""
        table, mask = self._table, self._mask
        memory, shift = self._memory, self._shift
        assert table[place], f"place {place} is empty"
        gap = place
        while found := table[place := (place + 1) & mask]:
            home = self._key(memory, (found & ROW_MASK) * HASH_BYTES) >> shift
            if (place - home) & mask >= (place - gap) & mask:
                table[gap], gap = found, place
        table[gap] = 0

    def _place_all(self) -> None:
        """Fill an empty table with all rows, in order of their places."""
        rows = self._used_rows()
        homes, tags = self._places_and_tags(
            np.frombuffer(self._memory, NAME, self._row_count + 1)[rows]
        )
        order = np.argsort(homes, kind="stable")
        steps = np.arange(len(order))
        places = np.maximum.accumulate(homes[order] - steps) + steps
        entries = (tags << np.uint32(ROW_BITS) | rows.astype(np.uint32))[order]
        inside = places <= self._mask
        self._entries[places[inside]] = entries[inside]
        for entry in entries[~inside].tolist():  # From the end of the table to its beginning.
            place = 0
            while self._table[place]:
                place += 1
            self._table[place] = entry

    def _places_and_tags(
        self, names: NDArray[np.void]
    ) -> tuple[NDArray[np.int64], NDArray[np.uint32]]:
        """Return the first place of each name, and its tag."""
        halves = np.ascontiguousarray(names).view("<u8").reshape(-1, 2)
        keys = (halves[:, 1] + halves[:, 0] * np.uint64(self._head)) * np.uint64(self._first)
        keys = (keys ^ keys >> np.uint64(32)) * np.uint64(self._second)
        places = (keys >> np.uint64(self._shift)).astype(np.int64)
        return places, keys.astype(np.uint32) & np.uint32(TAG_MASK)
