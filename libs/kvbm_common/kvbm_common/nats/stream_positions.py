"""Positions in a stream: those of events, and the one up to which a reader has missed nothing.

JetStream gives an event its place in the reply subject. Positions of a part of a stream have holes,
so a hole says nothing, and a server that drops a message before it was delivered says nothing
either. What can be known:

    dropped   the stream begins after it: nothing up to here can still come
    certain   all of ours up to here was delivered, or its loss was told

When `dropped` has passed `certain`, something in between may have been ours. Otherwise nothing
after `certain` has been dropped yet, and so nothing of ours up to what was delivered in order, nor
up to what the stream ended with when the server had nothing left for us: that is certain now. A
reader that keeps up learns of a loss only if the whole stream is replaced between three looks.
"""

from __future__ import annotations

import msgspec

from kvbm_common.nats.jetstream import Link, StreamInfo, StreamState, call_api
from kvbm_common.nats.raw_messages import RawMessage

PLACED = "$JS.ACK."
"""The first tokens of the reply subject of an event; its place in the stream follows."""
PLACE_NUMBERS = 4
"""Numbers at the end of a reply subject: positions in stream and consumer, time, messages left."""
DOTS = (4, 6)
"""Dots before those numbers, without and with a domain; in clusters a token follows them."""

Columns = tuple[list[int], list[int], list[int]]
"""Stream positions, consumer positions and messages pending."""

_numbers = msgspec.json.Decoder(list[int])


def is_event(message: RawMessage) -> bool:
    """Tell whether a message is an event, by its reply subject."""
    return message.reply.startswith(PLACED)


def positions_of(reply: str) -> tuple[int, int, int]:
    """Return stream position, consumer position and messages pending, from a reply subject.

    `$JS.ACK.<stream>.<consumer>.<delivered>.<stream pos>.<consumer pos>.<time>.<pending>`, with
    two tokens (domain, account) more in front of the stream's name and one at the end in clusters.
    """
    tokens = reply.split(".")
    at = _first_number(len(tokens))
    return int(tokens[at]), int(tokens[at + 1]), int(tokens[at + 3])


def columns_of_alike(replies: list[str]) -> Columns | None:
    """Return the positions of many replies, in columns, if only their numbers differ; else None."""
    beginning = replies[0].rsplit(".", PLACE_NUMBERS)[0]
    if len(replies) < 2 or not beginning.startswith(PLACED) or beginning.count(".") not in DOTS:
        return None
    text = ",".join(replies).replace(f"{beginning}.", "").replace(".", ",")
    try:
        numbers = _numbers.decode(f"[{text}]")
    except msgspec.DecodeError:
        return None
    if len(numbers) != PLACE_NUMBERS * len(replies):
        return None
    positions, consumer_positions, _, pending = (
        numbers[column::PLACE_NUMBERS] for column in range(PLACE_NUMBERS)
    )
    return positions, consumer_positions, pending


def columns_of(replies: list[str]) -> Columns | None:
    """Return the positions of many replies of one form, in columns; None for several forms."""
    size = replies[0].count(".") + 1
    if {reply.count(".") for reply in replies} != {size - 1}:
        return None
    tokens = ".".join(replies).split(".")
    at = _first_number(size)
    positions, consumer_positions, pending = (
        list(map(int, tokens[first::size])) for first in (at, at + 1, at + 3)
    )
    return positions, consumer_positions, pending


def _first_number(tokens: int) -> int:
    """Return which of so many tokens is the position in the stream."""
    return 7 if tokens >= 11 else 5


class _Delivered(msgspec.Struct, frozen=True):
    consumer_seq: int = 0


class ConsumerInfo(msgspec.Struct, frozen=True):
    """The part of a consumer's description that we read."""

    num_pending: int = 0
    delivered: _Delivered = _Delivered()


async def read_ends(link: Link, stream: str, consumer: str) -> tuple[ConsumerInfo, StreamInfo]:
    """Read the consumer, then the stream: `Horizon.advance` needs this order. Raises KvbmError."""
    asked = await call_api(link, f"CONSUMER.INFO.{stream}.{consumer}")
    consumer_info = msgspec.json.decode(asked, type=ConsumerInfo)
    return consumer_info, await read_stream(link, stream)


async def read_stream(link: Link, stream: str) -> StreamInfo:
    """Read what a stream has now; raises KvbmError."""
    asked = await call_api(link, f"STREAM.INFO.{stream}")
    return msgspec.json.decode(asked, type=StreamInfo)


class Horizon:
    """The position up to which a reader has missed nothing, moved on look by look. Pure."""

    def __init__(self) -> None:
        self.certain = 0
        """All of ours up to this position was delivered, or its loss was reported."""
        self._ended_with = 0
        """The last position of the stream at the look before."""

    def begin(self, certain: int, state: StreamState) -> None:
        """Begin with a new reader or another stream: nothing up to `certain` is wanted."""
        self.certain = max(0, certain)  # A stream that never held anything begins with 0.
        self._ended_with = state.last_seq

    def has_all(self, state: StreamState) -> bool:
        """Tell whether nothing has come since the last look, and all before is certain."""
        return state.last_seq == self._ended_with <= self.certain

    def advance(
        self, consumer: ConsumerInfo, state: StreamState, *, position: int, taken: int
    ) -> bool:
        """Return whether something may have been lost since the last look.

        `position`: in the stream, of the last message taken *before* the look; `taken`: how many
        of the consumer's messages were taken until after it.
        """
        dropped = state.first_seq - 1
        lost = dropped > self.certain
        self.certain = max(self.certain, dropped, position)
        if consumer.num_pending == 0 and taken >= consumer.delivered.consumer_seq:
            self.certain = max(self.certain, self._ended_with)
        self._ended_with = state.last_seq
        return lost
