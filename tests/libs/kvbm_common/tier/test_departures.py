"""Fates: the last word on a block, and how far back it reaches."""

from __future__ import annotations

import random
import time

import pytest
from kvbm_common.identity import SequenceHash
from kvbm_common.tier.departures import REASONS_MAX, Departure, Departures, departures_for
from kvbm_common.tier.name_history import ENTRIES_MOST


def name(number: int) -> SequenceHash:
    """Block 7 is called 0…07."""
    return SequenceHash(number.to_bytes(16, "big"))


def test_the_last_fate_counts() -> None:
    fates = Departures()
    fates.note([name(1), name(2)], "evicted", 10, detail="lru")
    fates.note([name(1)], "corrupt", 20)
    assert fates.get(name(1)) == Departure(20, "corrupt")
    assert fates.get(name(2)) == Departure(10, "evicted", "lru")
    assert fates.get(name(3)) is None
    assert fates.knows_none_of([name(3), name(4)])
    assert not fates.knows_none_of([name(3), name(2)])


def test_what_left_first_is_forgotten_first_and_it_says_until_when() -> None:
    """A block that leaves again is not the oldest any more."""
    fates = Departures(2)
    fates.note([name(1)], "evicted", 10)
    fates.note([name(2)], "evicted", 20)
    before = fates.forgotten_ms
    fates.note([name(1)], "evicted", 30)
    fates.note([name(3)], "evicted", 40)
    assert fates.get(name(2)) is None
    assert fates.get(name(1)) is not None
    assert (len(fates), before, fates.forgotten_ms) == (2, None, 20)


def test_a_full_memory_takes_a_fate_as_quickly_as_an_empty_one() -> None:
    """The oldest name of a plain dict is found after the holes of all that have left: in a tier
    that had evicted 262,144 blocks, each further eviction took 0.1 to 0.4 ms."""
    count = 2_000
    fates = Departures(50 * count)

    def note(batch: int) -> float:
        names = [name(batch * count + number) for number in range(count)]
        started_s = time.thread_time()
        fates.note(names, "evicted", batch)
        return time.thread_time() - started_s

    filling = sorted(note(batch) for batch in range(50))[25]
    full = sorted(note(batch) for batch in range(50, 80))[15]
    assert full < 10 * filling


def test_departures_follow_the_size_of_the_tier() -> None:
    fates, rng = Departures(), random.Random(0)
    for slot_count, kept in ((1, 4_096), (1_000, 8_000), (100_000, 262_144)):
        fates.size_for(slot_count)
        names = [SequenceHash(rng.randbytes(16)) for _ in range(kept + 1_000)]
        fates.note(names, "evicted", 10)
        assert len(fates) == kept
        assert fates.get(names[-1]) is not None
        fates = Departures()


def test_a_chosen_number_of_departures_is_kept_whatever_the_slots() -> None:
    """Two are kept before the slots are known, by a small tier and by a large one."""
    fates = Departures(2)
    sizes = [fates.usage(0).size]
    for slot_count in (1, 1_000_000):
        fates.size_for(slot_count)
        fates.note(map(name, (1, 2, 3)), "evicted", 10)
        sizes.append(fates.usage(10).size)
    assert (sizes, len(fates), fates.get(name(1))) == ([2, 2, 2], 2, None)


def test_a_number_of_a_reason_that_no_block_has_is_given_again() -> None:
    """Goal: four times as many reasons as there are numbers, and the last blocks tell theirs."""
    fates, kept = Departures(100), 100
    names = [name(number) for number in range(4 * REASONS_MAX)]
    for number, one in enumerate(names):
        fates.note([one], "reset", number, detail=str(number))
    told = [fates.get(one) for one in names[-kept:]]
    assert told == [Departure(n, "reset", str(n)) for n in range(len(names))[-kept:]]


@pytest.mark.parametrize("chosen", [0, -1, ENTRIES_MOST + 1])
def test_a_number_that_no_history_can_keep_is_asserted(chosen: int) -> None:
    with pytest.raises(AssertionError, match=f"{chosen} entries"):
        departures_for(1, chosen)
