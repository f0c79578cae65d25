"""Scores: runs over several tiers, weights, who can reach what; and who has a block."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvbm_common.wire.events import Cleared, Event, Stored, Tier
from kvbm_index.core import queries
from kvbm_index.core.messages import EventsReceived, Holder
from kvbm_index.core.scores import blocks_by_tier

from tests.services.index.core.test_core import NAMESPACE, Harness, blocks, runs

WEIGHTS: dict[Tier, float] = {"device": 1.0, "host": 0.5, "disk": 0.25}
NAMES = {"host": "host-tier-0", "disk": "disk-tier-0"}


def held(
    numbers: Iterable[int],
    *,
    tier: Tier = "device",
    host: str = "h",
    source: str = "",
    rank: int = 0,
) -> list[Event]:
    """What makes a source hold blocks."""
    name = source or NAMES[tier]
    first = Cleared(host=host, source=name, tier=tier, epoch=1, seq=1, ts_ms=0, rank=rank)
    event = Stored(
        host=host, source=name, tier=tier, epoch=1, seq=2, ts_ms=0, rank=rank,
        namespace=NAMESPACE, runs=runs(numbers),
    )  # fmt: skip
    return [first, event]


def scored(events: Iterable[Event]) -> list[tuple[str, str, int, int, float]]:
    """Host, source, rank, blocks and score of every place, for the chain 0 … 9."""
    harness = Harness()
    harness.send(EventsReceived(tuple(events)))
    found = harness.core.scores(blocks(*range(10)), WEIGHTS)
    return [(one.host, one.source, one.rank, one.blocks, one.score) for one in found]


def test_a_run_changes_tiers_on_the_way() -> None:
    """Device 0 … 3, host 2 … 5, disk 6 and 7: the best tier of each counts."""
    events = [
        *held(range(4), source="e"),
        *held(range(2, 6), tier="host"),
        *held([6, 7], tier="disk"),
    ]
    assert scored(events) == [("h", "e", 0, 8, 4 + 2 * 0.5 + 2 * 0.25)]


def test_a_count_of_a_run_takes_no_memory_for_each_block() -> None:
    """Goal: a long run costs what its parts cost. The count kept a set of 100,000 numbers."""
    own: tuple[Tier, list[tuple[int, int]]] = ("device", [(0, 10), (60_000, 100_000)])
    shared: tuple[Tier, list[tuple[int, int]]] = ("host", [(5, 70_000)])
    tracemalloc.start()
    counts = blocks_by_tier([shared, own], 100_000, WEIGHTS)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert counts == {"device": 40_010, "host": 59_990}
    assert peak < 64 * 1024


@given(
    st.lists(st.tuples(st.sampled_from(["device", "host", "disk"]),
                       st.sets(st.integers(0, 19))), max_size=5),
)  # fmt: skip
def test_a_count_by_parts_is_one_block_by_block(world: list[tuple[Tier, set[int]]]) -> None:
    """Whatever parts some holders have: each block counts for the best tier that has it."""
    full: list[tuple[Tier, set[int]]] = [*world, ("disk", set(range(20)))]
    held_by = [(tier, parts_of(numbers)) for tier, numbers in full]
    best = (max((tier for tier, has in full if at in has), key=WEIGHTS.__getitem__)
            for at in range(20))  # fmt: skip
    assert blocks_by_tier(held_by, 20, WEIGHTS) == Counter(best)


def parts_of(numbers: set[int]) -> list[tuple[int, int]]:
    """Return the parts of a set, each as its first number and the one after its last."""
    starts = sorted(one for one in numbers if one - 1 not in numbers)
    ends = sorted(one + 1 for one in numbers if one + 1 not in numbers)
    return list(zip(starts, ends, strict=True))


def test_an_engine_without_blocks_finds_what_its_host_has() -> None:
    events = [*held(range(2), source="e"), *held(range(4), tier="host")]
    assert scored(events) == [("h", "e", 0, 4, 2 + 1.0), ("h", "", 0, 4, 2.0)]


def test_blocks_behind_the_tiers_of_the_host_count() -> None:
    """The engine has evicted the beginning; its host tier has it."""
    events = [*held(range(3, 6), source="e"), *held(range(3), tier="host")]
    assert scored(events) == [("h", "e", 0, 6, 3 + 1.5), ("h", "", 0, 3, 1.5)]


def test_another_host_and_another_rank_are_other_places() -> None:
    events = [
        *held(range(3), source="e", rank=1),
        *held(range(5), tier="host", host="far"),
        *held(range(1), source="f", host="far"),
    ]
    assert scored(events) == [
        ("far", "f", 0, 5, 1 + 4 * 0.5),
        ("h", "e", 1, 3, 3.0),
        ("far", "", 0, 5, 2.5),
    ]


@pytest.mark.parametrize("numbers", [[], [1, 2, 3]])
def test_without_the_first_block_there_is_no_score(numbers: list[int]) -> None:
    assert scored(held(numbers, source="e")) == []


def test_who_has_a_block_whatever_is_before_it() -> None:
    harness = Harness()
    harness.send(EventsReceived((*held([5], source="e"), *held([5, 6], tier="disk"))))
    disk = Holder("h", "disk-tier-0", "disk", 0, 0)
    engine = Holder("h", "e", "device", 0, 0)
    found = harness.core.holders_of(blocks(5, 6, 7, 5))
    assert list(found) == [[disk, engine], [disk], [], [disk, engine]]


def test_who_has_a_block_may_change_between_two_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: each block's holders are those of one moment, however the tables change between.

    1. Two blocks a turn: the first two are looked for. 2. The disk has a block more, the engine
    has none any more: the second block is of before, the third and fourth of now.
    """
    harness = Harness()
    harness.send(EventsReceived((*held([5, 6, 7], source="e"), *held([5], tier="disk"))))
    disk = Holder("h", "disk-tier-0", "disk", 0, 0)
    engine = Holder("h", "e", "device", 0, 0)
    monkeypatch.setattr(queries, "LOOKS_MAX", 4)
    found = harness.core.holders_of(blocks(5, 6, 7, 5))
    assert next(found) == [disk, engine]
    more = Stored(host="h", source="disk-tier-0", tier="disk", epoch=1, seq=3, ts_ms=0,
                  namespace=NAMESPACE, runs=runs([7]))  # fmt: skip
    gone = Cleared(host="h", source="e", tier="device", epoch=1, seq=3, ts_ms=0)
    harness.send(EventsReceived((more, gone)))
    assert list(found) == [[engine], [disk], [disk]]
