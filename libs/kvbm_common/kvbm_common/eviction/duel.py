"""A duel with LRU: what LRU would have hit, and whether to go its way for a while.

A ghost keeps the names that an LRU tier of the same size would hold, of a sample of all names (a
tier of `r` times the slots, for the part `r` of the names: SHARDS, Waldspurger et al. 2015). Each
use of a sampled block is a hit or a miss here, and a hit or a miss there: a paired comparison.

LRU is also followed while next to nothing is lost: when hardly a block is missed that was asked for
before, no policy can do much better, and a cleverer one only worse.

`ghost_lead` is the ghost's hits less ours. Beyond a limit the policy follows LRU for a while: for
twice as long each time that it was beaten again soon, and much longer if on balance it has lost.
The policy's own lead counts only up to a bound, so that a good past does not buy a bad future.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from kvbm_common.identity import SequenceHash

GHOSTS_MAX = 8192
"""Names in the ghost: all of a tier up to that size, a sample of a larger one's."""
SAMPLE_BITS = 16
DECIDE_EVERY = 8
LIMIT_SHARE = 0.002
"""The lead of the ghost that is too large, as a part of the uses in the window."""
LIMIT_MIN = 24.0
REST_SHARE = 1.0
"""The rest, as a part of the window, after a defeat that has lost more than was ever won."""
CREDIT_SHARE = 0.004
WINDOW_PER_SLOT = 32
LOST_USES = 2048
"""Uses over which the share of lost blocks is a (fading) mean."""
LOST_LITTLE = 0.005
LOST_MUCH = 0.01
""""Next to nothing" begins below the one and ends above the other."""


class Duel:
    """The comparison with LRU, and the decision whether to follow it."""

    def __init__(self, slot_count: int) -> None:
        assert slot_count >= 0, f"a duel of {slot_count} slots"
        self._ghosts_max = min(slot_count, GHOSTS_MAX)
        rate = self._ghosts_max / max(1, slot_count)
        self._sampled_below = int(rate * (1 << SAMPLE_BITS))
        self._ghosts: OrderedDict[SequenceHash, None] = OrderedDict()
        self._fresh: set[SequenceHash] = set()
        self._window = WINDOW_PER_SLOT * max(1, self._ghosts_max)
        self._seen = 0
        self.ghost_lead = 0.0
        self.follows_lru = True
        self._beaten = False
        self._lost = 0.0
        self._little = True
        self._until = 0
        self._balance = 0.0
        """Hits won less hits lost over the last window; fades."""
        self._patience = 2 * self._ghosts_max
        self._since = 0

    def samples(self, word: int) -> bool:
        """Return whether a name is in the sample. `word` is its `mix`."""
        assert 0 <= word < 1 << 64, f"{word:#x} is no `mix` of a name"
        return word >> (64 - SAMPLE_BITS) < self._sampled_below

    def all_sampled(self, words: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Return, for each of many names, whether it is in the sample, given their `mixed`."""
        return words >> np.uint64(64 - SAMPLE_BITS) < np.uint64(self._sampled_below)

    def used(self, name: SequenceHash, *, hit: bool, again: bool) -> None:
        """Count that a sampled block was asked for.

        `hit`: the tier had it; `again`: it was asked for before too.
        """
        assert again or not hit, f"{name.hex()} was here, and never asked for"
        if name in self._ghosts:
            if not hit:
                self.ghost_lead += 1.0
                self._balance -= 1.0
        else:
            self._fresh.add(name)
            if hit:
                self.ghost_lead -= 1.0
                self._balance += 1.0
        self._lost += ((again and not hit) - self._lost) / LOST_USES
        self._seen += 1
        if self._seen % DECIDE_EVERY == 0:
            self._decide()

    def freed(self, name: SequenceHash) -> None:
        """Make a sampled block the latest to be freed."""
        ghosts = self._ghosts
        if name in ghosts:
            assert name not in self._fresh, f"{name.hex()} is a ghost, and was never freed"
            ghosts.move_to_end(name)
        elif name in self._fresh:
            self._fresh.remove(name)
            ghosts[name] = None
            if len(ghosts) > self._ghosts_max:
                ghosts.popitem(last=False)
        assert len(ghosts) <= self._ghosts_max, f"{len(ghosts)} ghosts, with {name.hex()}"

    def forgot(self, name: SequenceHash) -> None:
        """Forget a sampled block that has left the tier, perhaps without ever having been held."""
        self._fresh.discard(name)

    def _decide(self) -> None:
        assert 0.0 <= self._lost <= 1.0, f"{self._lost} of the uses are lost"
        assert self._since <= self._seen, f"the last defeat is at {self._since} of {self._seen}"
        seen = min(self._seen, self._window)
        self._balance *= 1 - DECIDE_EVERY / self._window
        self.ghost_lead = max(self.ghost_lead, -LIMIT_MIN - CREDIT_SHARE * seen)
        self._little = self._lost < (LOST_MUCH if self._little else LOST_LITTLE)
        if self._beaten:
            if self._seen >= self._until:
                self._beaten, self.ghost_lead, self._since = False, 0.0, self._seen
        elif self.ghost_lead > LIMIT_MIN + LIMIT_SHARE * seen:
            soon = self._seen - self._since < 4 * self._patience
            self._patience = 2 * self._patience if soon else 2 * self._ghosts_max
            rest = self._patience
            if self._balance < 0:
                rest = max(rest, int(REST_SHARE * seen))
            self._beaten, self._until = True, self._seen + rest
        self.follows_lru = self._beaten or self._little

    def __len__(self) -> int:
        """Return how many names are remembered."""
        return len(self._ghosts) + len(self._fresh)
