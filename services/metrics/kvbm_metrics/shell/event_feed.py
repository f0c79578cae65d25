"""The events of all tiers and engines as server-sent events, for pages and `curl -N`."""

from __future__ import annotations

import asyncio
import contextlib
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
from kvbm_common.nats.since import start_of
from kvbm_common.nats.streams import EVENTS
from kvbm_common.wire.events import SUBJECT_PREFIX

from kvbm_metrics.shell import problems
from kvbm_metrics.shell.access import may_read
from kvbm_metrics.shell.problems import BadQuery
from kvbm_metrics.shell.state import Api, ApiOf

HEARTBEAT_S = 10.0
"""An idle feed says so, so that proxies keep it and a reader notices that it is gone."""
TELL_SKIPPED_S = 1.0
FEEDS_MAX = 32
"""Each is a consumer of the stream in NATS."""
POSITION_MAX = 2**63 - 2
EVERYTHING = f"{SUBJECT_PREFIX}.*.*.*"
"""Of this, positions in the stream count the events."""

Part = Annotated[str, Query(pattern=r"^(\*|[A-Za-z0-9_-]{1,64})$")]

router = APIRouter(prefix="/v1", dependencies=[Depends(may_read)])


class TooManyFeeds(KvbmError):
    """Other readers have to leave first."""

    code = "too_many_feeds"


class EventStream(StreamingResponse):
    """Its type, for the document."""

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
    since: Annotated[str, Query(description="now, all, 90s, 10m, 6h, or an ISO time.")] = "now",
    per_second: Annotated[
        int,
        Query(
            ge=0,
            le=10_000,
            description="At most so many a second; an event `skipped` counts the others. 0: all.",
        ),
    ] = 0,
    last_event_id: Annotated[str, Header(description="Go on behind this one.")] = "",
) -> EventStream:
    """Stream events as they come, from now on or from the past; `id` is the stream position."""
    start = _start(since, last_event_id)
    if len(api.feeds) >= FEEDS_MAX:
        raise TooManyFeeds(f"{len(api.feeds)} feeds are open")
    subject = f"{SUBJECT_PREFIX}.{host}.{source}.{kind}"
    headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
    return EventStream(counted(api, subject, start, per_second=per_second), headers=headers)


def _start(since: str, last_event_id: str) -> Start:
    if last_event_id:
        if not (last_event_id.isascii() and last_event_id.isdecimal()):
            raise BadQuery("last-event-id", "the id of an event is a number")
        return min(int(last_event_id[:20]), POSITION_MAX) + 1
    try:
        return start_of(since, datetime.now(UTC))
    except (ConfigError, OverflowError) as error:
        raise BadQuery("since", "now, all, 90s, 10m, 6h, or an ISO time") from error


async def counted(
    api: Api, subject: str, start: Start, *, per_second: int = 0
) -> AsyncGenerator[bytes, None]:
    """Yield a feed that takes one of the places from its first part to its end.

    A reader that leaves before its feed begins would never give a place back, so two that come in
    the same moment may both get the last one.
    """
    place = object()
    api.feeds.add(place)
    try:
        parts = feed(api.fleet.bus, subject, start, per_second=per_second)
        async with contextlib.aclosing(parts):
            async for part in parts:
                yield part
    finally:
        api.feeds.discard(place)


class Sample:
    """Lets so many events of each second pass, and counts the others."""

    def __init__(self, per_second: int) -> None:
        self._per_second = per_second
        self._second = -1
        self._room = 0
        self._skipped = 0
        self.position = 0
        """Of the last event of a turn, as long as more are to come."""

    @property
    def owes(self) -> bool:
        """Events were left out, and the reader has not heard of it."""
        return self._skipped > 0

    def wait_s(self, now_s: float) -> float:
        """Return for how many seconds no event passes any more."""
        is_full = self._per_second and self._room <= 0 and int(now_s) == self._second
        return self._second + 1 - now_s if is_full else 0.0

    def leave_out(self, count: int) -> None:
        """Count events that were not even read as skipped."""
        self._skipped += count

    def take(self, messages: Sequence[EventMessage], now_s: float) -> bytes:
        """Return what the reader gets now, as text; once a second also what it has missed."""
        said = b""
        if int(now_s) != self._second:
            self._second, self._room = int(now_s), self._per_second
            if self._skipped:
                said = b'event: skipped\ndata: {"skipped": %d}\n\n' % self._skipped
            self._skipped = 0
        passed = messages[: self._room] if self._per_second else messages
        self._room -= len(passed)
        self._skipped += len(messages) - len(passed)
        return said + b"".join(map(_text, passed))


async def feed(
    bus: Bus,
    subject: str,
    start: Start,
    *,
    heartbeat_s: float = HEARTBEAT_S,
    per_second: int = 0,
) -> AsyncGenerator[bytes, None]:
    """Yield batches of messages, as text; comments in between, while nothing happens.

    A sample of everything is read in turns: what no page shows is not even fetched, since reading
    the events of a busy host costs more than all else that a page asks for.
    """
    sample = Sample(per_second)
    yield b": kvbm\n\n"  # The headers go out at once.
    while True:
        turn = _turn(bus, subject, start, sample, heartbeat_s=heartbeat_s)
        async with contextlib.aclosing(turn):
            async for said in turn:
                yield said
        if not sample.position:
            return
        await _pause(sample.wait_s(_now_s()))
        start = await _behind_the_rest(bus, sample)


async def _turn(
    bus: Bus, subject: str, start: Start, sample: Sample, *, heartbeat_s: float
) -> AsyncGenerator[bytes, None]:
    """Yield parts until the sample of everything has no room left in this second.

    The sample then has the position at which the turn has ended.
    """
    sample.position = 0
    async with bus.event_subscription(start=start, subject=subject) as batches:
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
                if subject == EVERYTHING and sample.wait_s(_now_s()):
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


async def _behind_the_rest(bus: Bus, sample: Sample) -> Start:
    """Return where the next turn begins; what came meanwhile is counted as left out."""
    try:
        last = (await ensure_stream(bus, EVENTS)).state.last_seq
    except KvbmError:  # NATS is away: the next turn waits for it.
        return sample.position + 1
    sample.leave_out(max(0, last - sample.position))
    return last + 1


def _text(message: EventMessage) -> bytes:
    """Format a message as an event of the feed; nothing of one that no client has published.

    A payload is JSON as msgspec writes it, in one line; a stranger's may have more.
    """
    if message.payload == UNMARKED:
        return b""
    kind = message.subject.rsplit(".", 1)[1].encode()
    data = b"".join(b"data: %s\n" % line for line in message.payload.splitlines())
    return b"id: %d\nevent: %s\n%s\n" % (message.sequence, kind, data)
