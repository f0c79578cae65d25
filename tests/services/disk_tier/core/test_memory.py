"""The bound of a disk tier's memory."""

from __future__ import annotations

from kvbm_disk_tier.core.limits import DiskTierLimits
from kvbm_disk_tier.core.memory import parts_of


def test_the_bound_follows_the_slots() -> None:
    """A small disk tier had the histories of a large one: 185 MB whatever its size."""
    small = parts_of(DiskTierLimits(), slot_count=3_000)
    large = parts_of(DiskTierLimits(), slot_count=300_000)
    assert small["departures"] + small["sights"] < 16 << 20
    assert small["departures"] < large["departures"]
    assert small["sights"] < large["sights"]
    buffered = parts_of(DiskTierLimits(), slot_count=3_000, buffer_bytes=1 << 20)
    assert sum(buffered.values()) == sum(small.values()) + (1 << 20)
