"""The write budget: how many bytes a day may be written."""

from __future__ import annotations

DAY_MS = 24 * 3600 * 1000
BURST_SHARE = 1 / 24


class WriteBudget:
    """The bytes that may be written: an SSD is worn out by writing, so a day has only so many.

    A bucket that holds 1/24 of the budget and fills with the other 23/24 over a day, empty at
    first: in no 24 hours, restarts included, is more written than the budget. A budget of 0 bytes a
    day has no limit.
    """

    def __init__(self, bytes_per_day: int) -> None:
        assert bytes_per_day >= 0, bytes_per_day
        self.bytes_per_day = bytes_per_day
        self.level = 0.0
        """The bytes that may be written at once, as of the last `take`."""
        self._burst = bytes_per_day * BURST_SHARE
        self._per_ms = bytes_per_day * (1 - BURST_SHARE) / DAY_MS
        self._filled_ms: int | None = None

    def blocks_at_once(self, slot_bytes: int) -> int:
        """Return how many blocks a batch may have: no more than a full bucket pays for.

        A larger one would leave a debt, which a restart forgets.
        """
        assert slot_bytes > 0, slot_bytes
        return max(1, int(self._burst) // slot_bytes)

    def take(self, size: int, now_ms: int) -> bool:
        """Take this many bytes from the budget; return False, and take none, if it lacks them.

        A block larger than the bucket may go when the bucket is full; what it took too much is
        waited for afterwards.
        """
        assert size >= 0, f"{size} bytes are to be written"
        if self.bytes_per_day == 0:
            return True
        self._fill(now_ms)
        if self.level < min(size, self._burst):
            return False
        self.level -= size
        return True

    def settle(self, charged: int, size: int) -> None:
        """Take for what was charged the bytes that it really has: it may be more, or less."""
        if size < charged:
            self.give_back(charged - size)
        else:  # The host tier had not said how large the blocks are.
            self.spend(size - charged)

    def spend(self, size: int) -> None:
        """Take bytes that were written without asking; later ones wait for it."""
        assert size >= 0, f"{size} bytes were written"
        if self.bytes_per_day:
            self.level -= size

    def give_back(self, size: int) -> None:
        """Give back bytes that were not written after all."""
        assert size >= 0, f"{size} bytes were not written"
        if self.bytes_per_day:
            self.level = min(self._burst, self.level + size)

    def _fill(self, now_ms: int) -> None:
        if self._filled_ms is not None and now_ms > self._filled_ms:
            self.level = min(self._burst, self.level + (now_ms - self._filled_ms) * self._per_ms)
        if self._filled_ms is None or now_ms > self._filled_ms:
            self._filled_ms = now_ms
        assert self.level <= self._burst, f"{self.level} bytes in a bucket for {self._burst}"
