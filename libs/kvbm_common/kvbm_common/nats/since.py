"""The option `--since` of readers of an event stream: which position or time a text stands for."""

from __future__ import annotations

import contextlib
import re
from datetime import UTC, datetime, timedelta

from kvbm_common.errors import ConfigError
from kvbm_common.nats.consumers import Start

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
"""Seconds of each unit."""


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
    if found := re.fullmatch(r"#(\d+)", text):
        return int(found[1])
    with contextlib.suppress(ValueError):
        return datetime.fromisoformat(text).astimezone(UTC)
    raise ConfigError("--since", text, "now, all, 90s, 10m, 6h, an ISO time, or #SEQUENCE")
