"""The health of the bucket: when it counts as down, and when it is asked again.

    UP --TROUBLES_MAX troubles in a row, or a refusal--> DOWN --a probe that succeeds--> UP

Probes come after a pause that doubles with every one that fails, and with every return to DOWN
before anything has worked.
"""

from __future__ import annotations

from kvbm_disk_tier.objects.shell.bucket import backoff

TROUBLES_MAX = 3
PAUSE_S = 1.0
PAUSE_MAX_S = 30.0


class Health:
    """What has been seen of one bucket."""

    def __init__(self) -> None:
        self.reason = ""
        """Why it is down; empty: it is up."""
        self.needs_write = False
        """What failed was a write: a probe that only reads would prove nothing."""
        self._troubles = 0
        self._pauses = backoff(PAUSE_S, PAUSE_MAX_S)

    def good(self) -> None:
        """Note that a request has worked."""
        self._troubles = 0
        self._pauses = backoff(PAUSE_S, PAUSE_MAX_S)

    def trouble(self, reason: str, *, write: bool, refused: bool = False) -> bool:
        """Count a failure; return whether it has just taken the store down."""
        self._troubles += 1
        if self.reason or not (refused or self._troubles >= TROUBLES_MAX):
            return False
        self.reason, self.needs_write = reason, write
        return True

    def pause_s(self) -> float:
        """Return how long to wait before the next probe, in seconds."""
        return next(self._pauses)

    def up(self) -> None:
        """Mark the store as up: a probe has succeeded."""
        self.reason = ""
        self._troubles = 0

    def still_down(self, reason: str) -> bool:
        """Record that a probe has failed; return whether the reason is another than before."""
        is_new, self.reason = reason != self.reason, reason
        return is_new
