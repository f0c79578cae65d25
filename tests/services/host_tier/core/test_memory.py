"""The bound of a host tier's memory."""

from __future__ import annotations

from kvbm_host_tier.core.explanation_ring import ENTRY_BYTES
from kvbm_host_tier.core.limits import HostTierLimits
from kvbm_host_tier.core.memory import parts_of


def test_the_bound_follows_slots_and_settings() -> None:
    small = parts_of(HostTierLimits(), slot_count=100, below_count=0)
    large = parts_of(HostTierLimits(), slot_count=10_000, below_count=50_000)
    assert small.keys() == large.keys()
    for name in ("slots", "blocks_below", "departures", "first_blocks"):
        assert small[name] < large[name]
    without = parts_of(HostTierLimits(explain_requests=0), slot_count=100, below_count=0)
    assert sum(small.values()) - sum(without.values()) == 100_000 * ENTRY_BYTES
