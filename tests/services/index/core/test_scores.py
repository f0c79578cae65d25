"""Scores: runs over several tiers, weights, who can reach what; and who has a block."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from kvbm_common.wire.events import Cleared, Event, Stored, Tier
from kvbm_index.core.messages import EventsReceived, Holder

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
    assert harness.core.holders_of(blocks(5, 6, 7)) == [[disk, engine], [disk], []]
