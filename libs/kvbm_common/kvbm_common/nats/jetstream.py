"""JetStream as we use it: what a connection must offer, and how streams are made and written to.

The JetStream API is request/reply in JSON, so this module needs a `Link`, not a client library.
"""

from __future__ import annotations

import asyncio
import base64
import math
from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime
from typing import Protocol

import msgspec

from kvbm_common.errors import KvbmError, NotPermitted
from kvbm_common.nats.raw_messages import RawMessage
from kvbm_common.nats.streams import StreamLimits, StreamSpec
from kvbm_common.wire.codec import UNREADABLE

API_DEADLINE_S = 2.0
"""An answer of the JetStream API on a busy single server takes milliseconds; a dead one none."""
BACKOFF_S = (0.05, 0.1, 0.2, 0.5, 1.0)
"""Pauses between tries; the last one repeats without end."""
NO_STREAM = 10059
"""The server's error code for a stream that is not there."""
NO_MESSAGE = 10037
"""The server's error code for a subject without messages."""
NAME_IN_USE = 10058
"""The server's error code for a stream that is there with other limits."""


class JetStreamError(KvbmError):
    """The JetStream API refused; `server_code` is nats-server's own error code."""

    code = "jetstream_error"

    def __init__(self, description: str, server_code: int) -> None:
        super().__init__(f"{description} ({server_code})")
        self.server_code = server_code


class StreamMissing(KvbmError):
    """A stream is not there, and this role may not make it."""

    code = "stream_missing"


class Link(Protocol):
    """The part of a connection that JetStream needs. `Bus` is one."""

    @property
    def connected(self) -> bool:
        """Tell whether NATS answers now."""

    @property
    def guarded(self) -> bool:
        """Tell whether this connection has credentials: then all messages of streams are marked."""

    @property
    def limits(self) -> StreamLimits:
        """The limits that an operator has set for the streams."""

    @property
    def packs_events(self) -> Callable[[], bool]:
        """Tell whether every reader that is present reads packed events."""

    @property
    def generation(self) -> int:
        """Grows with every reconnection: what was in flight before may be lost."""

    async def wait_connected(self) -> None:
        """Wait, as long as it takes, until NATS answers."""

    def on_reconnect(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call back after every reconnection; returns the function that ends it."""

    def note_refused(self, stream: str, error: KvbmError) -> None:
        """Count and log that the server has refused to let this connection read a stream."""

    def new_inbox(self) -> str:
        """Return a subject on which no other client listens."""

    async def publish_raw(
        self,
        subject: str,
        payload: bytes,
        *,
        reply: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Send; raises BusUnavailable, MessageTooLarge."""

    async def request_raw(
        self,
        subject: str,
        payload: bytes,
        *,
        deadline_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> RawMessage:
        """Send and wait for one reply; raises BusUnavailable, NoResponder, DeadlineExceeded."""

    async def subscribe_raw(
        self, subject: str, callback: Callable[[list[RawMessage]], None]
    ) -> Callable[[], Awaitable[None]]:
        """Call back with what was read together; returns the function that ends it."""


SILENT_S = 12.0
"""A source in order says something every second; the server itself gives one up after ten."""
NEARLY_FULL = 0.9
"""The part of a stream's bytes or age from which on the oldest messages go for the newest."""


class StreamState(msgspec.Struct, frozen=True):
    """The part of a stream's state that we read."""

    first_seq: int
    last_seq: int
    bytes: int = 0
    first_ts: datetime | None = None
    """When the oldest message came."""


class StreamSizes(msgspec.Struct, frozen=True):
    """The part of a stream's configuration that we read."""

    max_bytes: int = -1
    """-1: no limit."""
    max_age: int = 0
    """In ns; 0: no limit."""


class _External(msgspec.Struct, frozen=True):
    api: str = ""


class Source(msgspec.Struct, frozen=True):
    """The part of a source's state that we read."""

    name: str
    external: _External = _External()
    active: int = -1
    """Nanoseconds since it was heard; -1: never since the stream's server began."""

    @property
    def zone(self) -> str:
        """The zone whose stream it is, empty for another source.

        >>> Source("KVBM_EVENTS", _External("$JS.east.API")).zone
        'east'
        """
        return self.external.api.removeprefix("$JS.").removesuffix(".API")

    @property
    def is_silent(self) -> bool:
        """Tell whether the zone was not heard for some time, or never."""
        return not 0 <= self.active < SILENT_S * 1e9


class StreamInfo(msgspec.Struct, frozen=True):
    """The part of a stream's description that we read. `created` tells lives of a stream apart."""

    created: datetime
    state: StreamState
    config: StreamSizes = StreamSizes()
    sources: list[Source] = []
    """Streams of zones, which this one reads."""

    def horizon_s(self, now: datetime) -> float:
        """Return how far back a reader can go; infinite while the stream has forgotten nothing.

        Where the size ends messages it is the age of the oldest, else the age that is kept.
        """
        first, most = self.state.first_ts, self.config.max_bytes
        if first is None or not self.state.last_seq:
            return math.inf  # The server dates the first message of an empty stream to the year 1.
        age_s, kept_s = max(0.0, (now - first).total_seconds()), self.config.max_age / 1e9
        if 0 < most <= self.state.bytes / NEARLY_FULL:
            return age_s
        # The oldest message is always a little younger than one that has just gone.
        return kept_s if 0 < kept_s <= age_s / NEARLY_FULL else math.inf


class PublishAck(msgspec.Struct, frozen=True):
    """The server's answer to a publication: where it stored the message."""

    seq: int


class _ApiError(msgspec.Struct, frozen=True):
    description: str = "refused"
    err_code: int = 0


class _ErrorReply(msgspec.Struct, frozen=True):
    error: _ApiError


def raise_for_error(payload: bytes) -> None:
    """Raise JetStreamError if the reply is one."""
    if b'"error"' not in payload:
        return
    try:
        error = msgspec.json.decode(payload, type=_ErrorReply).error
    except UNREADABLE:
        return
    raise JetStreamError(error.description, error.err_code)


async def call_api(link: Link, verb: str, request: object = None) -> bytes:
    """Call `$JS.API.<verb>`; raises JetStreamError, BusUnavailable, DeadlineExceeded."""
    payload = b"" if request is None else msgspec.json.encode(request)
    reply = await link.request_raw(f"$JS.API.{verb}", payload, deadline_s=API_DEADLINE_S)
    raise_for_error(reply.payload)
    return reply.payload


async def ensure_stream(link: Link, spec: StreamSpec) -> StreamInfo:
    """Make the stream if it is not there. One with other limits is taken as it is.

    Raises StreamMissing where this role may not make it, and JetStreamError.
    """
    try:
        payload = await call_api(link, f"STREAM.INFO.{spec.name}")
    except JetStreamError as error:
        if error.server_code != NO_STREAM:
            raise
        payload = await _create_stream(link, spec)
    return msgspec.json.decode(payload, type=StreamInfo)


async def _create_stream(link: Link, spec: StreamSpec) -> bytes:
    try:
        return await call_api(link, f"STREAM.CREATE.{spec.name}", link.limits.fit(spec).as_config())
    except NotPermitted as error:
        text = f"the stream {spec.name} is not there; the role admin makes it: kvbm nats-streams"
        raise StreamMissing(text) from error
    except JetStreamError as error:
        if error.server_code != NAME_IN_USE:
            raise
        # Another client made it between our two calls.
        return await call_api(link, f"STREAM.INFO.{spec.name}")


async def publish_acknowledged(
    link: Link,
    spec: StreamSpec,
    subject: str,
    payload: bytes,
    *,
    headers: Mapping[str, str] | None = None,
) -> PublishAck:
    """Store one message in this stream and wait for the acknowledgement.

    Raises JetStreamError, NoResponder (no stream takes this subject), BusUnavailable,
    DeadlineExceeded.
    """
    marked = spec.marked | dict(headers or {})
    reply = await link.request_raw(subject, payload, deadline_s=API_DEADLINE_S, headers=marked)
    raise_for_error(reply.payload)
    return msgspec.json.decode(reply.payload, type=PublishAck)


class StoredMessage(msgspec.Struct, frozen=True):
    """One message of a stream, as the API gives it."""

    seq: int
    time: datetime
    """When the server stored it."""
    data: str = ""
    """In base64; the server leaves out what is empty."""
    hdrs: str = ""

    @property
    def payload(self) -> bytes:
        """Return the bytes of the message; raises ValueError."""
        return base64.b64decode(self.data)

    @property
    def headers(self) -> bytes:
        """Return the block of headers; raises ValueError."""
        return base64.b64decode(self.hdrs)


class _MessageReply(msgspec.Struct, frozen=True):
    message: StoredMessage


async def last_stored(link: Link, spec: StreamSpec, subject: str) -> StoredMessage | None:
    """Return the last message on a subject of a stream, if it has one; raises KvbmError."""
    try:
        reply = await call_api(link, f"STREAM.MSG.GET.{spec.name}", {"last_by_subj": subject})
    except JetStreamError as error:
        if error.server_code == NO_MESSAGE:
            return None
        raise
    return msgspec.json.decode(reply, type=_MessageReply).message


class Backoff:
    """Sleeps longer after each try that failed in a row."""

    def __init__(self) -> None:
        self._tries = 0

    def reset(self) -> None:
        """Begin again with the shortest pause."""
        self._tries = 0

    async def sleep(self) -> None:
        """Wait, after a failed try, before the next one."""
        pause_s = BACKOFF_S[min(self._tries, len(BACKOFF_S) - 1)]
        self._tries += 1
        await asyncio.sleep(pause_s)
