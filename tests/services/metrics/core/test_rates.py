"""Rates and flows: what instances count becomes what goes where per second."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvbm_common.wire.verbs import StatsReply
from kvbm_metrics.core import flows
from kvbm_metrics.core.collector import status_view, tier_views
from kvbm_metrics.core.fleet_view import FleetView
from kvbm_metrics.core.kvbm_totals import Totals
from kvbm_metrics.core.rates import NO_RATE, SPACING_S, WINDOW_S, Rate, Rates

from tests.services.metrics.samples import alive, tier_stats


def host(counted: float, *, epoch: int = 1) -> StatsReply:
    """A host tier that has counted something."""
    figures = {"lookups": counted, "offload_blocks_d2h": 2 * counted}
    return tier_stats("host-tier", used=1, total=4, epoch=epoch, figures=figures)


def lookups_per_s(rates: Rates) -> float:
    """Of the one host tier."""
    rates.check()
    return rates.of("host-tier", "a", "0").sum("lookups")


def test_a_rate_is_taken_over_ten_seconds() -> None:
    """1. One sample is none. 2. Two are. 3. What is older than the window does not count."""
    rates = Rates()
    assert rates.of("host-tier", "a", "0") is NO_RATE
    rates.take([host(0)], 0.0)
    assert rates.of("host-tier", "a", "0").window_s == 0
    rates.take([host(100)], 2.0)
    assert lookups_per_s(rates) == 50
    for second in range(3, 30):
        rates.take([host(100)], float(second))
    assert lookups_per_s(rates) == 0
    assert rates.of("host-tier", "a", "0").window_s == WINDOW_S


def test_a_new_life_begins_a_new_window() -> None:
    """Counts that have gone back are not a rate below zero."""
    rates = Rates()
    rates.take([host(100)], 0.0)
    rates.take([host(5, epoch=2)], 5.0)
    assert lookups_per_s(rates) == 0
    rates.take([host(15, epoch=2)], 10.0)
    assert lookups_per_s(rates) == 2


def test_a_storm_of_questions_adds_no_samples() -> None:
    """Who asks a hundred times a second sees the same as who asks once."""
    rates = Rates()
    for hundredth in range(3_000):
        rates.take([host(hundredth)], hundredth / 100)
    rates.check()
    assert lookups_per_s(rates) == pytest.approx(100, rel=0.01)


@given(st.lists(st.tuples(st.floats(0, 30), st.integers(0, 50), st.integers(1, 3)), max_size=60))
def test_every_order_of_answers(steps: list[tuple[float, int, int]]) -> None:
    """Times grow, counts and lives do as they like: no rate is below zero, the window is kept."""
    rates, now_s = Rates(), 0.0
    for step_s, counted, epoch in steps:
        now_s += step_s
        rates.take([host(counted, epoch=epoch)], now_s)
        rates.check()
        assert lookups_per_s(rates) >= 0
        longest = WINDOW_S + 30  # Who has been silent is compared with what was said before that.
        window_s = rates.of("host-tier", "a", "0").window_s
        assert window_s == 0 or SPACING_S <= window_s <= longest


HOST = {
    "offload_blocks_d2h": 8.0, "promoted_blocks": 3.0, "peer_pulled_blocks": 1.0, "lookups": 2.0,
    "onboard_blocks_h2d": 4.0, "onboard_blocks_d2d": 3.0, "lookup_blocks.remote": 1.0,
    "lookup_blocks.host": 4.0, "lookup_blocks.disk": 3.0, "lookup_blocks.miss": 2.0,
    "matched_tokens": 128.0, "evictions.evicted": 5.0, "evictions.admin": 1.0,
    "bytes.d2h": 880.0, "bytes.r2h": 110.0, "bytes.fill": 330.0, "bytes.h2d": 900.0,
}  # fmt: skip
DISK = {
    "offload_blocks_h2d": 6.0, "bytes.payload": 540.0, "fill_blocks": 3.0, "bytes.read": 300.0,
}  # fmt: skip


def counted() -> list[flows.Counted]:
    """A host tier and a disk tier."""
    return [
        ("host", Rate(10.0, HOST)),
        ("disk", Rate(10.0, DISK)),
    ]


def test_what_goes_in_and_out_of_a_tier() -> None:
    """In bytes that the tiers have counted: blocks have several sizes."""
    host_tier, disk_tier = (flows.rates_of(*one).model_dump() for one in counted())
    assert host_tier == {
        "window_s": 10.0, "blocks_in": 12.0, "blocks_out": 8.0, "blocks_evicted": 6.0,
        "bytes_in": 1320.0, "bytes_out": 900.0,
    }  # fmt: skip
    assert disk_tier == {
        "window_s": 10.0, "blocks_in": 6.0, "blocks_out": 3.0, "blocks_evicted": 0.0,
        "bytes_in": 540.0, "bytes_out": 300.0,
    }  # fmt: skip


def test_flows_add_up_each_way_over_all_instances() -> None:
    twice = [*counted(), *counted()]
    found = {(one.source, one.target): (one.blocks, one.bytes) for one in flows.flows_of(twice)}
    assert found == {
        ("device", "host"): (16.0, 1760.0),
        ("host", "device"): (16.0, 1800.0),
        ("remote", "host"): (2.0, 220.0),
        ("host", "disk"): (12.0, 1080.0),
        ("disk", "host"): (6.0, 600.0),
    }


def test_lookups_are_counted_by_where_blocks_were() -> None:
    told = flows.lookups_of(counted())
    assert (told.window_s, told.lookups, told.matched_tokens) == (10.0, 2.0, 128.0)
    assert told.blocks == {"host": 4.0, "disk": 3.0, "object": 0.0, "remote": 1.0, "miss": 2.0}


def test_views_have_rates_policy_and_fragmentation() -> None:
    """What a tier says of itself reaches `/v1/tiers` and `/v1/status`."""
    extra: dict[str, Any] = {"policy": "lfu", "block_bytes": 150, "figures": {"draining": 1.0}}
    tier = tier_stats("disk-tier", used=2, total=4, **extra)
    rates = Rates()
    view = FleetView(instances=[alive(tier)])
    [shown] = tier_views(view, rates)
    assert (shown.policy, shown.draining, shown.fragmentation) == ("lfu", True, 0.25)
    status = status_view(view, Totals(), rates, expected=(), version="1")
    assert {(one.source, one.target) for one in status.flows} == {
        ("host", "disk"),
        ("disk", "host"),
    }
    assert status.lookups.lookups == 0
