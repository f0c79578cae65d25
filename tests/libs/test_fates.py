"""Fates: the last word on a block, and how far back it reaches."""

from __future__ import annotations

from kvbm_common.fates import Fate, Fates
from kvbm_common.identity import SequenceHash


def name(number: int) -> SequenceHash:
    """Block 7 is called 0…07."""
    return SequenceHash(number.to_bytes(16, "big"))


def test_the_last_fate_counts() -> None:
    fates = Fates()
    fates.note([name(1), name(2)], "evicted", 10, detail="lru")
    fates.note([name(1)], "corrupt", 20)
    assert fates.get(name(1)) == Fate(20, "corrupt")
    assert fates.get(name(2)) == Fate(10, "evicted", "lru")
    assert fates.get(name(3)) is None
    assert fates.knows_none_of([name(3), name(4)])
    assert not fates.knows_none_of([name(3), name(2)])


def test_what_left_first_is_forgotten_first_and_it_says_until_when() -> None:
    """A block that leaves again is not the oldest any more."""
    fates = Fates(2)
    fates.note([name(1)], "evicted", 10)
    fates.note([name(2)], "evicted", 20)
    before = fates.forgotten_ms
    fates.note([name(1)], "evicted", 30)
    fates.note([name(3)], "evicted", 40)
    assert fates.get(name(2)) is None
    assert fates.get(name(1)) is not None
    assert (len(fates), before, fates.forgotten_ms) == (2, None, 20)
