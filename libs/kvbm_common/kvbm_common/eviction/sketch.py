"""Sketch of how often names were asked for lately; its table grows with use up to a bound.

The table is in pages of 4 KiB. When it grows, or all counts are halved, each page is changed when
it is used again: 64 MiB at once took 50 to 100 ms.

A count-min sketch with two places per name and conservative update, halved now and then so that
what was popular long ago is forgotten (TinyLFU, Einziger et al. 2017). It counts names that the
tier does not hold, too.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvbm_common.identity import HASH_BYTES, SequenceHash

COUNT_MAX = 255
PLACES_FIRST = 1 << 12
GROWTH = 16
GROW_PER_USE = 64
"""Grow, up to the bound, after so many uses that one place in 32 was counted at. Each place is
copied to those that it may belong to now: a count stays too high rather than too low."""
PLACES_MIN = 1 << 22
PLACES_MAX = 1 << 26
"""64 MiB, for tiers of a million slots and more."""
PLACES_PER_SLOT = 64
PLACES_PER_USE = 8
"""Halve after so many uses that one place in eight was counted at. In a fuller table the places of
two names meet too often, and a block that was never seen before seems to have come back."""
PAGE_BITS = 12
PAGE = 1 << PAGE_BITS
SHARED = 1
"""A page that must be copied before it is used: others have the same one since the table grew."""
HALVE = 2
"""Added for each time that a page has to be halved before it is used."""
COUNT_BITS = 8
HALVED = bytes(count >> 1 for count in range(256))
SPREAD = 0x9E3779B97F4A7C15
WORD = (1 << 64) - 1


def mix(name: SequenceHash) -> int:
    """Return 64 well-spread bits of a name, the same in every process."""
    word = int.from_bytes(name[-8:], "little") * SPREAD & WORD
    return (word ^ (word >> 29)) * SPREAD & WORD


def mixed(names: NDArray[np.void]) -> NDArray[np.uint64]:
    """Return 64 well-spread bits of each of many names, as `mix` does for one."""
    assert names.dtype.itemsize == HASH_BYTES, f"names are {names.dtype}"
    spread = np.uint64(SPREAD)
    words = np.ascontiguousarray(names).view("<u8").reshape(-1, 2)[:, 1] * spread
    mixed: NDArray[np.uint64] = (words ^ (words >> np.uint64(29))) * spread
    return mixed


class Sketch:
    """Counts of how often names were asked for."""

    def __init__(self, slot_count: int) -> None:
        assert slot_count >= 0, f"a sketch for {slot_count} slots"
        places = min(max(PLACES_MIN, PLACES_PER_SLOT * slot_count), PLACES_MAX)
        self._mask_max = (1 << (places - 1).bit_length()) - 1
        # The two places of a name come of the two halves of its word.
        assert self._mask_max < 1 << 32, f"{places} places are more than half a word can name"
        self._mask = PLACES_FIRST - 1
        self._pages = [bytearray(PAGE) for _ in range(PLACES_FIRST // PAGE)]
        self._due = [0] * len(self._pages)
        """Page → the work that is due before it is used: SHARED, and HALVE several times."""
        self._added = 0

    def fill(self, words: NDArray[np.uint64]) -> None:
        """Count each of these names once, given their `mixed`; only into an empty sketch."""
        assert not self._added, f"{self._added} uses are counted already"
        self._grow(GROW_PER_USE * len(words))
        table = np.zeros(self._mask + 1, np.uint8)
        for shift in (0, 32):
            table[(words >> np.uint64(shift)) & np.uint64(self._mask)] = 1
        whole = table.data
        self._pages = [bytearray(whole[at : at + PAGE]) for at in range(0, len(whole), PAGE)]
        self._due = [0] * len(self._pages)
        self._added += len(words)

    def add(self, word: int) -> int:
        """Count a name, given its `mix`; returns its count, this time included."""
        first, second = word & self._mask, (word >> 32) & self._mask
        due, pages, here, there = self._due, self._pages, first >> PAGE_BITS, second >> PAGE_BITS
        if due[here] or due[there]:
            self._renew(here)
            self._renew(there)
        first, second = first & PAGE - 1, second & PAGE - 1
        seen, other = pages[here][first], pages[there][second]
        count = seen if seen < other else other
        if count < COUNT_MAX:
            if seen == count:
                pages[here][first] = count + 1
            if other == count:
                pages[there][second] = count + 1
            self._added += 1
            if self._added * GROW_PER_USE > self._mask:
                self._make_room()
        return count + 1

    def _renew(self, number: int) -> None:
        """Do what is due before a page is used."""
        due = self._due[number]
        if not due:
            return
        page = bytearray(self._pages[number])
        for _ in range(min(due // HALVE, COUNT_BITS)):
            page = page.translate(HALVED)
        assert len(page) == PAGE, f"page {number} has {len(page)} places"
        self._pages[number], self._due[number] = page, 0

    def _make_room(self) -> None:
        """Have more places if that is allowed still, else halve all counts of a full table."""
        if self._mask < self._mask_max:
            self._grow(GROW_PER_USE * self._added)
        elif self._added * PLACES_PER_USE > self._mask:
            self._added = 0
            self._due = [due + HALVE for due in self._due]

    def _grow(self, places: int) -> None:
        """Have more than so many places, or as many as are allowed."""
        while self._mask < min(places, self._mask_max):
            grown = min(GROWTH * (self._mask + 1), self._mask_max + 1)
            times = grown // (self._mask + 1)
            self._pages = self._pages * times
            self._due = [due | SHARED for due in self._due] * times
            self._mask = grown - 1
            assert len(self._pages) * PAGE == grown, f"{len(self._pages)} pages, {grown} places"
