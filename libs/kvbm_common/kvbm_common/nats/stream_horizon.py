"""The horizon: up to which position of a stream a reader of a part of it has missed nothing.

Positions of a part have holes, so a hole says nothing, and a server that drops a message before it
was delivered says nothing either. What can be known:

    dropped   the stream begins behind it: nothing up to here can still come
    certain   all of ours up to here was delivered, or its loss was told

When `dropped` has passed `certain`, something in between may have been ours. Otherwise nothing
behind `certain` has been dropped yet, and so nothing of ours up to what was delivered in order, nor
up to what the stream ended with when the server had nothing left for us: that is certain now. A
reader that keeps up learns of a loss only if the whole stream is replaced between three looks.
"""

from __future__ import annotations

import msgspec

from kvbm_common.nats.jetstream import Link, StreamInfo, StreamState, call_api


class _Delivered(msgspec.Struct, frozen=True):
    consumer_seq: int = 0


class ConsumerInfo(msgspec.Struct, frozen=True):
    """The part of a consumer's description that we read."""

    num_pending: int = 0
    delivered: _Delivered = _Delivered()


async def look(link: Link, stream: str, consumer: str) -> tuple[ConsumerInfo, StreamInfo]:
    """Read the consumer, then the stream: `Horizon.look` needs this order. Raises KvbmError."""
    asked = await call_api(link, f"CONSUMER.INFO.{stream}.{consumer}")
    consumer_info = msgspec.json.decode(asked, type=ConsumerInfo)
    asked = await call_api(link, f"STREAM.INFO.{stream}")
    return consumer_info, msgspec.json.decode(asked, type=StreamInfo)


class Horizon:
    """Pure: what was looked at comes in."""

    def __init__(self) -> None:
        self.certain = 0
        self._ended_with = 0
        """The last position of the stream at the look before."""

    def begin(self, certain: int, state: StreamState) -> None:
        """Begin with a new reader or another stream: nothing up to `certain` is wanted."""
        self.certain = max(0, certain)  # A stream that never held anything begins with 0.
        self._ended_with = state.last_seq

    def look(
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
