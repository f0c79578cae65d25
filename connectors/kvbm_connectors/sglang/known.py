"""Known pages: those that were there a moment ago, so that a question need not wait for an answer.

SGLang asks whether pages exist, and reads them later. Of pages that this rank has stored, found or
read within `known_ms`, the question is answered at once, while the lookup that leases them is on
its way; whether they still are there, the read will tell.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvbm_common.identity import SequenceHash


class Known:
    """Names with an end each, `name_count_max` of them: the oldest make room."""

    def __init__(self, *, known_ms: int, name_count_max: int) -> None:
        self._known_ms = known_ms
        self._name_count_max = name_count_max
        self._until_ms: dict[SequenceHash, int] = {}
        """In the order of their ends, as all last equally long."""
        self._epoch = 0
        """The life of the host tier that they were seen in."""

    def __len__(self) -> int:
        return len(self._until_ms)

    def add(self, names: Iterable[SequenceHash], now_ms: int, *, epoch: int) -> None:
        """They are there, in this life of the host tier."""
        if epoch != self._epoch:
            self._until_ms.clear()
            self._epoch = epoch
        until_ms = now_ms + self._known_ms
        for name in names:
            self._until_ms.pop(name, None)
            self._until_ms[name] = until_ms
        while len(self._until_ms) > self._name_count_max:
            del self._until_ms[next(iter(self._until_ms))]

    def drop(self, names: Iterable[SequenceHash]) -> None:
        """They were not there."""
        for name in names:
            self._until_ms.pop(name, None)

    def covers(self, names: Sequence[SequenceHash], now_ms: int, *, epoch: int) -> bool:
        """Were all of them there a moment ago?"""
        if epoch != self._epoch or not epoch:
            return False
        until_ms = self._until_ms
        return all(until_ms.get(name, 0) > now_ms for name in names)
