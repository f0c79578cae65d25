"""A circuit breaker: what fails (a peer, a host tier) is bypassed, and tried again.

CLOSED   everything goes there
OPEN     nothing does: it is refused at once
PROBING  one thing may go, and what becomes of it decides

The pause doubles with every failed probe, up to PAUSE_MAX_MS.
"""

from __future__ import annotations

from enum import Enum

from kvbm_common.tier.machine import Machine

FAILURES_MAX = 3
PAUSE_MS = 2_000
PAUSE_MAX_MS = 60_000


class BreakerState(Enum):
    """The states of a breaker."""

    CLOSED = "closed"
    OPEN = "open"
    PROBING = "probing"


BREAKER = Machine(
    "breaker",
    {
        (None, "made"): BreakerState.CLOSED,
        (BreakerState.CLOSED, "failed"): BreakerState.OPEN,
        (BreakerState.OPEN, "paused"): BreakerState.PROBING,
        (BreakerState.PROBING, "succeeded"): BreakerState.CLOSED,
        (BreakerState.PROBING, "failed"): BreakerState.OPEN,
    },
)


class Breaker:
    """Pure: time comes in with every call."""

    def __init__(self) -> None:
        self.state = BREAKER.next(None, "made")
        self._troubles = 0
        self._pause_ms = PAUSE_MS
        self._probe_from_ms = 0
        self._probing = False

    def allows(self, now_ms: int) -> bool:
        """Return whether something may go to the guarded resource now.

        In PROBING only one thing may: call `start` then.
        """
        assert now_ms >= 0, f"something would go at {now_ms} ms"
        if self.state is BreakerState.OPEN and now_ms >= self._probe_from_ms:
            self._move("paused")
            self._probing = False
        return self.state is BreakerState.CLOSED or (
            self.state is BreakerState.PROBING and not self._probing
        )

    def start(self) -> None:
        """Note that something goes there."""
        assert self.state is not BreakerState.OPEN, "what is bypassed gets nothing"
        assert self.state is BreakerState.CLOSED or not self._probing, "one probe decides"
        self._probing = self.state is BreakerState.PROBING

    def good(self) -> None:
        """Note that an operation came back as it should."""
        self._troubles = 0
        if self.state is BreakerState.PROBING:
            self._move("succeeded")
            self._pause_ms = PAUSE_MS

    def trouble(self, now_ms: int) -> bool:
        """Note a failure, or a long wait; return True if the resource is bypassed from now on."""
        assert now_ms >= 0, f"trouble at {now_ms} ms"
        self._troubles += 1
        probe_failed = self.state is BreakerState.PROBING
        if self.state is BreakerState.OPEN or not (probe_failed or self._troubles >= FAILURES_MAX):
            return False
        if probe_failed:
            self._pause_ms = min(2 * self._pause_ms, PAUSE_MAX_MS)
        assert PAUSE_MS <= self._pause_ms <= PAUSE_MAX_MS, f"a pause of {self._pause_ms} ms"
        self._move("failed")
        self._troubles = 0
        self._probe_from_ms = now_ms + self._pause_ms
        return True

    def _move(self, event: str) -> None:
        self.state = BREAKER.next(self.state, event)
