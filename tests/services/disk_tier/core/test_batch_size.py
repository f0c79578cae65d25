"""How large batches of writes are."""

from __future__ import annotations

import pytest
from kvbm_disk_tier.core.batch_size import ARENA_SHARE, FAST_MS, SLOW_MS, BatchSize
from kvbm_disk_tier.core.effects import LeaseHost, WriteSlots
from kvbm_disk_tier.core.limits import DiskTierLimits

from tests.services.disk_tier.helpers import ARENA_SLOTS, Disk, asked, of, one


@pytest.mark.parametrize(
    ("took_ms", "sizes"),
    [
        (FAST_MS, [2, 4, 4]),
        (FAST_MS + 1, [1, 1, 1]),
        (SLOW_MS + 1, [1, 1, 1]),
    ],
)
def test_a_fast_disk_gets_larger_batches(took_ms: int, sizes: list[int]) -> None:
    size, found = BatchSize(4), []
    for _ in sizes:
        size.ended(took_ms)
        found.append(size.transfers)
    assert found == sizes


def test_a_disk_that_becomes_slow_gets_smaller_ones() -> None:
    """4 → 4 where it is neither, then 2, 1, 1."""
    size, found = BatchSize(4), []
    for took_ms in (1, 1, SLOW_MS, 9_999, 9_999, 9_999):
        size.ended(took_ms)
        found.append(size.transfers)
    assert found == [2, 4, 4, 2, 1, 1]


@pytest.mark.parametrize(("took_ms", "second"), [(FAST_MS, [2, 3]), (FAST_MS + 1, [2])])
def test_the_next_batch_is_as_large_as_the_last_one_was_fast(
    took_ms: int, second: list[int]
) -> None:
    disk = Disk(slots=8, limits=DiskTierLimits(batch_blocks_max=1))
    write = one(disk.leased(one(disk.host_stored(1), LeaseHost)), WriteSlots)
    disk.wait(took_ms)
    disk.finish(disk.written(write))
    assert asked(of(disk.host_stored(2, 3, 4), LeaseHost)[0]) == second


def test_no_batch_pins_more_than_a_part_of_the_arena() -> None:
    """Four transfers would be four blocks; of 100 slots one part in 32 is three."""
    disk = Disk(slots=50, limits=DiskTierLimits(batch_blocks_max=1))
    for number in (1, 2):
        disk.store(number)
    assert ARENA_SLOTS // ARENA_SHARE == 3
    assert asked(of(disk.host_stored(*range(11, 30)), LeaseHost)[0]) == [11, 12, 13]
