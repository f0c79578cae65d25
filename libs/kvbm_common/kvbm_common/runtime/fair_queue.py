"""A queue of lanes that are served in turn: a busy lane does not delay a quiet one.

A lane that begins to wait is served before those that have waited on; then they take turns. A turn
is a share of time, not an item: a lane goes on until its items have taken it up, and one whose item
took several turns is passed over as often. So the owner of a few small items waits for at most one
item of each other lane, whatever these have queued. Within a lane the order stays.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import Generic, TypeVar

Item = TypeVar("Item")

FRESH_MAX = 16
"""Turns of fresh lanes in a row: names of lanes come from outside, and may all be new."""
DEBT_MAX = 8.0
"""Turns for which a lane is passed over at most."""
NOBODY = object()
"""Stands for a lane while no lane has its turn."""


class FairQueue(Generic[Item]):
    """Items in lanes; a lane is forgotten once its turn finds it empty and without debt."""

    def __init__(self) -> None:
        self._lanes: dict[Hashable, deque[Item]] = {}
        self._fresh: deque[Hashable] = deque()
        """Lanes that have not had a turn yet."""
        self._waiting: deque[Hashable] = deque()
        """Lanes that have had one, next first; perhaps empty since."""
        self._debts: dict[Hashable, float] = {}
        """Turns that waiting lanes have had beyond their own."""
        self._count = 0
        self._fresh_turns = 0
        """Turns of fresh lanes since the last other one."""
        self._on_turn: Hashable = NOBODY
        self._credit = 0.0
        """The rest of that turn."""

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
        """Return the next item, which takes one turn unless `charge` says otherwise."""
        assert self._count, "the queue is empty"
        if not self._goes_on():
            self._end_turn()
            self._begin_turn()
        self._count -= 1
        self._credit -= 1.0
        item = self._lanes[self._on_turn].popleft()
        if not self._count:
            self._lanes.clear()
            self._waiting.clear()
            self._debts.clear()
            self._on_turn = NOBODY
        return item

    def charge(self, turns: float) -> None:
        """Say how many turns the last item has taken."""
        assert turns >= 0, turns
        self._credit += 1.0 - turns

    def _goes_on(self) -> bool:
        """Tell whether the lane on turn has items, and time left for them."""
        return self._on_turn is not NOBODY and self._credit > 0 and bool(self._lanes[self._on_turn])

    def _has_fresh_turn(self) -> bool:
        return bool(self._fresh) and (self._fresh_turns < FRESH_MAX or not self._waiting)

    def _end_turn(self) -> None:
        """Have the lane on turn wait on, also when it is empty: one that comes back has had it."""
        if self._on_turn is not NOBODY:
            self._waiting.append(self._on_turn)
            if self._credit < 0:
                self._debts[self._on_turn] = min(-self._credit, DEBT_MAX)
            self._on_turn = NOBODY

    def _begin_turn(self) -> None:
        """Give the next lane with items its turn; an empty one, or one in debt, pays by it."""
        while True:
            is_fresh = self._has_fresh_turn()
            lane = (self._fresh if is_fresh else self._waiting).popleft()
            credit = 1.0 - self._debts.pop(lane, 0.0)
            if credit <= 0:
                self._debts[lane] = -credit
                self._waiting.append(lane)
            elif self._lanes[lane]:
                self._fresh_turns = self._fresh_turns + 1 if is_fresh else 0
                self._on_turn, self._credit = lane, credit
                return
            else:
                del self._lanes[lane]

    def check(self) -> None:
        """Assert every invariant of the lanes."""
        assert self._count == sum(map(len, self._lanes.values()))
        on_turn = [] if self._on_turn is NOBODY else [self._on_turn]
        known = [*self._fresh, *self._waiting, *on_turn]
        assert len(known) == len(set(known)), f"a lane has two turns: {known}"
        assert set(known) == self._lanes.keys()
        assert all(self._lanes[lane] for lane in self._fresh), "a fresh lane waits for nothing"
        assert self._debts.keys() <= set(self._waiting), f"a lane in debt does not wait: {known}"
        assert all(0 <= debt <= DEBT_MAX for debt in self._debts.values()), self._debts
