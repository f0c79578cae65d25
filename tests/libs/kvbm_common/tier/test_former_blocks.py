"""Former blocks: the stated errors, over whole horizons of drawn names."""

from __future__ import annotations

import random
import resource
from pathlib import Path

import pytest
from kvbm_common.identity import SequenceHash
from kvbm_common.tier.former_blocks import (
    BUCKET,
    HORIZON_BELOW_MAX,
    HORIZON_LEAST,
    FormerBlocks,
    horizon_for,
)

HORIZON = 20_000


def drawn(seed: int, count: int) -> list[SequenceHash]:
    """Draw names."""
    numbers = random.Random(seed)
    return [SequenceHash(numbers.randbytes(16)) for _ in range(count)]


def noted(names: list[SequenceHash]) -> FormerBlocks:
    """Note these names, one a millisecond."""
    former = FormerBlocks(HORIZON)
    for at_ms, name in enumerate(names):
        former.note(name, at_ms)
    return former


def test_nothing_is_known_at_first() -> None:
    former = FormerBlocks(HORIZON)
    assert former.among(drawn(1, 3)) == [False, False, False]
    assert former.among([]) == []
    assert former.since_ms is None


def test_a_few_names_are_known_at_once() -> None:
    """Names wait to be written together: a question does not miss them."""
    names = drawn(1, 3)
    former = noted(names[:2])
    assert former.among(names) == [True, True, False]


@pytest.mark.parametrize("seed", range(3))
def test_the_names_of_the_horizon_are_known(seed: int) -> None:
    """After five horizons: all but 1 % of the oldest tenth, and each of the newest tenth."""
    names = drawn(seed, 5 * HORIZON)
    former = noted(names)
    last = names[-HORIZON:]
    tenth = HORIZON // 10
    assert sum(former.among(last[:tenth])) >= 0.99 * tenth
    assert all(former.among(last[-tenth:]))


@pytest.mark.parametrize("seed", range(3))
def test_a_name_that_never_was_noted_is_hardly_ever_known(seed: int) -> None:
    """At most 128 marks of 65,536 in a full bucket."""
    former = noted(drawn(seed, 5 * HORIZON))
    strangers = drawn(seed + 100, 50_000)
    assert sum(former.among(strangers)) <= 1.2 * len(strangers) * BUCKET / 65_536


@pytest.mark.slow
def test_a_name_that_is_noted_again_takes_no_second_place() -> None:
    """Host and disk forget one block each: a thousand names in turn, ten horizons long."""
    names = drawn(1, 1_000)
    first = drawn(2, 1_000)
    former = noted(first + names * (10 * HORIZON // len(names)))
    assert all(former.among(first))


def test_a_name_that_is_noted_again_is_the_newest() -> None:
    """A block left, came back, and left again after most of a horizon: it is known for another."""
    names = drawn(1, 1_000)
    most = 8 * HORIZON // 10
    former = noted([*names, *drawn(2, most), *names, *drawn(3, most)])
    assert sum(former.among(names)) >= 0.99 * len(names)


def test_since_when_it_knows() -> None:
    """One name a millisecond: what left before the last horizon may be unknown."""
    former = noted(drawn(1, HORIZON - 1))
    assert former.since_ms is None
    former = noted(drawn(1, 3 * HORIZON))
    assert former.since_ms is not None
    assert 2 * HORIZON - HORIZON // 50 <= former.since_ms <= 2 * HORIZON


def test_another_horizon_begins_empty() -> None:
    names = drawn(1, 10)
    former = noted(names)
    former.set_horizon(2 * HORIZON)
    assert not any(former.among(names))
    assert former.horizon == 2 * HORIZON


@pytest.mark.parametrize(
    ("slots", "below", "horizon"),
    [
        (0, 0, HORIZON_LEAST),
        (2_000, 100_000, 100 * 102_000),
        (2_000, 10_000_000, HORIZON_BELOW_MAX),
        (1_000_000, 10_000_000, 100 * 1_000_000),
    ],
)
def test_the_horizon_is_a_hundred_times_all_tiers(slots: int, below: int, horizon: int) -> None:
    """Tiers below lengthen it up to a bound; host memory does always."""
    assert horizon_for(slots, below) == horizon


def test_a_new_name_takes_a_small_page() -> None:
    """Of 256 MB that are empty 640 names take some 3 MB: no step waits for pages of 2 MiB."""
    blocks = FormerBlocks(100_000_000)
    before = resident_bytes()
    for number in range(640):
        blocks.note(SequenceHash(random.Random(number).randbytes(16)), 0)
    assert resident_bytes() - before < 30e6


def resident_bytes() -> int:
    """Memory of this process that is there."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
