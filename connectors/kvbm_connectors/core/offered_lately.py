"""Names offered lately: the filter may not have them yet when a lookup would find them.

The engine confirms an offer and asks on one socket, in order; the filter it reads beside that. So
of what it has offered itself within some seconds, it asks.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvbm_common.identity import SequenceHash


class OfferedLately:
    """The names of the last `lately_ms`, and of at most as long before that."""

    def __init__(self, lately_ms: int) -> None:
        assert lately_ms > 0, lately_ms
        self._lately_ms = lately_ms
        self._newer: set[SequenceHash] = set()
        self._older: set[SequenceHash] = set()
        self._turn_at_ms = 0

    def add(self, names: Iterable[SequenceHash]) -> None:
        """Remember names that are on offer now."""
        self._newer.update(names)

    def has_any(self, names: Iterable[SequenceHash]) -> bool:
        """Return whether some of these names were offered lately."""
        return any(name in self._newer or name in self._older for name in names)

    def tick(self, now_ms: int) -> None:
        """Forget what was offered long ago."""
        if now_ms >= self._turn_at_ms:
            self._older, self._newer = self._newer, set()
            self._turn_at_ms = now_ms + self._lately_ms
