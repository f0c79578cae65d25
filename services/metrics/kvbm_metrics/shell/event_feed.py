"""Event feed: events of all tiers and engines as server-sent events, for pages and `curl -N`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Depends, Header, Query
from fastapi.responses import StreamingResponse
from kvbm_common.errors import ConfigError, KvbmError
from kvbm_common.nats.bus import Bus
from kvbm_common.nats.consumers import Start
from kvbm_common.nats.event_message import EventMessage
from kvbm_common.nats.jetstream import ensure_stream
from kvbm_common.nats.marked_messages import UNMARKED
from kvbm_common.nats.since import POSITION_MAX, start_of
from kvbm_common.nats.streams import StreamSpec
from kvbm_common.runtime.logs import OncePerKind
from kvbm_common.wire.codec import WireError
from kvbm_common.wire.events import SUBJECT_PREFIX, event_codec
from kvbm_common.wire.packed_events import PACKED, events_on, kind_of

from kvbm_metrics.shell import problems
from kvbm_metrics.shell.access import may_read
from kvbm_metrics.shell.problems import BadQuery
from kvbm_metrics.shell.state import Api, ApiOf

HEARTBEAT_S = 10.0
"""The interval of comments on an idle feed: proxies keep it open, and readers notice its end."""
TELL_SKIPPED_S = 1.0
FEEDS_MAX = 32
"""Feeds at the same time: each is a consumer of the stream in NATS."""
EVERYTHING = f"{SUBJECT_PREFIX}.*.*.*"
"""The subject of all events: positions in its stream count messages, of one event or many."""

Part = Annotated[str, Query(pattern=r"^(\*|[A-Za-z0-9_-]{1,64})$")]

log = OncePerKind(logging.getLogger(__name__))
router = APIRouter(prefix="/v1", dependencies=[Depends(may_read)])


class TooManyFeeds(KvbmError):
    """All feeds are in use: another reader has to leave first."""

    code = "too_many_feeds"


class EventStream(StreamingResponse):
    """A response of server-sent events, with its media type for the API's document."""

    media_type = "text/event-stream"


@router.get(
    "/events",
    tags=["events"],
    response_class=EventStream,
    responses=problems.described(
        HTTPStatus.UNAUTHORIZED, HTTPStatus.UNPROCESSABLE_ENTITY, HTTPStatus.SERVICE_UNAVAILABLE
    ),
)
async def events(
    api: ApiOf,
    host: Part = "*",
    source: Part = "*",
    kind: Annotated[str, Query(pattern=r"^(\*|stored|removed|cleared)$")] = "*",
    since: Annotated[
        str, Query(description="now, all, 90s, 10m, 6h, an ISO time, or #SEQUENCE.")
    ] = "now",
    per_second: Annotated[
        int,
        Query(
            ge=0,
            le=10_000,
            description="At most so many a second; an event `skipped` counts the others, and the "
            "messages (`unread_messages`, of one event or many) that were not even read. 0: all.",
        ),
    ] = 0,
    last_event_id: Annotated[
        str,
        Header(description="Go on after this one; from the beginning if NATS has lost it."),
    ] = "",
) -> EventStream:
    """Stream events as they come, from now on or from the past; `id` is the stream position."""
    start = _start(since, last_event_id)
    if len(api.feeds) >= FEEDS_MAX:
        raise TooManyFeeds(f"{len(api.feeds)} feeds are open")
    try:
        api.fleet.bus.limits.events_of(host)
    except ConfigError as error:
        raise BadQuery("host", error.accepted) from error
    # One message may carry stored and removed blocks: their kind is looked at later.
    subject = f"{SUBJECT_PREFIX}.{host}.{source}.{kind if kind == 'cleared' else '*'}"
    headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
    parts = counted(api, subject, start, per_second=per_second, kind=kind)
    return EventStream(parts, headers=headers)


def _start(since: str, last_event_id: str) -> Start:
    if last_event_id:
        if not (last_event_id.isascii() and last_event_id.isdecimal()):
            raise BadQuery("last-event-id", "the id of an event is a number")
        return min(int(last_event_id[:20]), POSITION_MAX) + 1
    try:
        return start_of(since, datetime.now(UTC))
    except ConfigError as error:
        raise BadQuery("since", error.accepted) from error


async def counted(
    api: Api, subject: str, start: Start, *, per_second: int = 0, kind: str = "*"
) -> AsyncGenerator[bytes, None]:
    """Yield a feed that takes one of the places from its first part to its end.

    A reader that leaves before its feed begins would never give a place back, so two that come in
    the same moment may both get the last one.
    """
    place = object()
    api.feeds.add(place)
    try:
        parts = feed(api.fleet.bus, subject, start, per_second=per_second, kind=kind)
        async with contextlib.aclosing(parts):
            async for part in parts:
                yield part
    finally:
        api.feeds.discard(place)


class Sample:
    """A filter that lets `per_second` events of each second pass, and counts the others."""

    def __init__(self, per_second: int, kind: str = "*") -> None:
        self._per_second = per_second
        self.kind = kind
        self._second = -1
        self._room = 0
        self._skipped = self._unread = 0
        self.position = 0
        """The position of the last event of a turn, as long as more are to come."""

    @property
    def owes(self) -> bool:
        """Tell whether events were left out that the reader was not informed of."""
        return self._skipped + self._unread > 0

    def wait_s(self, now_s: float) -> float:
        """Return the seconds until an event may pass again."""
        is_full = self._per_second and self._room <= 0 and int(now_s) == self._second
        return self._second + 1 - now_s if is_full else 0.0

    def leave_out(self, count: int) -> None:
        """Count messages that were not read, so the number of their events is not known."""
        self._unread += count

    def take(self, messages: Sequence[EventMessage], now_s: float) -> bytes:
        """Return the text for the reader; once a second with the counts of what was left out."""
        said = b""
        if int(now_s) != self._second:
            self._second, self._room = int(now_s), self._per_second
            if self.owes:
                counts = b'{"skipped": %d, "unread_messages": %d}' % (self._skipped, self._unread)
                said = b"event: skipped\ndata: %s\n\n" % counts
            self._skipped = self._unread = 0
        found: list[bytes] = []
        for message in messages:
            try:
                found += texts_of(message, self.kind)
            except WireError as error:
                self._skipped += 1
                log.warning(error.kind, f"{message.subject}: {error}")
        passed = found[: max(0, self._room)] if self._per_second else found
        self._room -= len(passed)
        self._skipped += len(found) - len(passed)
        return said + b"".join(passed)


async def feed(
    bus: Bus,
    subject: str,
    start: Start,
    *,
    heartbeat_s: float = HEARTBEAT_S,
    per_second: int = 0,
    kind: str = "*",
) -> AsyncGenerator[bytes, None]:
    """Yield batches of messages, as text; comments in between, while nothing happens.

    A sample of all events is read in turns: messages beyond it are not fetched, since reading the
    events of a busy host costs more than all else that a page asks for.
    """
    sample = Sample(per_second, kind)
    yield b": kvbm\n\n"  # The headers go out at once.
    while True:
        turn = _turn(bus, subject, start, sample, heartbeat_s=heartbeat_s)
        async with contextlib.aclosing(turn):
            async for said in turn:
                yield said
        if not sample.position:
            return
        await _pause(sample.wait_s(_now_s()))
        start = await _after_the_rest(bus, sample)


async def _turn(
    bus: Bus, subject: str, start: Start, sample: Sample, *, heartbeat_s: float
) -> AsyncGenerator[bytes, None]:
    """Yield parts until the sample of everything has no room left in this second.

    The sample then has the position at which the turn has ended.
    """
    sample.position = 0
    spec = _stream_of(bus, subject)
    async with bus.event_subscription(start=start, subject=subject, spec=spec) as batches:
        batch = asyncio.ensure_future(anext(batches, None))
        try:
            while True:
                timeout_s = TELL_SKIPPED_S if sample.owes else heartbeat_s
                done, _ = await asyncio.wait({batch}, timeout=timeout_s)
                if not done:
                    yield sample.take((), _now_s()) or b": alive\n\n"
                    continue
                messages = batch.result()
                if messages is None:
                    return
                if said := sample.take(messages, _now_s()):
                    yield said
                if subject == EVERYTHING and sample.kind == "*" and sample.wait_s(_now_s()):
                    sample.position = messages[-1].sequence
                    return
                batch = asyncio.ensure_future(anext(batches, None))
        finally:
            batch.cancel()
            await asyncio.gather(batch, return_exceptions=True)


def _now_s() -> float:
    return time.monotonic()


async def _pause(seconds: float) -> None:
    await asyncio.sleep(seconds)


def _stream_of(bus: Bus, subject: str) -> StreamSpec:
    return bus.limits.events_of(subject.split(".")[SUBJECT_PREFIX.count(".") + 1])


async def _after_the_rest(bus: Bus, sample: Sample) -> Start:
    """Return the start of the next turn; messages that came meanwhile count as left out."""
    try:
        last = (await ensure_stream(bus, _stream_of(bus, EVERYTHING))).state.last_seq
    except KvbmError:  # NATS is away: the next turn waits for it.
        return sample.position + 1
    # A stream that ends before our position is another one: all that it has was left out.
    sample.leave_out(last - sample.position if last >= sample.position else last)
    return last + 1


def texts_of(message: EventMessage, kind: str = "*") -> list[bytes]:
    """Format the events of a message for the feed; a message that no client published has none.

    A payload is JSON as msgspec writes it, in one line; a stranger's may have more. Only the last
    event of a message has the position: a reader that goes on after it has had all of them.
    Raises WireError for packed events that cannot be read.
    """
    said = message.subject.rsplit(".", 1)[1]
    if message.payload == UNMARKED:
        return []
    if said != PACKED:
        return [_text(said, message.payload, message.sequence)] if kind in ("*", said) else []
    events = events_on(message.subject, message.payload)
    wanted = [one for one in events if kind in ("*", kind_of(one))]
    last = len(wanted) - 1
    return [
        _text(kind_of(one), event_codec.encode(one), message.sequence if at == last else None)
        for at, one in enumerate(wanted)
    ]


def _text(kind: str, payload: bytes, position: int | None) -> bytes:
    """Format an event; without a position (None) it has no `id`."""
    data = b"".join(b"data: %s\n" % line for line in payload.splitlines())
    place = b"" if position is None else b"id: %d\n" % position
    return b"%sevent: %s\n%s\n" % (place, kind.encode(), data)
