"""The health of an object store: when it counts as down, and when it is probed.

    UP --TROUBLES_MAX troubles in a row, or a refusal--> DOWN --a probe that succeeds--> UP

Reads and listings count. A block that cannot be read though the store answers says nothing of
others, until UNREADABLE_MAX of them come without a read between that succeeds. Writes have a state
of their own in the core (`core/health.py`): a store that is full, or may only be read, goes on
serving what it has.

Probes come after a pause that doubles with every one that fails, and with every return to DOWN
before anything has worked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Enum

from kvbm_common.tier.machine import Machine

TROUBLES_MAX = 3
UNREADABLE_MAX = 8
"""Blocks; a key that may list and not read would be asked three times for each one."""
PAUSE_S = 1.0
PAUSE_MAX_S = 30.0


class BucketState(Enum):
    """The states of a bucket: in some, nothing is asked for but probes."""

    UP = "up"
    DOWN = "down"


BUCKET = Machine(
    "object store health",
    {
        (None, "made"): BucketState.UP,
        (BucketState.UP, "failed"): BucketState.DOWN,
        (BucketState.DOWN, "probe failed"): BucketState.DOWN,
        (BucketState.DOWN, "probe succeeded"): BucketState.UP,
    },
)
Pauses = Callable[[float, float], Iterator[float]]
"""Makes pauses in seconds from the first one to the longest."""


class BucketHealth:
    """The health of a store, by its answers. Pauses are drawn outside: many hosts share it."""

    def __init__(self, pauses: Pauses) -> None:
        self.state = BUCKET.next(None, "made")
        self.reason = ""
        """The reason why it is down; empty: it is up."""
        self._make_pauses = pauses
        self._troubles = 0
        self._unreadable: set[bytes] = set()
        self._pauses = pauses(PAUSE_S, PAUSE_MAX_S)

    @property
    def is_down(self) -> bool:
        """Tell whether only probes are sent."""
        return self.state is BucketState.DOWN

    def good(self, *, read: bool = False) -> None:
        """Note that a request has succeeded; `read`: that a block could be read."""
        self._troubles = 0
        if read:
            self._unreadable.clear()
        self._pauses = self._make_pauses(PAUSE_S, PAUSE_MAX_S)

    def trouble(self, reason: str, *, refused: bool = False, alone: bytes = b"") -> bool:
        """Count a failure; return whether it has just taken the store down.

        `alone`: the hash of the block that cannot be read, of a store that answers.
        """
        assert reason, "a trouble has a reason"
        assert self.is_down or self._troubles < TROUBLES_MAX, f"up, with {self._troubles}: {reason}"
        if alone:
            self._unreadable.add(alone)
        else:
            self._troubles += 1
        many = self._troubles >= TROUBLES_MAX or len(self._unreadable) >= UNREADABLE_MAX
        if self.is_down or not (refused or many):
            return False
        self._move("failed")
        self.reason = reason
        return True

    def pause_s(self) -> float:
        """Return how long to wait before the next probe, in seconds."""
        assert self.is_down, "a store that is up is not probed"
        pause_s = next(self._pauses)
        assert pause_s > 0, f"the next probe is {pause_s} s away: {self.reason}"
        return pause_s

    def up(self) -> None:
        """Mark the store as up: a probe has succeeded."""
        self._move("probe succeeded")
        self.reason = ""
        self._troubles = 0
        self._unreadable.clear()

    def still_down(self, reason: str) -> bool:
        """Record that a probe has failed; return whether the reason is another than before."""
        assert reason, "a trouble has a reason"
        self._move("probe failed")
        is_new, self.reason = reason != self.reason, reason
        return is_new

    def _move(self, event: str) -> None:
        self.state = BUCKET.next(self.state, event, self.reason)
