"""Fates: what became of the blocks that have left a tier, bounded, so that a miss can be explained.

Blocks that left together share one fate. What was forgotten first is what left first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

from kvbm_common.identity import SequenceHash

FATES_MAX = 262_144
"""40 MB when it is full: at 2 MiB a block, half a TiB that has come and gone."""


class Fate(NamedTuple):
    """When and why a block has left."""

    at_ms: int
    why: str
    detail: str = ""


class Fates:
    """Block → its last fate."""

    def __init__(self, entries_max: int = FATES_MAX) -> None:
        assert entries_max > 0
        self.forgotten_ms: int | None = None
        """What left until then may be forgotten; None: nothing is."""
        self._entries_max = entries_max
        self._fates: OrderedDict[SequenceHash, Fate] = OrderedDict()
        """In the order of the times. In a plain dict the first is found behind the holes of all
        that have left: 0.1 to 0.4 ms for every block, once this is full."""

    def __len__(self) -> int:
        return len(self._fates)

    def note(
        self, names: Iterable[SequenceHash], why: str, now_ms: int, *, detail: str = ""
    ) -> None:
        """These have left."""
        fates, fate = self._fates, Fate(now_ms, why, detail)
        for name in names:
            fates.pop(name, None)
            fates[name] = fate
        while len(fates) > self._entries_max:
            self.forgotten_ms = fates.popitem(last=False)[1].at_ms

    def get(self, name: SequenceHash) -> Fate | None:
        """The last fate of a block. It says nothing of whether the block is back."""
        return self._fates.get(name)

    def knows_none_of(self, names: Iterable[SequenceHash]) -> bool:
        """Is there nothing to say of any of these?"""
        return not self._fates or self._fates.keys().isdisjoint(names)
