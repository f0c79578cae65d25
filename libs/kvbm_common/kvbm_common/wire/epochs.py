"""Epochs that may be believed: lives of sources count microseconds of wall clock.

A consumer takes any higher epoch for a new life, and everything below it for the past. One message
with a huge epoch would make it deaf to its source for good. So an epoch from further in the future
than clocks can differ is refused where messages are read.
"""

from __future__ import annotations

from kvbm_common.wire.codec import WireError

AHEAD_MAX_S = 86_400
"""A day: by so much the clocks of two hosts may differ, or have been set back."""


def epoch_max(now_s: float) -> int:
    """Return the highest epoch that is believed at a wall-clock time.

    >>> epoch_max(0.0)
    86400000000
    """
    assert now_s >= 0, f"{now_s} s is before 1970"
    return int((now_s + AHEAD_MAX_S) * 1_000_000)


def require_epoch(epoch: int, now_s: float) -> None:
    """Raise WireError for an epoch from the future."""
    if epoch > epoch_max(now_s):
        raise WireError(f"epoch {epoch} is more than a day ahead", kind="future_epoch")
