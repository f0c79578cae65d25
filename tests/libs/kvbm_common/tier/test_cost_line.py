"""The cost line: least squares that forget, hiccups, and media that change."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvbm_common.tier.cost_line import KEPT, SURPRISES_MAX, Line

MIB = 1 << 20


@given(st.lists(st.tuples(st.integers(1, 100), st.integers(0, 50)), min_size=2, max_size=30))
def test_the_line_is_that_of_weighted_least_squares(loads: list[tuple[int, int]]) -> None:
    """numpy's, wherever sizes differ enough and neither part of it is negative."""
    line = Line()
    for size, took_ms in loads:
        line.add(size, took_ms, 0)
    sizes, times = np.array(loads, float).T
    weights = KEPT ** np.arange(len(loads))[::-1]
    mean = np.average(sizes, weights=weights)
    estimate = line.estimate().ms(50)
    assert estimate >= 0
    if np.average((sizes - mean) ** 2, weights=weights) < 0.02 * mean**2:
        return
    slope, start = np.polyfit(sizes, times, 1, w=np.sqrt(weights))
    if slope > 1e-6 and start > 1e-6:
        assert estimate == pytest.approx(start + slope * 50, rel=1e-6)


def test_loads_of_one_size_say_that_twice_as_much_takes_twice_as_long() -> None:
    line = Line()
    for _ in range(5):
        line.add(10, 3, 0)
    assert line.estimate().ms(20) == pytest.approx(6)


def test_a_start_that_costs_time_is_not_multiplied() -> None:
    """10 ms for whatever it is, and 1 ms a block: 30 blocks take 40 ms, not 165."""
    line = Line()
    for size in (2, 4, 2, 4, 8):
        line.add(size, 10 + size, 0)
    assert line.estimate().ms(30) == pytest.approx(40)


@given(
    start_ms=st.floats(0, 300),
    ms_per_mib=st.floats(0.05, 20),
    seed=st.integers(0, 2**31),
    spread=st.floats(0, 0.2),
)
def test_a_line_finds_the_truth_under_noise(
    start_ms: float, ms_per_mib: float, seed: int, spread: float
) -> None:
    """Loads of 1 to 64 MiB that take up to a fifth more or less: it is off by a fifth of the
    largest at most, six times what the noise of twenty loads does at either end."""
    rng, line = random.Random(seed), Line()
    for _ in range(60):
        size = rng.randint(1, 64)
        truth_ms = start_ms + ms_per_mib * size
        line.observe(size * MIB, truth_ms * rng.uniform(1 - spread, 1 + spread), 0)
    largest_ms = start_ms + ms_per_mib * 64
    for size in (8, 32, 64):
        truth_ms = start_ms + ms_per_mib * size
        found_ms = line.estimate().ms(size * MIB)
        assert found_ms == pytest.approx(truth_ms, abs=1 + 0.2 * largest_ms)


@given(before=st.floats(20, 100), factor=st.sampled_from([1 / 20, 1 / 5, 5, 20]))
def test_a_medium_that_has_changed_is_known_after_some_loads(before: float, factor: float) -> None:
    line = Line()
    for size in (1, 2, 3, 4) * 10:
        line.observe(size * MIB, before * size, 0)
    after = before * factor
    for size in (4, 2, 3, 1, 2)[: SURPRISES_MAX + 2]:
        line.observe(size * MIB, after * size, 0)
    assert line.estimate().ms(4 * MIB) == pytest.approx(4 * after, rel=0.2, abs=2)


def test_one_hiccup_changes_little() -> None:
    """Two seconds once, among loads of 10 ms: twice as long is believed, and soon forgotten."""
    line = Line()
    for size in (1, 2, 3, 4) * 5:
        line.observe(size * MIB, 10 * size, 0)
    line.observe(2 * MIB, 2_000, 0)
    assert line.estimate().ms(2 * MIB) < 25
