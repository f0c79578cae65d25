"""The events that the consolidator has published lately, for the story of a block."""

from __future__ import annotations

from collections import deque

from kvbm_common.identity import SequenceHash
from kvbm_common.wire.events import Cleared, Event, Removed, Stored

STORY_EVENTS_MAX = 2_000
"""Published events that are remembered for stories."""


class PublishedEvents:
    """The last events, each with its time; the oldest is forgotten when a new one comes."""

    def __init__(self) -> None:
        self._events: deque[tuple[int, Event]] = deque(maxlen=STORY_EVENTS_MAX)

    def add(self, event: Event, now_ms: int) -> None:
        """Remember an event that is published now."""
        self._events.append((now_ms, event))

    def story(self, sequence_hash: SequenceHash) -> list[str]:
        """Return what was lately published about a block, newest last."""
        return [
            f"{now_ms} ms {describe(event)}"
            for now_ms, event in self._events
            if mentions(event, sequence_hash)
        ]


def mentions(event: Event, sequence_hash: SequenceHash) -> bool:
    """Return whether an event is about a block; a clear is about every block."""
    text = sequence_hash.hex()
    match event:
        case Stored():
            return any(text in run.hashes for run in event.runs)
        case Removed():
            return text in event.hashes
        case Cleared():
            return True


def describe(event: Event) -> str:
    """Return a line about an event, without its blocks."""
    kind = event.__struct_config__.tag
    return f"{kind} {event.source} rank {event.rank} epoch {event.epoch} seq {event.seq}"
