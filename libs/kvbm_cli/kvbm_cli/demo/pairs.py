"""Pairs: the same request once with the cache and once recomputed, until the answer is clear.

Requests differ in length and in what the cache has of them, so a pair is compared by its ratio. The
interval of the median is that of order statistics: it assumes no distribution of the ratios.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import msgspec

PAIRS_MIN = 12
PAIRS_MAX = 240
"""Some 20 s on two cores; an interval that is wide by then is called so."""
OUTSIDE_MAX = 0.05
"""The probability that the median of all such pairs is outside the interval, at most: 95 %
confidence."""
NARROW = 0.15
"""Width of the interval, as a part of the time that recomputing takes."""


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Time to first token with the cache, as a part of the time recomputed: median, interval."""

    pairs: int
    ratio: float
    ratio_low: float
    ratio_high: float

    @property
    def is_narrow(self) -> bool:
        """Tell whether the interval is narrow enough: more pairs would say little more."""
        return self.pairs >= PAIRS_MIN and self.ratio_high - self.ratio_low <= NARROW

    @property
    def words(self) -> str:
        """Return the result in words: which is faster, and how sure that is."""
        low, high = self.ratio_low, self.ratio_high
        kind = "interval" if self.is_narrow else "interval, still wide"
        sure = f"95 % {kind}; {self.pairs} pairs"
        if high < 1:
            faster = f"{1 - self.ratio:.0%} faster with the cache"
            return f"{faster} ({1 - high:.0%} to {1 - low:.0%}: {sure})"
        if low > 1:
            slower = f"{self.ratio - 1:.0%} SLOWER with the cache"
            return f"{slower} ({low - 1:.0%} to {high - 1:.0%}: {sure})"
        span = f"between {1 - low:.0%} faster and {high - 1:.0%} slower with the cache"
        return f"no clear difference: {span} ({sure})"


def compare(pairs: Sequence[tuple[float, float]]) -> Comparison | None:
    """Compare pairs of times, each with the cache and recomputed; None: there is no pair."""
    ratios = sorted(cached / recomputed for cached, recomputed in pairs if recomputed > 0)
    if not ratios:
        return None
    outside = _ranks_outside(len(ratios))
    return Comparison(
        pairs=len(ratios),
        ratio=round(statistics.median(ratios), 4),
        ratio_low=round(ratios[outside], 4),
        ratio_high=round(ratios[-1 - outside], 4),
    )


def _ranks_outside(count: int) -> int:
    """Return how many of the smallest, and of the largest, lie outside the median's interval.

    The number of values below the median is binomial with p = 1/2. Below six values no interval
    has the confidence: then it is from the smallest to the largest.
    """
    below, outside = 0, 0
    for rank in range((count + 1) // 2):
        below += math.comb(count, rank)
        if 2 * below > OUTSIDE_MAX * 2**count:
            break
        outside = rank
    return outside
