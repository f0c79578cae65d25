"""Pairs: the interval of their median, when it is narrow, and a cache that is slower."""

from __future__ import annotations

import random

import pytest
from kvbm_cli.demo.pairs import NARROW, PAIRS_MIN, Comparison, compare


def of_ratios(*ratios: float) -> Comparison:
    """Return the comparison of requests that take 10 ms when they are recomputed."""
    found = compare([(10 * ratio, 10.0) for ratio in ratios])
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("count", "low", "high"),
    [(1, 1, 1), (2, 1, 2), (6, 1, 6), (10, 2, 9), (12, 3, 10), (20, 6, 15), (50, 18, 33),
     (100, 40, 61)],
)  # fmt: skip
def test_the_interval_is_that_of_the_printed_tables(count: int, low: int, high: int) -> None:
    """Goal: ranks for 95 % as in tables of the sign test (Conover, Practical Nonparametric
    Statistics); below six values there is no such interval, and all of them are taken."""
    ratios = [float(number) for number in range(1, count + 1)]
    random.Random(count).shuffle(ratios)
    found = of_ratios(*ratios)
    assert (found.pairs, found.ratio_low, found.ratio_high) == (count, low, high)
    assert found.ratio == (count + 1) / 2


def test_the_interval_contains_the_true_median_as_often_as_it_says() -> None:
    """Goal: 2,000 draws of 24 ratios from a skewed distribution whose median is known."""
    draw = random.Random(1)
    inside = 0
    for _ in range(2_000):
        found = of_ratios(*(draw.lognormvariate(0.0, 1.0) for _ in range(24)))
        inside += found.ratio_low <= 1.0 <= found.ratio_high
    assert 0.94 <= inside / 2_000 <= 0.985


def test_pairs_end_when_their_interval_is_narrow() -> None:
    spread = [0.5 + number / 100 for number in range(PAIRS_MIN)]
    assert of_ratios(*spread).is_narrow
    assert not of_ratios(*spread[:-1]).is_narrow, "there are too few"
    wide = [0.5 + 3 * number * NARROW / PAIRS_MIN for number in range(PAIRS_MIN)]
    assert not of_ratios(*wide).is_narrow


def test_words_say_which_is_faster() -> None:
    assert of_ratios(*[0.6] * 12).words == (
        "40% faster with the cache (40% to 40%: 95 % interval; 12 pairs)"
    )
    assert of_ratios(*[1.5] * 12).words == (
        "50% SLOWER with the cache (50% to 50%: 95 % interval; 12 pairs)"
    )
    found = of_ratios(*[0.9, 1.2] * 6).words
    assert found.startswith("no clear difference: between 10% faster and 20% slower")
    assert found.endswith("(95 % interval, still wide; 12 pairs)")


def test_without_pairs_there_is_no_comparison() -> None:
    assert compare([]) is None
    assert compare([(1.0, 0.0)]) is None, "nothing was computed"
