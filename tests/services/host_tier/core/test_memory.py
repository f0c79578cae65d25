"""The bound of a host tier's memory."""

from __future__ import annotations

from typing import Any

import pytest
from kvbm_common.tier import name_history
from kvbm_common.wire.admin import ResizeRequest
from kvbm_host_tier.core.explanation_ring import ENTRY_BYTES
from kvbm_host_tier.core.first_blocks import FIRST_BLOCKS_MIN
from kvbm_host_tier.core.limits import HostTierLimits
from kvbm_host_tier.core.memory import parts_of
from kvbm_host_tier.core.messages import AdminAsked

from tests.services.host_tier.helpers import SLOT_BYTES, Host

HISTORIES = ("departures", "departures_disk", "departures_object", "first_blocks")


def test_the_bound_follows_slots_and_settings() -> None:
    small = parts_of(HostTierLimits(), slot_count=100, below_count=0)
    large = parts_of(HostTierLimits(), slot_count=10_000, below_count=50_000)
    assert small.keys() == large.keys()
    for name in ("slots", "blocks_below", "departures", "first_blocks"):
        assert small[name] < large[name]
    without = parts_of(HostTierLimits(explain_requests=0), slot_count=100, below_count=0)
    assert sum(small.values()) - sum(without.values()) == 100_000 * ENTRY_BYTES


@pytest.mark.parametrize("slot_count", [0, 100, 1_000_000])
def test_the_bound_follows_the_chosen_histories(slot_count: int) -> None:
    """Three lists of departures and one of first blocks, five entries each."""
    parts = parts_of(HostTierLimits(history_entries=5), slot_count=slot_count, below_count=0)
    assert parts["departures"] == 3 * 5 * name_history.ENTRY_BYTES
    assert parts["first_blocks"] == 5 * name_history.ENTRY_BYTES


def sizes_of(host: Host) -> list[float]:
    """The gauges of the histories."""
    usages = host.core.view.usages(host.now_ms)
    return [usages[name].size for name in HISTORIES]


@pytest.mark.parametrize(
    ("below", "blocks"),
    [
        ({"disk_bytes": 50_000 * SLOT_BYTES}, 50_000),
        ({"disk_blocks": 50_000, "disk_bytes": SLOT_BYTES}, 50_000),
        ({"disk_blocks": 0, "disk_bytes": 50_000 * SLOT_BYTES}, 50_000),
        ({"disk_blocks": 50_000, "object_blocks": 30_000}, 80_000),
    ],
)
def test_former_blocks_remember_what_leaves_the_tiers_below(
    below: dict[str, Any], blocks: int
) -> None:
    """Host memory has four slots, and the filter a horizon for all blocks of the tiers below."""
    host = Host(slots=4, **below)
    host.store(1)
    names = 100 * (4 + blocks)
    assert names <= host.core.view.usages(host.now_ms)["former_blocks"].size < 1.01 * names
    declared = parts_of(HostTierLimits(**below), slot_count=4, below_count=blocks)
    assert declared["former_blocks"] == 3 * names


def test_histories_have_the_chosen_size_before_the_first_block_and_after_a_resize() -> None:
    host = Host(slots=4, history_entries=5)
    assert sizes_of(host) == [5] * 4
    host.store(1, 2, 3, 4)
    host.step(AdminAsked(1, "resize", ResizeRequest(slots=2)))
    assert host.slots["total"] == 2
    assert sizes_of(host) == [5] * 4


def test_histories_follow_the_slots_where_nothing_is_chosen() -> None:
    host = Host(slots=1_000)
    host.store(1)
    assert sizes_of(host) == [8_000, 8_000, 8_000, FIRST_BLOCKS_MIN]
