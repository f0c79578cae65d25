"""One message of an event stream, as a subscription gives it to its reader."""

from __future__ import annotations

from typing import NamedTuple


class EventMessage(NamedTuple):
    """One message of a stream."""

    subject: str
    payload: bytes
    sequence: int
    """Position in the stream, from 1. Starts again when the stream is made again."""
