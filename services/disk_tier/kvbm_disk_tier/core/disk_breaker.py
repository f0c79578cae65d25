"""The disk's circuit breaker: a disk that fails or is too slow is bypassed, and tried again."""

from __future__ import annotations

from collections import Counter

from kvbm_common.tier.breaker import Breaker

SLOW_MS = 5_000
"""A batch of sixteen blocks that takes so long is slower than recomputing them."""


class DiskBreaker(Breaker):
    """A breaker that judges transfers by their outcome and duration, and counts what it finds."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self._counts = counts

    def ended(self, started_ms: int, now_ms: int, *, failed: bool) -> None:
        """Judge a transfer that has come back, or has not."""
        assert started_ms <= now_ms, f"started at {started_ms} ms, ended at {now_ms} ms"
        if not failed and now_ms - started_ms < SLOW_MS:
            self.good()
            return
        self._counts["disk_troubles.failed" if failed else "disk_troubles.slow"] += 1
        if self.trouble(now_ms):
            self._counts["disk_bypasses"] += 1
