"""The count meter: by what counters have grown since the last report to vLLM.

Every step asks. While requests run, counters are read ten times a second: adding up all of them
takes longer than most steps have work for us.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

BUSY_EVERY_S = 0.1


class CountMeter:
    """Turns counters that only grow into what was added since the last look."""

    def __init__(
        self,
        read: Callable[[], Mapping[str, int]],
        *,
        is_busy: Callable[[], bool] = lambda: False,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make a meter of what `read` returns. As long as `is_busy`, more steps follow."""
        self._read, self._is_busy, self._clock_s = read, is_busy, clock_s
        self._told: dict[str, int] = {}
        self._next_s = 0.0

    def take(self) -> dict[str, int] | None:
        """Return what was added since the last call; None: nothing, or a later step returns it."""
        now_s = self._clock_s()
        if now_s < self._next_s and self._is_busy():
            return None
        self._next_s = now_s + BUSY_EVERY_S
        counts, told = dict(self._read()), self._told
        if counts == told:
            return None
        self._told = counts
        grown = {
            what: count - told.get(what, 0)
            for what, count in counts.items()
            if count > told.get(what, 0)
        }
        return grown or None
