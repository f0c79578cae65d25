"""The cost line: what moving bytes takes, `ms = start + slope * bytes`, from what it took lately.

A line of weighted least squares in which each load weighs less than the next. It contains queues
and slow media, because the loads met them, too. Adding a load and asking take constant time.

One load that is far off is a hiccup, and counts as twice or half of what was expected. Some in a
row are a medium that has changed: what was before is forgotten.
"""

from __future__ import annotations

from dataclasses import dataclass

KEPT = 0.9
"""The weight of a load compared with the next one: some twenty of them count."""
LOADS_MIN = 3
"""Fewer loads tell nothing: the first one after a start opens files and connections."""
SPREAD_MIN = 0.01
"""Sizes that differ by less than a tenth of their mean (squared here) make no line."""
SURPRISE = 2.0
"""The factor, up or down, from which on a cost is a surprise."""
SURPRISE_MS = 2.0
"""… if it is more than the clocks of cores can tell."""
SURPRISES_MAX = 3
"""Surprises in a row, all slower or all faster, after which what was before is forgotten."""
FORGOTTEN = 0.002
"""The factor by which loads from before a change are weighed afterwards."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """The time of a load, as a line over its bytes: neither part is negative."""

    start_ms: float
    ms_per_byte: float

    def ms(self, size: float) -> float:
        """Return the milliseconds of a load."""
        assert size >= 0, f"a load of {size} bytes"
        return self.start_ms + self.ms_per_byte * size


@dataclass(slots=True)
class Line:
    """Loads of one kind: decaying sums of their sizes (`x`, bytes) and times (`y`, ms)."""

    loads: int = 0
    last_ms: int = 0
    """The time at which the last load ended."""
    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0
    surprises: int = 0
    """Surprises in a row up to now: positive where loads were slower, negative where faster."""

    @property
    def is_known(self) -> bool:
        """Tell whether enough loads were measured for an estimate."""
        return self.loads >= LOADS_MIN

    def observe(self, size: int, took_ms: float, now_ms: int) -> None:
        """Add a load that has ended, unless it is a hiccup: then what it could have been."""
        if self.is_known:
            took_ms = self._believed(size, took_ms)
        self.add(size, took_ms, now_ms)

    def _believed(self, size: int, took_ms: float) -> float:
        expected = self.estimate().ms(size)
        most, least = SURPRISE * expected + SURPRISE_MS, expected / SURPRISE - SURPRISE_MS
        way = 1 if took_ms > most else -1 if took_ms < least else 0
        self.surprises = self.surprises + way if way * self.surprises >= 0 and way else way
        if abs(self.surprises) < SURPRISES_MAX:
            return min(max(took_ms, least), most)
        self.surprises = 0
        self.weight *= FORGOTTEN
        self.x *= FORGOTTEN
        self.y *= FORGOTTEN
        self.xx *= FORGOTTEN
        self.xy *= FORGOTTEN
        return took_ms

    def add(self, size: int, took_ms: float, now_ms: int) -> None:
        """Add a load that has ended, as it is."""
        assert size > 0
        self.loads += 1
        self.last_ms = now_ms
        self.weight = self.weight * KEPT + 1
        self.x = self.x * KEPT + size
        self.y = self.y * KEPT + took_ms
        self.xx = self.xx * KEPT + size * size
        self.xy = self.xy * KEPT + size * took_ms

    def estimate(self) -> Estimate:
        """Return what loads take now. Loads of one size tell only what a byte takes."""
        assert self.loads
        mean_x, mean_y = self.x / self.weight, self.y / self.weight
        variance = self.xx / self.weight - mean_x**2
        proportional = Estimate(0.0, mean_y / mean_x)
        if variance < SPREAD_MIN * mean_x**2:
            return proportional
        slope = max(0.0, (self.xy / self.weight - mean_x * mean_y) / variance)
        start = mean_y - slope * mean_x
        return proportional if start < 0 else Estimate(start, slope)
