"""Rates: what each instance has counted per second, over the last ten seconds or so.

Pure: what was said goes in with the time, rates come out. An instance's counts start again in
every life (epoch), so a window never reaches into the life before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from kvbm_common.wire.verbs import StatsReply

WINDOW_S = 10.0
SPACING_S = 0.5
"""Samples of one instance are at least so far apart: a window has 21 of them at most."""
SAMPLES_MAX = round(WINDOW_S / SPACING_S) + 2
"""The first may be older than the window, the last is of now."""
INSTANCES_MAX = 4096
"""Instances that are remembered; the longest silent is forgotten first."""


@dataclass(frozen=True, slots=True)
class Rate:
    """Counts per second by figure. `window_s` is 0 while there is nothing to compare with."""

    window_s: float = 0.0
    per_s: Mapping[str, float] = field(default_factory=dict)

    def sum(self, *figures: str) -> float:
        """Return the sum of several counts."""
        assert figures, "a sum is of counts that are named"
        return sum(self.per_s.get(one, 0.0) for one in figures)


NO_RATE = Rate()


@dataclass(frozen=True, slots=True)
class _Sample:
    at_s: float
    figures: Mapping[str, float]


class Rates:
    """The last samples of every instance."""

    def __init__(self) -> None:
        self._samples: dict[tuple[str, str, str], tuple[int, deque[_Sample]]] = {}

    def take(self, replies: Iterable[StatsReply], now_s: float) -> None:
        """Take the figures that instances have reported now, at most one sample per spacing."""
        for reply in replies:
            key = (reply.kind, reply.host, reply.instance)
            epoch, samples = self._samples.pop(key, (reply.epoch, deque[_Sample]()))
            if epoch != reply.epoch:
                samples = deque()
            last_s = samples[-1].at_s if samples else now_s
            assert last_s <= now_s, f"{key} at {now_s} s, after {last_s} s"
            if not samples or now_s - last_s >= SPACING_S:
                samples.append(_Sample(now_s, reply.figures))
            while len(samples) > 2 and now_s - samples[1].at_s >= WINDOW_S:
                samples.popleft()
            assert len(samples) <= SAMPLES_MAX, f"{len(samples)} samples of {key}"
            self._samples[key] = reply.epoch, samples
        while len(self._samples) > INSTANCES_MAX:
            del self._samples[next(iter(self._samples))]

    def of(self, kind: str, host: str, instance: str) -> Rate:
        """Return the rates of one instance over its window."""
        _, samples = self._samples.get((kind, host, instance), (0, deque[_Sample]()))
        if len(samples) < 2:
            return NO_RATE
        first, last = samples[0], samples[-1]
        window_s = last.at_s - first.at_s
        assert window_s > 0, f"{kind} {instance}: {len(samples)} samples within {window_s} s"
        return Rate(
            window_s,
            {
                name: max(0.0, value - first.figures.get(name, 0.0)) / window_s
                for name, value in last.figures.items()
            },
        )

    def check(self) -> None:
        """Assert every invariant; O(samples)."""
        assert len(self._samples) <= INSTANCES_MAX
        for _, samples in self._samples.values():
            times = [one.at_s for one in samples]
            assert times == sorted(times)
            apart = [later - earlier for earlier, later in pairwise(times)]
            assert all(gap >= SPACING_S for gap in apart), times
            assert len(samples) < 3 or times[-1] - times[1] < WINDOW_S, times
