"""How large batches of writes are, and how many bytes a day may have."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvbm_disk_tier.core.effects import LeaseHost, WriteSlots
from kvbm_disk_tier.core.limits import DiskTierLimits
from kvbm_disk_tier.core.pending import (
    ARENA_SHARE,
    DAY_MS,
    FAST_MS,
    SLOW_MS,
    BatchSize,
    WriteBudget,
)

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


HOUR_MS = DAY_MS // 24


def test_without_a_budget_everything_may_be_written() -> None:
    assert WriteBudget(0).take(10**15, 0)


def test_it_begins_empty_and_fills_over_the_day() -> None:
    budget = WriteBudget(24_000)
    assert not budget.take(1, 0)
    assert budget.take(900, HOUR_MS)
    assert not budget.take(900, HOUR_MS), "23/24 of 1,000 an hour"
    assert budget.take(1_000, 3 * HOUR_MS)
    assert not budget.take(100, 3 * HOUR_MS), "no more than an hour's worth is kept"


def test_a_batch_beyond_the_bucket_waits_for_a_full_one_and_is_paid_for() -> None:
    budget = WriteBudget(24_000)
    assert not budget.take(5_000, 0)
    assert budget.take(5_000, 2 * HOUR_MS)
    assert not budget.take(1, 6 * HOUR_MS)
    assert budget.take(1, 7 * HOUR_MS)


def test_what_was_not_written_is_given_back() -> None:
    budget = WriteBudget(24_000)
    assert not budget.take(1_000, 0)
    assert budget.take(1_000, 2 * HOUR_MS)
    budget.give_back(1_000)
    assert budget.take(1_000, 2 * HOUR_MS)


@given(
    st.lists(
        st.tuples(st.integers(0, 3 * HOUR_MS), st.integers(1, 1_000), st.integers(0, 9)),
        max_size=60,
    )
)
def test_in_no_day_more_than_the_budget(steps: list[tuple[int, int, int]]) -> None:
    """Restarts (0) empty the bucket; clocks only go forward."""
    per_day = 24_000
    budget, now_ms = WriteBudget(per_day), 0
    written: list[tuple[int, int]] = []
    for wait_ms, size, restart in steps:
        now_ms += wait_ms
        if restart == 0:
            budget = WriteBudget(per_day)
        if budget.take(size, now_ms):
            written.append((now_ms, size))
    for start_ms, _ in written:
        window = [size for at_ms, size in written if start_ms <= at_ms < start_ms + DAY_MS]
        assert sum(window) <= per_day + 1
