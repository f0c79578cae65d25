"""The cost of loading: would computing blocks take less time than bringing them to host memory?

The speed of computing is configured (KVBM_RECOMPUTE_TOKENS_PER_S): services do not measure engines.
The time of loads is measured here, by the medium that they came from: a line through the latest
ones, `ms = start + slope * bytes`, in which each load weighs less than the next. The line contains
queues and slow disks, because those loads met them, too. Where little was measured, or nothing
lately, a load is made and measured: so a tier that has recovered is noticed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvbm_common.identity import SequenceHash

from kvbm_host_tier.core.answers import Medium, OpenLookup
from kvbm_host_tier.core.lower_tiers import LowerTiers

KEPT = 0.9
"""The weight of a load compared with the next one: some twenty of them count."""
LOADS_MIN = 3
"""Fewer loads tell nothing: the first one after a start opens files and connections."""
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
        """Add a load that has ended."""
        assert size > 0
        self.loads += 1
        self.last_ms = now_ms
        self.weight = self.weight * KEPT + 1
        self.x = self.x * KEPT + size
        self.y = self.y * KEPT + took_ms
        self.xx = self.xx * KEPT + size * size
        self.xy = self.xy * KEPT + size * took_ms

    def at(self, size: int) -> float:
        """Return the ms that a load of this size takes. Neither part of the line is negative."""
        assert self.loads
        mean_x, mean_y = self.x / self.weight, self.y / self.weight
        variance = self.xx / self.weight - mean_x**2
        if variance < SPREAD_MIN * mean_x**2:
            return mean_y * size / mean_x
        slope = max(0.0, (self.xy / self.weight - mean_x * mean_y) / variance)
        start = mean_y - slope * mean_x
        return mean_y * size / mean_x if start < 0 else start + slope * size


class LoadCost:
    """The measured loads, and what follows for the next; `tokens_per_s` 0: no load is weighed."""

    def __init__(self, tokens_per_s: float, below: LowerTiers) -> None:
        assert tokens_per_s >= 0
        self._below = below
        self._tokens_per_s = tokens_per_s
        self._lines: dict[Medium, Line] = {}

    @property
    def is_asked(self) -> bool:
        """Tell whether loads are weighed at all."""
        return self._tokens_per_s > 0

    def weigh(
        self, lookup: OpenLookup, fills: Sequence[SequenceHash], now_ms: int
    ) -> Medium | None:
        """Begin to measure a load, or return its medium: what is behind it is computed sooner."""
        brings = Counter(self._medium_of(name, lookup, now_ms) for name in fills)
        behind = lookup.run - lookup.hashes.index(fills[0])
        assert behind >= len(fills), lookup.owner
        if self._declines(lookup, brings, blocks=behind, now_ms=now_ms):
            return self._medium_of(fills[0], lookup, now_ms)
        self._began(lookup, brings, now_ms)
        return None

    def _medium_of(self, name: SequenceHash, lookup: OpenLookup, now_ms: int) -> Medium:
        source = self._below.source(name, now_ms, lookup.namespaces)
        return "remote" if source is None else source[0]

    def _began(self, lookup: OpenLookup, brings: Mapping[Medium, int], now_ms: int) -> None:
        """Note how many blocks of each medium are on their way for a lookup."""
        assert brings
        if not lookup.brings:
            lookup.began_ms = now_ms
        lookup.brings = Counter(lookup.brings) + Counter(brings)

    def ended(self, lookup: OpenLookup, now_ms: int) -> None:
        """Measure a lookup's load, which is here or late, if it came from one medium only."""
        assert now_ms >= lookup.began_ms
        brings, lookup.brings = lookup.brings, {}
        if len(brings) == 1 and lookup.block_bytes:
            [(medium, blocks)] = brings.items()
            line = self._lines.setdefault(medium, Line())
            line.add(blocks * lookup.block_bytes, now_ms - lookup.began_ms, now_ms)

    def _declines(
        self, lookup: OpenLookup, brings: Mapping[Medium, int], *, blocks: int, now_ms: int
    ) -> bool:
        """Tell whether these take longer to come than `blocks` to compute, with all behind them."""
        assert blocks > 0
        if not lookup.block_tokens:
            return False  # An operator wants them.
        size = lookup.block_bytes
        comes_ms = max(self._ms(medium, n * size, now_ms) for medium, n in brings.items())
        return comes_ms > blocks * lookup.block_tokens / self._tokens_per_s * 1000

    def _ms(self, medium: Medium, size: int, now_ms: int) -> float:
        line = self._lines.get(medium)
        if line is not None and now_ms - line.last_ms >= FORGOTTEN_MS:
            line = None
            del self._lines[medium]
        return line.at(size) if line is not None and line.loads >= LOADS_MIN else 0.0
