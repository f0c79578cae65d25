"""Offered names: blocks that the host tier was offered, or gave, in its present life."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from kvbm_common.identity import SequenceHash

NAMES_MAX = 65_536
"""6 MB. A block that is forgotten is offered again when a prompt meets it on the device, and the
host tier skips it."""
GENERATIONS = 8


class OfferedNames:
    """About NAMES_MAX names, in a few sets; the oldest set makes room.

    One map of all names, in their order, took two milliseconds of a step whenever it grew.
    """

    def __init__(self) -> None:
        self._epoch = 0
        self._newest: set[SequenceHash] = set()
        self._older: deque[set[SequenceHash]] = deque(maxlen=GENERATIONS - 1)

    def __contains__(self, name: SequenceHash) -> bool:
        if name in self._newest:
            return True
        for names in self._older:  # noqa: SIM110 - a generator takes four times as long.
            if name in names:
                return True
        return False

    def serve(self, epoch: int) -> None:
        """Forget all names when another life of the host tier serves."""
        if epoch != self._epoch:
            self._epoch = epoch
            self._newest = set()
            self._older.clear()

    def add(self, names: Iterable[SequenceHash]) -> None:
        """Note that the host tier has these blocks, or will."""
        self._newest.update(names)
        if len(self._newest) >= NAMES_MAX // GENERATIONS:
            self._older.append(self._newest)
            self._newest = set()

    def discard(self, names: Iterable[SequenceHash]) -> None:
        """Forget blocks that the host tier may not have: the next request with them offers them."""
        gone = tuple(names)
        for kept in (self._newest, *self._older):
            kept.difference_update(gone)
