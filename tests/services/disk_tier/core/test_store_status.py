"""The store: when it works, when another one is to be opened, how large its transfers are."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace as replace_limits

import pytest
from kvbm_common.tier.layout import Layout
from kvbm_common.tier.machine import InvalidTransition
from kvbm_disk_tier.core.effects import Effect
from kvbm_disk_tier.core.journal import Replay
from kvbm_disk_tier.core.limits import DISK, OBJECT, DiskTierLimits, Means, StoreKind
from kvbm_disk_tier.core.messages import StoreOpened
from kvbm_disk_tier.core.store_status import STORE_RETRY_MS, StoreStatus

from tests.services.disk_tier.helpers import SLOT_BYTES, layout, opened

LIMITS = DiskTierLimits(batch_blocks_max=2, ahead_batches=3)
SLAB_BYTES = layout(4).slab_bytes


def store(kind: StoreKind = DISK, *, limits: DiskTierLimits = LIMITS) -> StoreStatus:
    """A store that was made and not opened."""
    return StoreStatus(kind, Means(limits, Counter(), list[Effect]().append))


def test_a_store_of_slots_waits_for_an_arena_and_a_bucket_does_not() -> None:
    assert (store(DISK).misfits, store(OBJECT).misfits) == (False, True)


@pytest.mark.parametrize(
    ("sizes", "misfits"),
    [
        ({SLOT_BYTES}, False),
        ({SLOT_BYTES, 2 * SLOT_BYTES}, False),
        ({SLAB_BYTES, 2 * SLAB_BYTES}, False),
        ({SLAB_BYTES + SLOT_BYTES}, True),
        (set(), False),
    ],
)
def test_a_store_fits_one_of_the_arenas_or_is_replaced(sizes: set[int], misfits: bool) -> None:
    """Without an arena what is there stays."""
    disk = store()
    disk.open()
    disk.opened(opened(4))
    disk.follow(sizes)
    assert (disk.works, disk.misfits) == (True, misfits)
    disk.check()


def test_an_open_store_moves_blocks_of_all_sizes_in_batches() -> None:
    """Before it is open nothing moves. Small blocks go together, and weigh as their slots do."""
    disk = store()
    small = store(limits=replace_limits(LIMITS, batch_bytes=8 * SLOT_BYTES))
    disk.open()
    before = disk.has_slots
    disk.opened(opened(16))
    assert (before, disk.has_slots) == (False, True)
    assert [small.transfer_blocks(size) for size in (1, SLOT_BYTES, 2 * SLOT_BYTES)] == [8, 8, 4]
    assert disk.transfer_blocks(1) == LIMITS.batch_blocks_max, "without bytes to fill"
    assert disk.ahead_load == 6 * SLOT_BYTES
    assert disk.write_load_max == LIMITS.write_blocks_max * SLOT_BYTES


def test_a_store_that_could_not_be_made_is_tried_again_later() -> None:
    disk = store()
    disk.open()
    assert not disk.may_open(0), "it is being opened"
    disk.open_failed("the disk is full", 10)
    assert (disk.problem, disk.wants_opening) == ("the disk is full", True)
    assert not disk.may_open(10 + STORE_RETRY_MS - 1)
    assert disk.may_open(10 + STORE_RETRY_MS)
    disk.open()
    assert not disk.wants_opening, "it is being opened"


def test_a_bucket_that_goes_down_before_it_is_open_works_once_it_is() -> None:
    bucket = store(OBJECT)
    bucket.open()
    bucket.went_down("away")
    assert (bucket.works, bucket.problem) == (False, "away")
    bucket.opened(StoreOpened(Layout.unsized(4), Replay({}, 1, 0, 0)))
    assert (bucket.works, bucket.problem) == (True, "")
    bucket.went_down("away")
    assert not bucket.works
    bucket.came_up()
    assert (bucket.works, bucket.problem) == (True, "")
    bucket.check()


def test_a_store_is_not_opened_twice_at_a_time() -> None:
    disk = store()
    disk.open()
    with pytest.raises(InvalidTransition, match="no 'open' in OPENING"):
        disk.open()
