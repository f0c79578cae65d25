"""The bound of a disk tier's memory."""

from __future__ import annotations

import pytest
from kvbm_common.config.settings import Settings
from kvbm_common.tier.name_history import ENTRY_BYTES
from kvbm_common.wire.admin import ResizeRequest
from kvbm_disk_tier.core.limits import DiskTierLimits, limits_of
from kvbm_disk_tier.core.memory import parts_of
from kvbm_disk_tier.core.messages import AdminAsked

from tests.services.disk_tier.helpers import Disk


def test_the_bound_follows_the_slots() -> None:
    """A small disk tier had the histories of a large one: 185 MB whatever its size."""
    small = parts_of(DiskTierLimits(), slot_count=3_000)
    large = parts_of(DiskTierLimits(), slot_count=300_000)
    assert small["departures"] + small["sights"] < 16 << 20
    assert small["departures"] < large["departures"]
    assert small["sights"] < large["sights"]
    buffered = parts_of(DiskTierLimits(), slot_count=3_000, buffer_bytes=1 << 20)
    assert sum(buffered.values()) == sum(small.values()) + (1 << 20)


@pytest.mark.parametrize("slot_count", [0, 100, 1_000_000])
def test_the_bound_follows_the_chosen_history(slot_count: int) -> None:
    """The setting is for departures; sights of the filter follow the slots."""
    limits = limits_of(Settings.load({"KVBM_HISTORY_ENTRIES": "5"}))
    chosen, usual = (parts_of(one, slot_count=slot_count) for one in (limits, DiskTierLimits()))
    assert chosen["departures"] == 5 * ENTRY_BYTES
    assert chosen["sights"] == usual["sights"]


def size_of(disk: Disk) -> float:
    """The gauge of the departures."""
    return disk.core.view.usages(disk.now_ms)["departures"].size


def test_departures_have_the_chosen_size_before_the_store_opens_and_after_a_resize() -> None:
    disk = Disk(slots=3, limits=DiskTierLimits(history_entries=2), ready=False)
    assert size_of(disk) == 2
    disk.make_ready()
    disk.store(1, 2, 3)
    disk.step(AdminAsked(0, "resize", ResizeRequest(slots=1)))
    assert len(disk.core.inventory.table) == 1
    usage = disk.core.view.usages(disk.now_ms)["departures"]
    assert (usage.used, usage.size) == (2, 2)


def test_departures_follow_the_slots_where_nothing_is_chosen() -> None:
    assert size_of(Disk(slots=1_000)) == 8_000
