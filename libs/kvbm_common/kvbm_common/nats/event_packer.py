"""Event packer: the events of several sources, gathered and cut into packed messages."""

from __future__ import annotations

from collections.abc import Iterator

from kvbm_common.wire.packed_events import PACKED_BLOCKS_MAX, Packable, block_count, stamped


class EventPacker:
    """Events that wait for their message, in order."""

    def __init__(self) -> None:
        self._events: dict[tuple[str, str], list[Packable]] = {}
        """The waiting events by host and source: order matters within a source only."""
        self.event_count = 0
        """The number of events that wait."""
        self._blocks = 0

    @property
    def is_full(self) -> bool:
        """Tell whether there is enough for a message."""
        return self._blocks >= PACKED_BLOCKS_MAX

    def add(self, event: Packable) -> None:
        """Gather an event that has blocks."""
        self._events.setdefault((event.host, event.source), []).append(event)
        self.event_count += 1
        self._blocks += block_count(event)

    def take(self, now_ms: int) -> list[list[Packable]]:
        """Take out all that was gathered, as the events of each message, with a time stamp."""
        messages = [
            message
            for events in self._events.values()
            for message in _messages([stamped(one, now_ms) for one in events])
        ]
        assert sum(map(len, messages)) == self.event_count, f"{self.event_count} events waited"
        self._events, self.event_count, self._blocks = {}, 0, 0
        return messages


def _messages(events: list[Packable]) -> Iterator[list[Packable]]:
    """Yield the events of one source in messages: without a gap in their numbers, and with at most
    `PACKED_BLOCKS_MAX` blocks unless a single event has more."""
    message, blocks = list[Packable](), 0
    for event in events:
        size = block_count(event)
        if message and (
            blocks + size > PACKED_BLOCKS_MAX
            or (event.epoch, event.seq) != (message[-1].epoch, message[-1].seq + 1)
        ):
            yield message
            message, blocks = [], 0
        message.append(event)
        blocks += size
    if message:
        yield message
