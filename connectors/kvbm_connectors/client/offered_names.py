"""Offered names: blocks that the host tier was offered, or gave, in its present life."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from kvbm_common.identity import SequenceHash

NAMES_MAX = 65_536
"""6 MB. A block that is forgotten is offered again when a prompt meets it on the device, and the
host tier skips it."""
GENERATIONS = 8
YOUNG = GENERATIONS // 2
"""The newest sets: a name in one of them stays where it is when it is added again."""


class OfferedNames:
    """At most NAMES_MAX names, in a few sets; the oldest set makes room.

    One map of all names, in their order, took two milliseconds of a step whenever it grew. A prompt
    that is loaded again and again takes the room of two such prompts at most.
    """

    def __init__(self) -> None:
        self._epoch = 0
        self._sets: list[set[SequenceHash]] = [set()]
        """The newest comes first."""

    def __contains__(self, name: SequenceHash) -> bool:
        for names in self._sets:  # noqa: SIM110 - a generator takes four times as long.
            if name in names:
                return True
        return False

    def serve(self, epoch: int) -> None:
        """Forget all names when another life of the host tier serves."""
        if epoch != self._epoch:
            self._epoch = epoch
            self._sets = [set()]

    def add(self, names: Iterable[SequenceHash]) -> None:
        """Note that the host tier has these blocks, or will."""
        left, size = iter(names), NAMES_MAX // GENERATIONS
        while piece := set(islice(left, size - len(self._sets[0]))):
            for young in self._sets[:YOUNG]:
                if not piece.isdisjoint(young):
                    piece = piece - young  # `-=` would walk all of the other set.
            self._sets[0].update(piece)
            if len(self._sets[0]) >= size:
                self._sets.insert(0, set())
                del self._sets[GENERATIONS:]

    def discard(self, names: Iterable[SequenceHash]) -> None:
        """Forget blocks that the host tier may not have: the next request with them offers them."""
        gone = tuple(names)
        for kept in self._sets:
            kept.difference_update(gone)
