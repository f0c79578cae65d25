"""Logging: one line per event on standard error, and a limiter for lines that would repeat."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable

REPEAT_S = 60.0
"""A line of one kind is written at most once a minute; the next one says how many were not."""
KINDS_MAX = 256
"""Kinds that are remembered. Kinds are constants in our code, so more would be a mistake there."""


def set_up(source: str, level: str) -> None:
    """Send every log line of this process to standard error, with its time, source and module."""
    handler = logging.StreamHandler(sys.stderr)
    formatter = logging.Formatter(
        f"%(asctime)s.%(msecs)03d %(levelname)-7s {source} %(name)s: %(message)s",
        datefmt="%Y-%m-%dT%H:%M:%S",
    )
    handler.setFormatter(formatter)
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
    # The client's own lines repeat ours, once per attempt.
    logging.getLogger("nats").setLevel(logging.CRITICAL)


class OncePerKind:
    """Writes the first line of a kind, then at most one per minute with the count between."""

    def __init__(
        self, logger: logging.Logger, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._logger = logger
        self._clock_s = clock_s
        self._next_s: dict[str, float] = {}
        self._withheld: dict[str, int] = {}

    def warning(self, kind: str, message: str) -> None:
        """Log a warning, or count it silently."""
        now_s = self._clock_s()
        assert kind in self._next_s or len(self._next_s) < KINDS_MAX, kind
        if now_s < self._next_s.get(kind, 0.0):
            self._withheld[kind] = self._withheld.get(kind, 0) + 1
            return
        self._next_s[kind] = now_s + REPEAT_S
        withheld = self._withheld.pop(kind, 0)
        suffix = f" (and {withheld} more of this kind)" if withheld else ""
        self._logger.warning("%s: %s%s", kind, message, suffix)
