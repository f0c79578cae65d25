"""A queue of lanes that are served in turn: a busy lane does not delay a quiet one.

A lane that begins to wait is served before those that have waited on; then they take turns, one
item each. So the owner of a few items waits for at most one item of each other lane, whatever
these have queued. Within a lane the order stays.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import Generic, TypeVar

Item = TypeVar("Item")

FRESH_MAX = 16
"""Turns of fresh lanes in a row: names of lanes come from outside, and may all be new."""


class FairQueue(Generic[Item]):
    """Items in lanes; a lane is forgotten once its turn finds it empty."""

    def __init__(self) -> None:
        self._lanes: dict[Hashable, deque[Item]] = {}
        self._fresh: deque[Hashable] = deque()
        """Lanes that have not had a turn yet."""
        self._waiting: deque[Hashable] = deque()
        """Lanes that have had one, next first; perhaps empty since."""
        self._count = 0
        self._fresh_turns = 0
        """Turns of fresh lanes since the last other one."""

    def __len__(self) -> int:
        return self._count

    @property
    def lanes(self) -> int:
        """The number of lanes that are known."""
        return len(self._lanes)

    def depth(self, lane: Hashable) -> int:
        """Return how many items of a lane wait."""
        return len(self._lanes.get(lane, ()))

    def append(self, item: Item, lane: Hashable) -> None:
        """Queue an item after those of its lane."""
        self._count += 1
        queued = self._lanes.get(lane)
        if queued is not None:
            queued.append(item)
            return
        self._lanes[lane] = deque((item,))
        self._fresh.append(lane)

    def popleft(self) -> Item:
        """Return the next item."""
        assert self._count, "the queue is empty"
        while True:
            is_fresh = bool(self._fresh) and (self._fresh_turns < FRESH_MAX or not self._waiting)
            lane = (self._fresh if is_fresh else self._waiting).popleft()
            queued = self._lanes[lane]
            if queued:
                break
            del self._lanes[lane]
        self._fresh_turns = self._fresh_turns + 1 if is_fresh else 0
        self._count -= 1
        # Also when it is empty: one that comes back at once has had its turn.
        self._waiting.append(lane)
        item = queued.popleft()
        if not self._count:
            self._lanes.clear()
            self._waiting.clear()
        return item

    def check(self) -> None:
        """Assert every invariant of the lanes."""
        assert self._count == sum(map(len, self._lanes.values()))
        known = [*self._fresh, *self._waiting]
        assert len(known) == len(set(known)), f"a lane has two turns: {known}"
        assert set(known) == self._lanes.keys()
        assert all(self._lanes[lane] for lane in self._fresh), "a fresh lane waits for nothing"
