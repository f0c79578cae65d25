"""The last hour: points of each host and of all together, and how many there may be."""

from __future__ import annotations

import sys

from hypothesis import given
from hypothesis import strategies as st
from kvbm_metrics.core.collector import status_view
from kvbm_metrics.core.fleet_view import FleetView
from kvbm_metrics.core.history import (
    ALL,
    POINT_BYTES,
    POINTS,
    SERIES_MAX,
    SPACING_S,
    History,
    lookups_by_host,
)
from kvbm_metrics.core.kvbm_totals import Totals
from kvbm_metrics.core.models import LookupsView
from kvbm_metrics.core.rates import Rates

from tests.services.metrics.samples import alive, stats, tier_stats


def rate(lookups: float, *, window_s: float = 10.0) -> LookupsView:
    """So many lookups per second, of a block each, the half of them found."""
    blocks = {"host": lookups / 2, "miss": lookups / 2}
    return LookupsView(
        window_s=window_s, lookups=lookups, matched_tokens=8 * lookups, blocks=blocks, hit_rate=0.5
    )


def points_of(history: History, host: str, now_s: float) -> list[tuple[float, float]]:
    """Return how long ago each point is, and its lookups."""
    history.check()
    return [(one.ago_s, one.lookups) for one in history.of(host, now_s)]


def test_a_point_for_each_ten_seconds() -> None:
    """1. The first look in a slot counts. 2. What nobody looked at has no point."""
    history = History()
    assert history.is_due(0.0)
    for now_s, lookups in [(0.0, 1), (5.0, 2), (12.0, 3), (40.0, 4)]:
        history.take({ALL: rate(lookups)}, now_s)
    assert not history.is_due(49.9)
    assert history.is_due(50.0)
    assert points_of(history, ALL, 40.0) == [(40.0, 1), (30.0, 3), (0.0, 4)]


def test_an_hour_is_kept() -> None:
    """Older points go, also when nobody adds new ones."""
    history = History()
    for slot in range(POINTS + 5):
        history.take({ALL: rate(slot)}, slot * SPACING_S)
    last_s = (POINTS + 4) * SPACING_S
    found = points_of(history, ALL, last_s)
    assert len(found) == POINTS
    assert found[0] == (last_s - 5 * SPACING_S, 5.0)
    assert points_of(history, ALL, last_s + 2 * SPACING_S)[0][1] == 7
    assert points_of(history, ALL, last_s + 3600) == []


def test_nothing_to_compare_with_is_no_point() -> None:
    """A rate without a window would be a zero that was never measured."""
    history = History()
    history.take({ALL: rate(0, window_s=0.0)}, 0.0)
    assert points_of(history, ALL, 0.0) == []


def test_hosts_are_limited_and_forgotten() -> None:
    """1. More hosts than series: all together stay. 2. A host that is silent for an hour goes."""
    history = History()
    many = {f"h{number:03}": rate(1) for number in range(SERIES_MAX + 5)}
    history.take(many | {ALL: rate(9)}, 0.0)
    assert points_of(history, "h000", 0.0) == []
    assert points_of(history, f"h{SERIES_MAX + 4:03}", 0.0) == [(0.0, 1)]
    assert points_of(history, ALL, 0.0) == [(0.0, 9)]
    history.take({ALL: rate(9)}, 3600.0)
    assert points_of(history, f"h{SERIES_MAX + 4:03}", 3600.0) == []


def test_a_point_takes_no_more_than_is_declared() -> None:
    """A tuple of three slots, four numbers, and a place in a deque."""
    numbers = (1 << 40, 0.5, 1.5, 2.5)
    assert sys.getsizeof(numbers) + sum(map(sys.getsizeof, numbers)) + 8 <= POINT_BYTES


hosts = st.dictionaries(st.sampled_from("abcd"), st.integers(0, 9), max_size=4)


@given(st.lists(st.tuples(st.floats(0, 4000), hosts), max_size=40))
def test_every_order_of_looks(steps: list[tuple[float, dict[str, int]]]) -> None:
    """Hosts come and go, looks come late: points stay in order and within the hour."""
    history, now_s = History(), 0.0
    for step_s, said in steps:
        now_s += step_s
        history.take({host: rate(one) for host, one in said.items()} | {ALL: rate(1)}, now_s)
        for host in ["a", ALL]:
            ages = [age_s for age_s, _ in points_of(history, host, now_s)]
            assert ages == sorted(ages, reverse=True)
            assert all(0 <= age_s < 3600 for age_s in ages)


def two_hosts() -> tuple[FleetView, Rates]:
    """Host `a` finds three of four blocks, host `b` one of four."""
    rates = Rates()
    for now_s, times in [(0.0, 0), (10.0, 10)]:
        replies = [
            tier_stats(
                "host-tier", used=1, total=4, host=host,
                figures={"lookups": times, "lookup_blocks.host": found * times,
                         "lookup_blocks.miss": (4 - found) * times},
            )
            for host, found in [("a", 3), ("b", 1)]
        ]  # fmt: skip
        rates.take(replies, now_s)
    return FleetView(instances=[alive(stats("index")), *map(alive, replies)]), rates


def test_one_hit_rate_of_each_host_and_of_all() -> None:
    """Found blocks of asked blocks, over the window of the rates."""
    view, rates = two_hosts()
    found = lookups_by_host(view, rates)
    assert {host: one.hit_rate for host, one in found.items()} == {"a": 0.75, "b": 0.25, ALL: 0.5}
    assert {one.window_s for one in found.values()} == {10.0}


def test_the_status_of_one_host() -> None:
    """Its tiers and lookups only; what is wrong is said of all."""
    view, rates = two_hosts()
    said = status_view(view, Totals(), rates, expected=("disk-tier",), version="1", host="b")
    assert said.lookups.hit_rate == 0.25
    assert [one.slots_total for one in said.tiers] == [4]
    assert said.reasons == ["disk-tier: no instance is registered"]
    assert said.hosts == ["a", "b"]
    nowhere = status_view(view, Totals(), rates, expected=(), version="1", host="c")
    assert (nowhere.lookups.hit_rate, nowhere.tiers) == (None, [])
