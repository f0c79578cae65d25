"""Worth: would an engine compute blocks sooner than they can be brought to host memory?

How fast it computes an operator says (KVBM_RECOMPUTE_TOKENS_PER_S): services do not measure
engines. How long loads take is measured here, by what they came from: a line through the latest
ones, `ms = start + slope * bytes`, in which each load weighs less than the next. It knows queues
and slow disks, because they were in the way of those loads, too. Where little was measured, or
nothing lately, a load is made, and measured: a tier that has recovered is found out by that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from kvbm_host_tier.answers import Medium, OnboardState

KEPT = 0.9
"""A load weighs so much of the one after it: some twenty of them count."""
LOADS_MIN = 3
"""Less says nothing: the first load after a start opens files and connections."""
FORGOTTEN_MS = 30_000
"""As long as a failed block is avoided."""
SPREAD_MIN = 0.01
"""Sizes that differ by less than a tenth of their mean (squared here) make no line."""


@dataclass(slots=True)
class Line:
    """Loads of one medium: decaying sums of their sizes (`x`, bytes) and times (`y`, ms)."""

    loads: int = 0
    last_ms: int = 0
    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def add(self, size: int, took_ms: int, now_ms: int) -> None:
        """A load has ended."""
        self.loads += 1
        self.last_ms = now_ms
        self.weight = self.weight * KEPT + 1
        self.x = self.x * KEPT + size
        self.y = self.y * KEPT + took_ms
        self.xx = self.xx * KEPT + size * size
        self.xy = self.xy * KEPT + size * took_ms

    def at(self, size: int) -> float:
        """How many ms a load of this size takes. Neither part of the line is negative."""
        mean_x, mean_y = self.x / self.weight, self.y / self.weight
        variance = self.xx / self.weight - mean_x**2
        if variance < SPREAD_MIN * mean_x**2:
            return mean_y * size / mean_x
        slope = max(0.0, (self.xy / self.weight - mean_x * mean_y) / variance)
        start = mean_y - slope * mean_x
        return mean_y * size / mean_x if start < 0 else start + slope * size


class Worth:
    """What was measured, and what follows for the next load. `tokens_per_s` 0: nothing ever."""

    def __init__(self, tokens_per_s: float) -> None:
        self._tokens_per_s = tokens_per_s
        self._lines: dict[Medium, Line] = {}

    @property
    def is_asked(self) -> bool:
        """Does an operator want loads to be weighed?"""
        return self._tokens_per_s > 0

    def began(self, state: OnboardState, brings: Mapping[Medium, int], now_ms: int) -> None:
        """So many blocks of each medium are on their way for a lookup."""
        if not state.brings:
            state.began_ms = now_ms
        state.brings = Counter(state.brings) + Counter(brings)

    def ended(self, state: OnboardState, now_ms: int) -> None:
        """They are here, or late. What came from two places at once teaches nothing of either."""
        brings, state.brings = state.brings, {}
        if len(brings) == 1 and state.block_bytes:
            [(medium, blocks)] = brings.items()
            line = self._lines.setdefault(medium, Line())
            line.add(blocks * state.block_bytes, now_ms - state.began_ms, now_ms)

    def declines(
        self, state: OnboardState, brings: Mapping[Medium, int], *, blocks: int, now_ms: int
    ) -> bool:
        """Would these take longer to come than `blocks`, with all behind them, to compute?"""
        if not state.block_tokens:
            return False  # An operator wants them.
        size = state.block_bytes
        comes_ms = max(self._ms(medium, n * size, now_ms) for medium, n in brings.items())
        return comes_ms > blocks * state.block_tokens / self._tokens_per_s * 1000

    def _ms(self, medium: Medium, size: int, now_ms: int) -> float:
        line = self._lines.get(medium)
        if line is not None and now_ms - line.last_ms >= FORGOTTEN_MS:
            line = None
            del self._lines[medium]
        return line.at(size) if line is not None and line.loads >= LOADS_MIN else 0.0
