"""The times of loads: queues that belong to what is before, and loads that tell nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvbm_common.tier.cost_line import LOADS_MIN
from kvbm_host_tier.core.load_times import UNKNOWN, LoadTimes

MIB = 1 << 20


@given(sizes=st.lists(st.integers(1, 16), min_size=2 * LOADS_MIN, max_size=30))
def test_a_load_behind_others_is_not_taken_for_a_slow_medium(sizes: list[int]) -> None:
    """A medium that brings one MiB in 10 ms, one after the other; all are asked for at once."""
    times, now_ms = LoadTimes(), 0
    loads = [times.begin("disk", size * MIB, now_ms) for size in sizes]
    for size, load in zip(sizes, loads, strict=True):
        now_ms += 10 * size
        times.end(load, now_ms, counts=True)
        times.check()
    outlook = times.outlook("disk", now_ms)
    assert outlook.queued == 0
    assert outlook.ms(8 * MIB) == pytest.approx(80, rel=0.1, abs=1)


def test_what_fails_at_once_tells_nothing() -> None:
    times = LoadTimes()
    for _ in range(10):
        times.end(times.begin("object", MIB, 0), 1, counts=False)
    assert times.outlook("object", 1).estimate == UNKNOWN
