"""JetStream as we use it: what a connection must offer, and streams made to measure.

The JetStream API is request/reply in JSON, so this module needs a `Link`, not a client library.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

import msgspec

from kvbm_common.errors import KvbmError
from kvbm_common.nats.raw_messages import RawMessage

API_DEADLINE_S = 2.0
"""An answer of the JetStream API on a busy single server takes milliseconds; a dead one none."""
BACKOFF_S = (0.05, 0.1, 0.2, 0.5, 1.0)
"""Pauses between tries; the last one repeats without end."""
NO_STREAM = 10059
"""The server's error code for a stream that is not there."""
NAME_IN_USE = 10058
"""The server's error code for a stream that is there with other limits."""


class JetStreamError(KvbmError):
    """The JetStream API refused; `server_code` is nats-server's own error code."""

    code = "jetstream_error"

    def __init__(self, description: str, server_code: int) -> None:
        super().__init__(f"{description} ({server_code})")
        self.server_code = server_code


class Link(Protocol):
    """What JetStream needs of a connection. `Bus` is one."""

    @property
    def connected(self) -> bool:
        """Whether NATS answers now."""

    @property
    def generation(self) -> int:
        """Grows with every reconnection: what was in flight before may be lost."""

    async def wait_connected(self) -> None:
        """Wait, as long as it takes, until NATS answers."""

    def on_reconnect(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call back after every reconnection; returns the function that ends it."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSpec:
    """What a stream keeps. The oldest messages go first when a limit is reached."""

    name: str
    subjects: tuple[str, ...]
    bytes_max: int
    age_max_s: float
    duplicate_window_s: float = 120.0
    per_subject_max: int = -1
    """Messages kept per subject; 1 makes a stream of last values (a KV bucket)."""

    def as_config(self) -> dict[str, Any]:
        """Return the stream as the API takes it; durations in ns."""
        config: dict[str, Any] = {
            "name": self.name,
            "subjects": list(self.subjects),
            "retention": "limits",
            "discard": "old",
            "storage": "file",
            "num_replicas": 1,
            "max_bytes": self.bytes_max,
            "max_age": int(self.age_max_s * 1e9),
            "max_msgs_per_subject": self.per_subject_max,
            "duplicate_window": int(min(self.duplicate_window_s, self.age_max_s) * 1e9),
        }
        if self.per_subject_max == 1:
            # What `nats kv` expects of a bucket.
            config |= {"allow_rollup_hdrs": True, "deny_delete": True, "allow_direct": True}
        return config


EVENTS = StreamSpec(
    name="KVBM_EVENTS",
    subjects=("kvbm.v1.events.>",),
    bytes_max=256 * 1024 * 1024,
    age_max_s=6 * 3600,
)
"""The events of all sources. 256 MiB hold about 7 million blocks at 37 bytes of JSON each; who
comes later than that, or than 6 hours, asks the sources for snapshots."""


CONSOLIDATED = StreamSpec(
    name="KVBM_CONSOLIDATED",
    subjects=("kvbm.v1.consolidated.>",),
    bytes_max=128 * 1024 * 1024,
    age_max_s=6 * 3600,
)
"""The same blocks once more, de-duplicated over the tiers of a host; written by consolidators."""


class StreamState(msgspec.Struct, frozen=True):
    """The part of a stream's state that we read."""

    first_seq: int
    last_seq: int


class StreamInfo(msgspec.Struct, frozen=True):
    """The part of a stream's description that we read. `created` tells lives of a stream apart."""

    created: datetime
    state: StreamState


class PublishAck(msgspec.Struct, frozen=True):
    """Where the server stored a message."""

    seq: int
    duplicate: bool = False


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
    except msgspec.MsgspecError:
        return
    raise JetStreamError(error.description, error.err_code)


async def call_api(link: Link, verb: str, request: object = None) -> bytes:
    """Call `$JS.API.<verb>`; raises JetStreamError, BusUnavailable, DeadlineExceeded."""
    payload = b"" if request is None else msgspec.json.encode(request)
    reply = await link.request_raw(f"$JS.API.{verb}", payload, deadline_s=API_DEADLINE_S)
    raise_for_error(reply.payload)
    return reply.payload


async def ensure_stream(link: Link, spec: StreamSpec) -> StreamInfo:
    """Make the stream if it is not there. One with other limits is taken as it is."""
    try:
        payload = await call_api(link, f"STREAM.INFO.{spec.name}")
    except JetStreamError as error:
        if error.server_code != NO_STREAM:
            raise
        payload = await _create_stream(link, spec)
    return msgspec.json.decode(payload, type=StreamInfo)


async def _create_stream(link: Link, spec: StreamSpec) -> bytes:
    try:
        return await call_api(link, f"STREAM.CREATE.{spec.name}", spec.as_config())
    except JetStreamError as error:
        if error.server_code != NAME_IN_USE:
            raise
        # Another client made it between our two calls.
        return await call_api(link, f"STREAM.INFO.{spec.name}")


async def publish_acknowledged(
    link: Link, subject: str, payload: bytes, *, headers: Mapping[str, str] | None = None
) -> PublishAck:
    """Store one message in its stream and wait for the acknowledgement.

    Raises JetStreamError, NoResponder (no stream takes this subject), BusUnavailable,
    DeadlineExceeded.
    """
    reply = await link.request_raw(subject, payload, deadline_s=API_DEADLINE_S, headers=headers)
    raise_for_error(reply.payload)
    return msgspec.json.decode(reply.payload, type=PublishAck)


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
