"""The option `--since` of readers of an event stream: which position or time a text stands for."""

from __future__ import annotations

import contextlib
import re
from datetime import UTC, datetime, timedelta

from kvbm_common.errors import ConfigError
from kvbm_common.nats.consumers import Start

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
"""Seconds of each unit."""
POSITION_MAX = 2**63 - 2
"""The last position in a stream to start from: NATS takes no higher one."""
ACCEPTED = f"now, all, 90s, 10m, 6h, an ISO time, or a position from #1 to #{POSITION_MAX}"
"""The values that `--since` accepts, for people."""


def start_of(text: str, now: datetime) -> Start:
    """Return where to begin reading for a `--since` of `text`; raise ConfigError for other texts.

    >>> start_of("2m", datetime(2030, 1, 1, 0, 3, tzinfo=UTC)).isoformat()
    '2030-01-01T00:01:00+00:00'
    """
    if text == "now":
        return "new"
    if text == "all":
        return "all"
    if found := re.fullmatch(r"(\d+)([smhd])", text):
        with contextlib.suppress(OverflowError, ValueError):  # Of more than a few thousand years.
            return now - timedelta(seconds=int(found[1]) * UNITS[found[2]])
    if found := re.fullmatch(r"#(\d{1,19})", text):
        position = int(found[1])
        if 1 <= position <= POSITION_MAX:
            return position
    with contextlib.suppress(OverflowError, ValueError):  # Before the year 1 in UTC.
        return datetime.fromisoformat(text).astimezone(UTC)
    raise ConfigError("--since", text, ACCEPTED)
