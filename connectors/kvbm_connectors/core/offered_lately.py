"""Names offered lately: the filter may not have them yet when a lookup would find them.

The engine confirms an offer and asks on one socket, in order; the filter it reads beside that. So
of what it has offered itself within some seconds, it asks.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvbm_common.identity import SequenceHash

SET_NAMES = 16_384
"""Names of a set before another one begins. A set of all took over a millisecond of an engine's
step when it grew; one of these takes 0.35 ms. A question looks into every set: they are few."""
FREED_NAMES = 2_048
"""Names that a tick frees at least: a whole set takes 0.7 ms."""
FREED_NAMES_MAX = 8_192
"""Names that a tick frees at most, in a millisecond: with ten ticks a second, 80,000 a second."""
FREED_IN_TICKS = 512
"""Ticks in which a tick's part of all that waits would free it: most of an offer's deadline."""


class OfferedLately:
    """The names of the last `lately_ms`, and of at most as long before that.

    Names that wait to be freed take memory, too: some 100 bytes each, or 160 where thousands are
    added in one call. With 80,000 new names a second and 5.5 s, 4.3 million wait after some
    minutes, and all take 470 MB; with 40,000 it is half of that, and with 20,000 it is 22 MB.
    """

    def __init__(self, lately_ms: int) -> None:
        assert lately_ms > 0, lately_ms
        self._lately_ms = lately_ms
        self._newer: list[set[SequenceHash]] = []
        self._older: list[set[SequenceHash]] = []
        self._gone: list[set[SequenceHash]] = []
        """Sets to be freed, some names with each tick."""
        self._turn_at_ms = 0

    def add(self, names: Iterable[SequenceHash]) -> None:
        """Remember names that are on offer now."""
        if not self._newer or len(self._newer[-1]) >= SET_NAMES:
            self._newer.append(set())
        self._newer[-1].update(names)

    def has_any(self, names: Iterable[SequenceHash]) -> bool:
        """Return whether some of these names were offered lately."""
        asked = tuple(names)
        return any(not kept.isdisjoint(asked) for kept in (*self._newer, *self._older))

    def tick(self, now_ms: int) -> None:
        """Forget what was offered long ago."""
        if self._gone:
            self._free()
        if now_ms >= self._turn_at_ms:
            self._gone += self._older
            self._older, self._newer = self._newer, []
            self._turn_at_ms = now_ms + self._lately_ms

    def _free(self) -> None:
        """Drop some names that are remembered no more, more of them where more wait."""
        waiting = sum(map(len, self._gone))
        left = min(max(FREED_NAMES, waiting // FREED_IN_TICKS), FREED_NAMES_MAX)
        while left and self._gone:
            gone = self._gone[-1]
            for _ in range(count := min(left, len(gone))):
                gone.pop()
            left -= count
            if not gone:
                self._gone.pop()
