"""Reuse curves: when blocks come back, by kind and age, learned from a sample of all names.

An *age* is the number of uses of any block since the last use of this one. Of the sampled names
every use is remembered for some time, whether the tier still has the block or not. So a curve says
of each age how many blocks came back at it, and how many were seen to get so old at all (a
Kaplan-Meier estimate; blocks still waited for count as seen until now).

The *worth* of a block is the best rate of hits per time in the tier that keeping it can bring:

    worth(age) = max over T > age of   P(comes back between age and T) / E[time until then, or T]

It is the Gittins index of the block. Where blocks come back sooner rather than later it falls with
age, and evicting the least worth is LRU. Where they come back after a pause, the worth *rises* with
age until the pause is over: newcomers leave, and those who have waited are kept until they pay.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from kvbm_common.identity import SequenceHash

BUCKETS = 40
"""Two per doubling of the age: the last begins at 2^23 uses."""
WAITED_MAX = 4096
"""Names that are waited for. A scan over them is a millisecond."""
HORIZON_PER_SLOT = 8
"""A block that is used again after more turnovers of the tier counts as not used again."""
PRIOR_BLOCKS = 20.0
"""A kind of block counts as much as all kinds together after so many seen."""
ALIVE_MIN = 1e-6
"""A kind whose blocks all come back still has one left: time goes on."""
PERIOD_MIN = 512
PERIOD_MAX = 2048
"""Uses between two lessons: at first more often, when each still changes much."""
REMEMBERED = 8 * WAITED_MAX
"""Halve what was learned beyond that: loads change."""
SAMPLE_BITS = 16


def bucket_of(age: int) -> int:
    """Return the bucket of an age.

    >>> [bucket_of(age) for age in (1, 7, 8, 11, 12, 16)]
    [0, 0, 1, 1, 2, 3]
    """
    assert age >= 0, f"an age of {age} uses: the last one is still to come"
    if age < 8:
        return 0
    octave = age.bit_length() - 1
    bucket = 2 * octave - 5 + (age >> (octave - 1) & 1)
    return bucket if bucket < BUCKETS else BUCKETS - 1


def _edges() -> list[int]:
    edges = [0]
    for octave in range(3, 3 + BUCKETS // 2 + 1):
        edges += [1 << octave, 3 << (octave - 1)]
    assert len(edges) > BUCKETS, f"{len(edges)} edges of {BUCKETS} buckets"
    assert edges == sorted(set(edges)), f"the edges of buckets ascend: {edges}"
    return edges[: BUCKETS + 1]


EDGES = _edges()
WIDTHS = [float(end - start) for start, end in pairwise(EDGES)]


class ReuseCurves:
    """The learned curves, and the worth that follows from them."""

    def __init__(self, kinds: int, slot_count: int) -> None:
        assert kinds > 0, f"blocks of {kinds} kinds"
        assert slot_count >= 0, f"curves for {slot_count} slots"
        self._kinds = kinds
        self._horizon = HORIZON_PER_SLOT * slot_count
        rate = min(1.0, WAITED_MAX / max(1, self._horizon))
        self._sampled_below = max(1, int(rate * (1 << SAMPLE_BITS)))
        self._waited: OrderedDict[SequenceHash, tuple[int, int]] = OrderedDict()
        self._back = [[0.0] * BUCKETS for _ in range(kinds)]
        self._gone = [[0.0] * BUCKETS for _ in range(kinds)]
        self._period = max(PERIOD_MIN, min(slot_count // 2, PERIOD_MAX))
        self._due = self._period
        lru = [1.0 / (1 + edge) for edge in EDGES[:-1]]
        self.worth: list[list[float]] = [lru] * kinds
        """Kind and bucket of age → the worth of a block. Before anything is known: the older, the
        less."""

    def used(self, name: SequenceHash, word: int, kind: int, now: int) -> None:
        """Count a use of a block at `now`; `word` is the name's `mix`."""
        if now >= self._due:
            self._period = min(self._period * 5 // 4, PERIOD_MAX)
            self._due = now + self._period
            self.learn(now)
        if word >> (64 - SAMPLE_BITS) >= self._sampled_below:
            return
        assert 0 <= kind < self._kinds, f"{name.hex()} is of kind {kind} of {self._kinds}"
        waited = self._waited
        last = waited.pop(name, None)
        if last is not None:
            self._back[last[1]][bucket_of(now - last[0])] += 1
        waited[name] = (now, kind)
        self._expire(now)

    def fill(self, uses: Iterable[tuple[SequenceHash, int, int]], now: int) -> None:
        """Take over the uses until now, one per name: (name, kind, when), all in the sample."""
        assert not self._waited, f"{len(self._waited)} names are waited for already"
        for name, kind, when in uses:
            self._waited[name] = (when, kind)
            self._expire(when)
        self._due = now + self._period
        self.learn(now)

    def samples(self, words: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Return which of these names are in the sample, given their `mixed`."""
        return words >> np.uint64(64 - SAMPLE_BITS) < np.uint64(self._sampled_below)

    def _expire(self, now: int) -> None:
        waited = self._waited
        while waited:
            name = next(iter(waited))
            seen, kind = waited[name]
            if len(waited) <= WAITED_MAX and now - seen <= self._horizon:
                return
            del waited[name]
            self._gone[kind][bucket_of(now - seen)] += 1

    def learn(self, now: int) -> None:
        """Draw the curves again from all that was seen."""
        gone = [row[:] for row in self._gone]
        for seen, kind in self._waited.values():
            gone[kind][bucket_of(now - seen)] += 1
        all_back = [sum(column) for column in zip(*self._back, strict=True)]
        all_gone = [sum(column) for column in zip(*gone, strict=True)]
        common = _hazards(all_back, all_gone, [0.02] * BUCKETS, 1.0)
        self.worth = [worth_of(common)] * self._kinds
        for kind in range(self._kinds):
            if not any(self._back[kind]) and not any(gone[kind]):
                continue
            hazards = _hazards(self._back[kind], gone[kind], common, PRIOR_BLOCKS)
            self.worth[kind] = worth_of(hazards)
        if sum(all_back) + sum(all_gone) > REMEMBERED:
            for row in (*self._back, *self._gone):
                row[:] = [0.5 * count for count in row]

    def __len__(self) -> int:
        """Return how many names are remembered."""
        return len(self._waited)


def _hazards(
    back: Sequence[float], gone: Sequence[float], prior: Iterable[float], weight: float
) -> list[float]:
    """Return by bucket the part of the blocks so old that came back at that age."""
    assert weight > 0, f"a prior of weight {weight}: what no block has shown is a division by zero"
    old = 0.0
    counts: list[float] = []
    for come, left in zip(reversed(back), reversed(gone), strict=True):
        old += come + left
        counts.append(old)
    return [
        min(1.0, (come + weight * expected) / (count + weight))
        for come, count, expected in zip(back, reversed(counts), prior, strict=True)
    ]


def worth_of(hazards: Sequence[float]) -> list[float]:
    """Return the worth by bucket.

    That is the steepest line from the bucket's start to any later point of the curve of hits over
    time, found with the curve's upper hull from the right.
    """
    hits, time, alive = [0.0], [0.0], 1.0
    for hazard, width in zip(hazards, WIDTHS, strict=True):
        back = alive * hazard
        hits.append(hits[-1] + back)
        time.append(time[-1] + width * (alive - back / 2))
        alive = max(alive - back, ALIVE_MIN)
    hull = [(time[-1], hits[-1])]
    worth = [0.0] * BUCKETS
    for start in range(BUCKETS - 1, -1, -1):
        here, had = time[start], hits[start]
        end, gets = hull[-1]
        assert end > here, f"bucket {start}: no time from {here} to {end}"
        assert gets >= had, f"bucket {start}: hits fall from {had} to {gets}"
        rate = (gets - had) / (end - here)
        while len(hull) > 1:
            later, more = hull[-2]
            better = (more - had) / (later - here)
            if better < rate:
                break
            hull.pop()
            rate = better
        worth[start] = rate
        hull.append((here, had))
    return worth
