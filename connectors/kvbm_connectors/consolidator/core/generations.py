"""The generations of a rank: each block that its engine stores belongs to the one then in force.

A generation stands for the weights that blocks were computed with; it is part of their hashes.
A connector announces it on one socket. The engine's events come on another, and do not name it, so
the announcement may come before or after them. It has the time when the generation began, by the
clock of the events, and that decides:

```
  announced: since ──────────────┐
  events:   … stored, stored ────┼──► cleared, stored …    the clear begins the generation
            … cleared (a while) ─┼──► stored …             so does an empty cache
```

Blocks of an unknown generation are left out: under a wrong hash they would be served for others.
"""

from __future__ import annotations

from collections import deque
from math import inf
from typing import NamedTuple

from kvbm_common.identity import lora_extra
from kvbm_common.wire.consolidator import Attach

GENERATIONS_MAX = 16
"""Generations that are remembered: events of earlier ones may come after their announcements."""
Adapters = dict[str, str] | None
"""An adapter's name in events → its name in hashes. None: hashes have the names of events."""


class Generation(NamedTuple):
    """A generation as its connector announces it."""

    name: str
    since_s: float
    """Its beginning, by the clock of events; 0: it begins with the next clear or gap."""
    adapters: Adapters


class Generations:
    """The generations of one rank, and the one in force at the present place in its stream."""

    def __init__(self, attach: Attach) -> None:
        first = _said_in(attach)
        self._known: deque[Generation] = deque([first], GENERATIONS_MAX)
        self.now: Generation | None = None if first.since_s else first
        """The generation of blocks that are stored now; None: it is older than all known ones."""
        self._stored_s = inf
        """The time of the first store since the last clear or gap."""

    def announce(self, attach: Attach) -> bool:
        """Learn a generation; returns whether it is new, and already that of the blocks held: all
        were stored after it had begun."""
        said, last = _said_in(attach), self._known[-1]
        if said.name == last.name:
            self._known[-1] = said
            if self.now is last:
                self.now = said
                return False
        else:
            self._known.append(said)
        assert len(self._known) <= GENERATIONS_MAX, f"{len(self._known)} are remembered"
        return 0 < said.since_s <= self._stored_s < inf

    def read_again(self) -> None:
        """Begin again, as with a stream that was not followed before."""
        self.lose()
        self.now = None
        assert self._stored_s == inf, f"what was stored since {self._stored_s} s is read again"

    def clear(self, now_s: float) -> bool:
        """Note that the cache is empty; returns whether another generation begins."""
        assert now_s >= 0, f"a clear at {now_s} s"
        self._stored_s = inf
        return self._begin(self._at(now_s))

    def lose(self) -> bool:
        """Note a gap: what was stored before it is unknown. Returns whether another generation
        begins at once."""
        self._stored_s = inf
        last = self._known[-1]
        return last.since_s == 0 and self._begin(last)

    def store(self, now_s: float) -> bool:
        """Note that blocks are stored; returns whether another generation begins with them."""
        if self._stored_s < inf:
            return False
        found = self._at(now_s)
        has_begun = found is not None and found.since_s > 0 and self._begin(found)
        if self.now is not None:
            self._stored_s = now_s
        return has_begun

    def _at(self, now_s: float) -> Generation | None:
        """Return the last generation that had begun by then, and none older than `now`."""
        known = reversed(self._known)
        return next((one for one in known if one is self.now or one.since_s <= now_s), None)

    def _begin(self, generation: Generation | None) -> bool:
        assert generation is None or generation in self._known, f"{generation} is not announced"
        before, self.now = self.now, generation
        names = [one.name if one else None for one in (before, generation)]
        return names[0] != names[1]


def adapter_key(number: int | None, name: str | None) -> str:
    """Return the key of an adapter, made of the number and the name that events give it."""
    return f"{number}/{name}"


def _said_in(attach: Attach) -> Generation:
    said = attach.adapters
    adapters = None if said is None else {
        adapter_key(one.id, one.name): lora_extra(one.name, one.content) for one in said
    }  # fmt: skip
    since_s = attach.generation_us / 1e6
    return Generation(attach.generation, since_s, adapters)
