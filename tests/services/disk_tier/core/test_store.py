"""The store: when it works, when another one is to be opened, how large its transfers are."""

from __future__ import annotations

from collections import Counter

import pytest
from kvbm_common.tier.machine import InvalidTransition
from kvbm_disk_tier.core.limits import DISK, OBJECT, DiskTierLimits, StoreKind
from kvbm_disk_tier.core.store import STORE_RETRY_MS, Store

from tests.services.disk_tier.helpers import SLOT_BYTES, opened

LIMITS = DiskTierLimits(batch_blocks_max=2, ahead_batches=3)


def store(kind: StoreKind = DISK) -> Store:
    """A store that was made and not opened."""
    return Store(kind, LIMITS, Counter())


def test_a_store_of_slots_waits_for_an_arena_and_a_bucket_does_not() -> None:
    assert (store(DISK).misfits, store(OBJECT).misfits) == (False, True)


@pytest.mark.parametrize(
    ("sizes", "misfits"),
    [
        ({SLOT_BYTES}, False),
        ({SLOT_BYTES, 2 * SLOT_BYTES}, False),
        ({2 * SLOT_BYTES}, True),
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


def test_an_open_store_takes_slots_of_its_size_in_batches() -> None:
    disk = store()
    disk.open()
    disk.opened(opened(4))
    taken = [disk.takes(size) for size in (SLOT_BYTES, 2 * SLOT_BYTES, 0)]
    assert taken == [True, False, False]
    assert (disk.transfer_blocks, disk.ahead_blocks) == (2, 6)


def test_a_store_that_could_not_be_made_is_tried_again_later() -> None:
    disk = store()
    disk.open()
    assert not disk.may_open(0), "it is being opened"
    disk.open_failed("the disk is full", 10)
    assert disk.problem == "the disk is full"
    assert not disk.may_open(10 + STORE_RETRY_MS - 1)
    assert disk.may_open(10 + STORE_RETRY_MS)


def test_a_bucket_that_goes_down_before_it_is_open_works_once_it_is() -> None:
    bucket = store(OBJECT)
    bucket.open()
    bucket.went_down("away")
    assert (bucket.works, bucket.problem) == (False, "away")
    bucket.opened(opened(4))
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
