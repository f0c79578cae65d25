"""The write budget: how many bytes a day may have."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from kvbm_disk_tier.core.write_budget import DAY_MS, WriteBudget

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


def test_a_block_beyond_the_bucket_waits_for_a_full_one_and_is_paid_for() -> None:
    budget = WriteBudget(24_000)
    assert not budget.take(5_000, 0)
    assert budget.take(5_000, 2 * HOUR_MS)
    assert not budget.take(1, 6 * HOUR_MS)
    assert budget.take(1, 7 * HOUR_MS)


def test_a_batch_has_no_more_blocks_than_a_full_bucket_pays_for() -> None:
    """1,000 bytes: 3 blocks of 300; of 5,000 one at a time."""
    budget = WriteBudget(24_000)
    assert [budget.blocks_at_once(size) for size in (1, 300, 1_000, 5_000)] == [1_000, 3, 1, 1]


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
