"""What a disk tier knows of blocks that the host tier misses."""

from __future__ import annotations

import pytest
from kvbm_common.wire.explain import FateEntry
from kvbm_disk_tier.core.effects import LeaseHost, WriteSlots
from kvbm_disk_tier.core.frequency_filter import DECAY_STEP_MS
from kvbm_disk_tier.core.limits import DiskTierLimits
from kvbm_disk_tier.core.messages import StoreDown, WritersKnown, Written

from tests.services.disk_tier.helpers import Disk, name, of, one, writing


def fate(disk: Disk, number: int) -> FateEntry:
    """Of one block, now."""
    [entry] = disk.core.view.fates([name(number)], disk.now_ms).fates
    return entry


def test_held_evicted_and_never_heard_of() -> None:
    """The policy is named; what was read wrong, too, has a fate."""
    disk = Disk(slots=1)
    disk.store(1)
    assert fate(disk, 1).why == "held"
    disk.now_ms += 10
    disk.store(2)
    disk.now_ms += 5
    assert fate(disk, 1) == FateEntry(why="evicted", ago_ms=5, detail="lru")
    assert fate(disk, 9) == FateEntry(why="")


def test_the_filter_kept_it_out() -> None:
    """Seen once: 1 of 2. Counted down to nothing, it was wanted too long ago."""
    disk = Disk(filtered=True)
    disk.host_stored(1)
    assert fate(disk, 1) == FateEntry(why="filtered", detail="count 1 of 2")
    disk.wait(1)
    disk.wait(DECAY_STEP_MS)
    assert fate(disk, 1).detail == "was wanted too long ago to count"


def test_a_block_that_was_lost_on_its_way_says_so() -> None:
    """Of a batch of two the second did not arrive."""
    disk = Disk()
    write = writing(disk, 1, 2)
    disk.finish(disk.step(Written(write.write, (1,))))
    assert fate(disk, 1).why == "held"
    assert fate(disk, 2) == FateEntry(why="not_written", detail="lost")


def test_what_another_instance_writes_is_not_ours_to_explain() -> None:
    disk = Disk(filtered=True)
    disk.step(WritersKnown(frozenset({"1"})))
    disk.host_stored(1)
    assert fate(disk, 1) == FateEntry(why="")


def test_a_block_that_waits_says_for_what() -> None:
    """1. Its turn. 2. The store. 3. Written."""
    disk = Disk()
    effects = disk.host_stored(1)
    assert fate(disk, 1) == FateEntry(why="waiting", detail="its write had not begun or ended")
    disk.step(StoreDown("the disk is full"))
    assert fate(disk, 1).detail == "the store: the disk is full"
    disk.finish(effects)
    assert fate(disk, 1).why == "held"


def test_a_write_budget_that_is_used_up() -> None:
    disk = Disk(write_budget=1)
    disk.core.pending.budget.spend(10**9)
    disk.host_stored(1)
    assert fate(disk, 1) == FateEntry(why="waiting", detail="the write budget is used up")


def test_a_block_that_left_host_memory_before_its_write() -> None:
    disk = Disk()
    lease = one(disk.host_stored(1), LeaseHost)
    disk.finish(disk.leased(lease, 1))
    expected = "it had left host memory when its turn came"
    assert fate(disk, 1) == FateEntry(why="not_written", detail=expected)


def test_a_write_that_failed() -> None:
    disk = Disk()
    lease = one(disk.host_stored(1), LeaseHost)
    write = one(disk.leased(lease), WriteSlots)
    disk.finish(disk.write_failed(write))
    assert fate(disk, 1) == FateEntry(why="not_written", detail="transfer_failed")


@pytest.mark.parametrize("valid", [True, False])
def test_a_lease_that_did_not_hold(valid: bool) -> None:
    disk = Disk()
    lease = one(disk.host_stored(1), LeaseHost)
    write = one(disk.leased(lease), WriteSlots)
    [release] = disk.written(write)
    disk.finish(disk.released(release, valid=valid))  # type: ignore[arg-type]
    assert fate(disk, 1).why == ("held" if valid else "not_written")


def test_too_many_that_wait() -> None:
    disk = Disk(limits=DiskTierLimits(pending_max=1, writes_max=1, batch_blocks_max=1))
    disk.host_stored(1)
    effects = disk.host_stored(2, 3)
    assert not of(effects, WriteSlots)
    assert fate(disk, 3) == FateEntry(why="not_written", detail="too many blocks were waiting")


def test_draining_gives_up_what_waits() -> None:
    disk = Disk(limits=DiskTierLimits(writes_max=1, batch_blocks_max=1))
    disk.host_stored(1, 2)
    disk.core.inventory.draining = True
    disk.wait(1)
    assert fate(disk, 2) == FateEntry(why="not_written", detail="draining")
