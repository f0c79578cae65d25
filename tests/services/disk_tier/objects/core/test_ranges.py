"""Ranges of a listing: how many, what each may hold, and that a listing names all, once."""

from __future__ import annotations

import random
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvbm_common.identity import SequenceHash
from kvbm_common.tier.machine import InvalidTransition
from kvbm_disk_tier.objects.core.ranges import RANGE_OBJECTS_MAX, Place, Progress, Ranges

NAMES = st.lists(st.binary(min_size=16, max_size=16), unique=True, max_size=60)
FOLDERS = ("kv/v2/a/", "kv/v2/b/")


@pytest.mark.parametrize(
    ("capacity", "expected", "digits"),
    [
        (1, None, 0),
        (RANGE_OBJECTS_MAX, None, 0),
        (RANGE_OBJECTS_MAX + 1, None, 1),
        (1_000_000, None, 2),
        (100_000_000, None, 4),
        (100_000_000, 0, 0),
        (100_000_000, 9_999, 0),
        (100_000_000, 1_000_000, 2),
        (1_000, 100_000_000, 0),
    ],
)
def test_no_range_keeps_more_than_fits_into_memory(
    capacity: int, expected: int | None, digits: int
) -> None:
    """The smaller of capacity and what is there decides: an empty store costs one request."""
    assert Ranges.for_listing(capacity, expected) == Ranges(digits)


@given(st.integers(0, 3), st.binary(min_size=16, max_size=16))
def test_a_name_is_in_the_range_of_its_first_digits(digits: int, name: bytes) -> None:
    ranges = Ranges(digits)
    number = ranges.of(SequenceHash(name))
    assert name.hex().startswith(ranges.prefix(number))


def test_shares_add_up_to_the_capacity_and_leave_room_for_chance() -> None:
    """Of a million objects in 256 ranges none is deleted that a host with one range would keep."""
    assert Ranges(0).share(1_000) == 1_000
    ranges = Ranges(2)
    drawn = random.Random(1)
    held = [0] * ranges.count
    for _ in range(1_000_000):
        held[drawn.randrange(ranges.count)] += 1
    share = ranges.share(1_000_000)
    assert sum(max(0, count - share) for count in held) < 100
    assert share * ranges.count < 1.06 * 1_000_000


@settings(deadline=None)
@given(names=NAMES, digits=st.integers(0, 2), drawn=st.integers().map(random.Random))
def test_whatever_fails_every_name_is_listed_once(
    names: list[bytes], digits: int, drawn: random.Random
) -> None:
    """Pages of any length, failures in between, ranges side by side."""
    stored = sorted(folder + name.hex() for folder in FOLDERS for name in names)
    progress = Progress(Ranges(digits), FOLDERS)
    listed: list[str] = []
    in_flight: list[Place] = []
    while not progress.is_over:
        if len(in_flight) < 3 and (place := progress.begin()) is not None:
            in_flight.append(place)
            continue
        place = drawn.choice(in_flight)
        if drawn.random() < 0.2:
            progress.failed(place)
            continue
        length = drawn.randint(1, 4)
        here = [one for one in stored if one.startswith(place.prefix) and one > place.after]
        page = here[:length]
        listed += page
        last = page[-1] if page else place.after
        if progress.page(place, last, more=len(here) > length, objects=len(page)):
            in_flight.remove(place)
        progress.check()
    assert sorted(listed) == stored
    assert progress.objects == len(stored)


def test_a_plan_takes_little_memory_however_many_folders_there_are() -> None:
    """It had every prefix of every range: half a gigabyte for ten million objects."""
    folders = [f"kv/v2/{number:064x}/" for number in range(500)]
    tracemalloc.start()
    try:
        progress = Progress(Ranges(3), folders)
        held_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held_bytes < 4_000_000
    place = progress.begin()
    assert place is not None
    assert place.prefix == f"{folders[0]}000"


def test_a_range_that_is_listed_takes_no_more_pages() -> None:
    progress = Progress(Ranges(), ("kv/",))
    place = progress.begin()
    assert place is not None
    assert progress.page(place, "", more=False, objects=0)
    with pytest.raises(InvalidTransition, match="no 'failed' in LISTED"):
        progress.failed(place)
