"""Trace context: the `traceparent` of W3C Trace Context, as it travels in messages.

    00-<trace id, 32 hex digits>-<span id, 16 hex digits>-<flags>

Engines import this: no OpenTelemetry here. A malformed context counts as no context.
"""

from __future__ import annotations

import re
import secrets
from typing import NamedTuple

_FORM = re.compile("00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")


class TraceContext(NamedTuple):
    """A span and the trace that it belongs to."""

    trace_id: str
    span_id: str

    def __str__(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-01"

    def child(self) -> TraceContext:
        """Return a new span of the same trace."""
        return TraceContext(self.trace_id, _digits(8))


def new_trace() -> TraceContext:
    """Return the first span of a new trace."""
    return TraceContext(_digits(16), _digits(8))


def parse(text: str) -> TraceContext | None:
    """Return the span that `text` names, None if it is not to be recorded."""
    found = _FORM.fullmatch(text)
    if found is None or not int(found[3], 16) & 1:
        return None
    if not int(found[1], 16) or not int(found[2], 16):
        return None
    return TraceContext(found[1], found[2])


def _digits(size: int) -> str:
    # The first half of a trace id is random as well: samplers look at its end.
    return f"{secrets.randbits(8 * size) or 1:0{2 * size}x}"
