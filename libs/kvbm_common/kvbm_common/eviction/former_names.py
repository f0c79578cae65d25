"""Former names: the blocks of a former life that a policy has not met again, in a compact table.

A million names come at once, and each leaves once, for good. A set takes 34 bytes or more for each
of them, and a dict 42. Here a name has a *place* in a list, and a table of numbers says which:

    key of b ──► table  [ 0  3  0  1  2  0  0  0 ]     a number is a place and one more
                             │
                 names  [ a  –  b ]                    a name that has left leaves a gap

Nothing is added later, so the table stays as it is: a number whose place is a gap, or beyond the
list, is passed over. A key is the high bits of a name, as a number of 128 bits, times a number of
128 bits that is secret, for an engine chooses its names: see `name_history`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from kvbm_common.identity import SequenceHash
from kvbm_common.tier.name_history import NAME, secret_factors

PART_NAMES = 1 << 9
"""Names that are looked at together: numbers of all of them took more memory than a block."""
_LOW = np.uint64(2**32 - 1)
_32 = np.uint64(32)


class FormerNames:
    """Names by place, made at once; they leave one by one."""

    __slots__ = ("_count", "_factor", "_mask", "_names", "_shift", "_table")

    def __init__(self, names: Iterable[SequenceHash] = ()) -> None:
        """Take these names, which differ."""
        self._names: list[SequenceHash | None] = [*names]
        self._count = len(self._names)
        high, low, _ = secret_factors()
        self._factor = high << 64 | low
        bits = (3 * self._count // 2).bit_length()
        self._shift, self._mask = 128 - bits, (1 << bits) - 1
        self._table = array("I", bytes(4 << bits))
        if self._count:
            self._place_all()

    def _place_all(self) -> None:
        """Fill the table in the order of where each name is searched from, with gaps between."""
        both, size = self._homes_and_places(), len(self._table)
        both.sort()
        table, last = np.frombuffer(self._table, np.uint32), -1
        around: list[int] = []
        for first in range(0, self._count, PART_NAMES):
            part = both[first : first + PART_NAMES]
            places, steps = part & _LOW, np.arange(len(part))
            entries = (part >> _32).astype(np.int64) - steps
            entries[0] = max(entries[0], last + 1)
            entries = np.maximum.accumulate(entries) + steps
            last = int(entries[-1])
            inside = int(np.searchsorted(entries, size))
            table[entries[:inside]] = places[:inside] + np.uint64(1)
            around += places[inside:].tolist()
        for place in around:  # From the end of the table to its beginning.
            entry = 0
            while self._table[entry]:
                entry += 1
            assert entry < size - 1, f"no entry of {size} is left"
            self._table[entry] = place + 1

    def _homes_and_places(self) -> NDArray[np.uint64]:
        """Return where each name is searched first, in the high half, and its place in the low."""
        factor_high, factor_low = (np.uint64(one) for one in divmod(self._factor, 2**64))
        both = np.arange(self._count, dtype=np.uint64)
        for first in range(0, self._count, PART_NAMES):
            part = both[first : first + PART_NAMES]
            joined = b"".join(filter(None, self._names[first : first + PART_NAMES]))
            names = np.frombuffer(joined, NAME)
            assert len(names) == len(part), f"{len(names)} names of {len(part)} are here"
            halves: NDArray[np.uint64] = names.view(np.uint64).reshape(-1, 2)
            low, high = halves[:, 0], halves[:, 1]
            keys = _high_of(low, factor_low) + high * factor_low + low * factor_high
            part |= keys >> np.uint64(self._shift - 64) << _32
        return both

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[SequenceHash]:
        """Yield the names that are left, the last one first."""
        return (name for name in reversed(self._names) if name is not None)

    def __contains__(self, name: SequenceHash) -> bool:
        return bool(self._count) and self.place(name) >= 0

    def place(self, name: SequenceHash) -> int:
        """Return the place of a name, or -1 if it is not here."""
        table, names, mask = self._table, self._names, self._mask
        entry, count = (
            int.from_bytes(name, "little") * self._factor >> self._shift & mask,
            len(names),
        )
        while number := table[entry]:
            if number <= count and names[number - 1] == name:
                return number - 1
            entry = entry + 1 & mask
        return -1

    def remove(self, name: SequenceHash) -> None:
        """Let a name leave; raises KeyError if it is not here."""
        names = self._names
        is_last = bool(names) and names[-1] == name  # As a rule, victims leave from the end.
        place = len(names) - 1 if is_last else self.place(name)
        if place < 0:
            raise KeyError(name)
        names[place] = None
        self._count -= 1
        if not self._count:
            self._names, self._table, self._mask = [], array("I", bytes(4)), 0
            return
        while names[-1] is None:
            names.pop()
        assert self._count <= len(names), f"{self._count} names in {len(names)} places"


def _high_of(numbers: NDArray[np.uint64], factor: np.uint64) -> NDArray[np.uint64]:
    """Return the high 64 bits of the products, of 128 bits, of numbers and a factor."""
    assert numbers.dtype == np.uint64, f"numbers are {numbers.dtype}"
    low, high = numbers & _LOW, numbers >> _32
    factor_low, factor_high = factor & _LOW, factor >> _32
    outer, inner = low * factor_high, high * factor_low
    carried = (low * factor_low >> _32) + (outer & _LOW) + (inner & _LOW) >> _32
    found: NDArray[np.uint64] = high * factor_high + (outer >> _32) + (inner >> _32) + carried
    return found
