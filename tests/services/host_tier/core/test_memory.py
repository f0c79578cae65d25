"""The bound of a host tier's memory."""

from __future__ import annotations

import tracemalloc

import pytest
from kvbm_common.identity import SequenceHash
from kvbm_common.tier.departures import ENTRY_BYTES, Departures
from kvbm_host_tier.core.limits import HostTierLimits
from kvbm_host_tier.core.memory import EXPLANATION_BYTES, parts_of


def test_the_bound_follows_slots_and_settings() -> None:
    small = parts_of(HostTierLimits(), slot_count=100, below_count=0)
    large = parts_of(HostTierLimits(), slot_count=10_000, below_count=50_000)
    assert small.keys() == large.keys()
    for name in ("slots", "blocks_below", "departures"):
        assert small[name] < large[name]
    without = parts_of(HostTierLimits(explain_requests=0), slot_count=100, below_count=0)
    assert sum(small.values()) - sum(without.values()) == 100_000 * EXPLANATION_BYTES


def test_a_departure_takes_what_is_declared() -> None:
    """Goal: the bound of a full table is what a full table takes.

    Blocks that leave one by one share no record, which takes the most.
    """
    departures = Departures()
    departures.size_for(2_000)
    tracemalloc.start()
    for number in range(16_000):
        departures.note([SequenceHash(number.to_bytes(16, "big"))], "evicted", number // 8)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert taken == pytest.approx(len(departures) * ENTRY_BYTES, rel=0.6)
    assert len(departures) == 16_000
