"""The write budget: an SSD is worn out by writing, so a day has only so many bytes.

A bucket that holds 1/24 of the budget and fills with the other 23/24 over a day, empty at first:
in no 24 hours, restarts included, is more written than the budget. What finds no budget waits.
"""

from __future__ import annotations

DAY_MS = 24 * 3600 * 1000
BURST_SHARE = 1 / 24


class WriteBudget:
    """Pure: time comes in with `take`. A budget of 0 bytes a day has no limit."""

    def __init__(self, bytes_per_day: int) -> None:
        assert bytes_per_day >= 0
        self.bytes_per_day = bytes_per_day
        self._burst = bytes_per_day * BURST_SHARE
        self._per_ms = bytes_per_day * (1 - BURST_SHARE) / DAY_MS
        self._level = 0.0
        self._filled_ms: int | None = None

    @property
    def level(self) -> float:
        """Return the bytes that may be written at once, as of the last `take`."""
        return self._level

    def take(self, size: int, now_ms: int) -> bool:
        """Take this many bytes from the budget; return False, and take none, if it lacks them.

        A batch larger than the bucket may go when the bucket is full; what it took too much is
        waited for afterwards.
        """
        assert size >= 0
        if self.bytes_per_day == 0:
            return True
        self._fill(now_ms)
        if self._level < min(size, self._burst):
            return False
        self._level -= size
        return True

    def spend(self, size: int) -> None:
        """Take bytes that were written without asking; later ones wait for it."""
        assert size >= 0
        if self.bytes_per_day:
            self._level -= size

    def give_back(self, size: int) -> None:
        """Give back bytes that were not written after all."""
        assert size >= 0
        if self.bytes_per_day:
            self._level = min(self._burst, self._level + size)

    def _fill(self, now_ms: int) -> None:
        if self._filled_ms is not None and now_ms > self._filled_ms:
            self._level = min(self._burst, self._level + (now_ms - self._filled_ms) * self._per_ms)
        if self._filled_ms is None or now_ms > self._filled_ms:
            self._filled_ms = now_ms
