"""A contest: which way to evict brings most hits, found out on miniature tiers beside the real one.

One name in sixteen (fewer in large tiers) is used in six miniatures as well, each a tier that is
smaller by the same factor and evicts in its own way. That the part of the names and the part of the
slots are equal makes a miniature hit as often as the tier would (SHARDS, Waldspurger et al. 2015
and 2017). Names are drawn by their own bits, so a miniature has some blocks of every chain rather
than every block of some chains.

The first way is LRU. Another one leads only when it has hit so much more that chance does not
explain it, and when LRU hits more, LRU leads again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from kvbm_common.identity import SequenceHash

RATE_MAX = 1 / 16
"""The part of all names that is sampled: six miniatures cost a fifth of a µs for each use."""
SLOTS_MAX = 512
"""Slots of a miniature; larger ones changed nothing, and memory stays below a megabyte."""
WINDOW_PER_SLOT = 32
WINDOW_MIN = 1024
"""Sampled uses that the scores remember: as many turnovers of the tier as loads last."""
LEAD_SHARE = 0.005
"""The lead in hits, as a part of the window, that changes the way: a change costs hits, too."""
LEAD_MIN = 8.0
"""Hits more than the leader's in any case: a chain has some sampled blocks, which hit together."""
REMEMBERED_PER_SLOT = 2
"""Names that have left and are still known: what comes back later finds the tier turned over."""


@dataclass(frozen=True, slots=True)
class Way:
    """A way to evict: blocks used once leave first, and how much the others may hold."""

    protected: float
    """Part of the slots for blocks that were used again; 0: all are equal, which is LRU."""
    remembers: bool
    """True if a block that was evicted lately, and comes back, counts as used again."""


LRU = Way(protected=0.0, remembers=False)
WAYS = (
    LRU, Way(0.5, False), Way(0.9, False), Way(0.3, True), Way(0.6, True), Way(0.9, True),
)  # fmt: skip
"""Agents do best without memory (what they turn over is gone for good), chats and documents with
it. The smaller shares suit loads that change, the larger ones lasting popularity."""


class Miniature:
    """A tier of a few slots that evicts in one way; all its blocks are free."""

    def __init__(self, way: Way, slot_count: int) -> None:
        assert slot_count > 0, f"a miniature of {slot_count} slots"
        self._slot_count = slot_count
        self._protected = way.protected * slot_count
        self._once: OrderedDict[SequenceHash, None] = OrderedDict()
        self._again: OrderedDict[SequenceHash, None] = OrderedDict()
        self._half = REMEMBERED_PER_SLOT * slot_count // 2 if way.remembers else 0
        self._young: set[SequenceHash] = set()
        self._old: set[SequenceHash] = set()

    def use(self, name: SequenceHash) -> bool:
        """Use a block; returns whether it was here."""
        once, again = self._once, self._again
        if name in again:
            again.move_to_end(name)
            return True
        here = name in once
        if here:
            del once[name]
            known = True
        else:
            if len(once) + len(again) >= self._slot_count:
                self._evict()
            known = name in self._young or name in self._old
        if not known or not self._protected:
            once[name] = None
            return here
        again[name] = None
        while len(again) > self._protected:
            once[again.popitem(last=False)[0]] = None
        return here

    def _evict(self) -> None:
        name, _ = (self._once or self._again).popitem(last=False)
        if self._half:
            self._young.add(name)
            if len(self._young) >= self._half:
                self._old, self._young = self._young, set()

    def check(self) -> None:
        """Assert every invariant; O(blocks)."""
        assert not self._once.keys() & self._again.keys(), "a block is in both orders"
        assert len(self._once) + len(self._again) <= self._slot_count, "more blocks than slots"
        assert len(self._again) <= self._protected, f"{len(self._again)} blocks are protected"
        assert len(self._young) + len(self._old) <= 2 * self._half, "too many are remembered"


class Contest:
    """The miniatures, their scores, and which of them leads."""

    def __init__(self, slot_count: int, ways: Sequence[Way] = WAYS) -> None:
        assert slot_count >= 0, f"a contest for {slot_count} slots"
        self._ways = ways
        self._rate = min(RATE_MAX, SLOTS_MAX / max(1, slot_count))
        slots = max(1, round(self._rate * slot_count))
        self.miniatures = [Miniature(way, slots) for way in ways]
        self._scores = [0.0] * len(ways)
        self._window = max(WINDOW_MIN, WINDOW_PER_SLOT * slots)
        self._seen = 0
        self._leader = 0
        self.changes = 0
        """The number of times that another way took the lead."""

    @property
    def sampled_below(self) -> int:
        """A name is in the sample when its last three bytes, the last one first, are below this."""
        return max(1, int(self._rate * (1 << 24)))

    @property
    def way(self) -> Way:
        """The way that leads."""
        return self._ways[self._leader]

    def used(self, names: Sequence[SequenceHash]) -> bool:
        """Use sampled blocks, leaves first; returns whether another way leads now."""
        assert names, "a contest is about blocks"
        fade = max(0.0, 1 - len(names) / self._window)
        for place, miniature in enumerate(self.miniatures):
            hits = sum(map(miniature.use, names))
            self._scores[place] = self._scores[place] * fade + hits
        self._seen = min(self._seen + len(names), self._window)
        best = max(
            range(len(self._ways)), key=self._scores.__getitem__
        )  # Of equals the first: LRU.
        ahead = self._scores[best] - self._scores[self._leader]
        least = LEAD_MIN if best == 0 else LEAD_MIN + LEAD_SHARE * self._seen
        if ahead <= least:
            return False
        assert best != self._leader, f"way {best} is ahead of itself"
        self._leader = best
        self.changes += 1
        return True
