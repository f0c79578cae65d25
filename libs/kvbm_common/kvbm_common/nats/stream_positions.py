"""The place of an event in its stream, from the reply subject that JetStream gives it."""

from __future__ import annotations

import msgspec

from kvbm_common.nats.raw_messages import RawMessage

PLACED = "$JS.ACK."
"""How the reply subject of an event begins; behind it is its place in the stream."""
PLACE_NUMBERS = 4
"""At its end: positions in stream and consumer, time, messages pending."""
DOTS = (4, 6)
"""Before these, without and with a domain; a cluster's replies end with something else."""

Columns = tuple[list[int], list[int], list[int]]
"""Stream positions, consumer positions and messages pending."""

_numbers = msgspec.json.Decoder(list[int])


def is_event(message: RawMessage) -> bool:
    """Tell whether a message is an event, by its reply subject."""
    return message.reply.startswith(PLACED)


def positions_of(reply: str) -> tuple[int, int, int]:
    """Stream position, consumer position and messages pending, from the reply subject.

    `$JS.ACK.<stream>.<consumer>.<delivered>.<stream pos>.<consumer pos>.<time>.<pending>`, with
    two tokens (domain, account) more in front of the stream's name and one at the end in clusters.
    """
    tokens = reply.split(".")
    at = _first_number(len(tokens))
    return int(tokens[at]), int(tokens[at + 1]), int(tokens[at + 3])


def alike_positions(replies: list[str]) -> Columns | None:
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


def several_positions(replies: list[str]) -> Columns | None:
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
