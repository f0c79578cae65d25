"""`/v1/events`: live events over real HTTP, from the past, after an id, and its limits."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from kvbm_cli.stack import Stack
from kvbm_common.access.http_access import Access
from kvbm_common.nats import bus as bus_module
from kvbm_common.nats.bus import Bus
from kvbm_common.nats.event_message import EventMessage
from kvbm_common.nats.jetstream import ensure_stream, publish_acknowledged
from kvbm_common.nats.streams import EVENTS
from kvbm_common.registry.nats_kv import NatsRegistry
from kvbm_common.runtime.metrics import Metrics
from kvbm_common.tier.announcer import Announcer
from kvbm_common.wire.events import Removed, Run, Stored, event_codec, event_subject
from kvbm_common.wire.packed_events import Packable, pack
from kvbm_metrics.shell import event_feed
from kvbm_metrics.shell.api import create_app
from kvbm_metrics.shell.event_feed import Sample, feed
from kvbm_metrics.shell.fleet import Fleet
from kvbm_metrics.shell.state import Api

from tests.recording import recorded

DEADLINE_S = 10
HUNDREDS = 300


class Publisher:
    """A source of events."""

    def __init__(self, bus: Bus, source: str = "host-tier-0") -> None:
        self.bus = bus
        self._announcer = Announcer(host="h", source=source, tier="host", epoch=1)

    async def clears(self, reason: str) -> None:
        """An event is in the stream."""
        event = self._announcer.cleared(reason)
        await publish_acknowledged(
            self.bus, EVENTS, event_subject(event), event_codec.encode(event)
        )


class Reader:
    """Reads a feed, line by line."""

    def __init__(self, response: httpx.Response) -> None:
        self._lines = response.aiter_lines()

    async def event(self) -> tuple[str, str, str]:
        """The next event: id, kind, reason."""
        found: dict[str, str] = {}
        async with asyncio.timeout(DEADLINE_S):
            async for line in self._lines:
                name, _, value = line.partition(": ")
                if name:
                    found[name] = value
                elif "id" in found:
                    break
        reason = event_codec.decode(found["data"].encode()).reason  # type: ignore[union-attr]
        return found["id"], found["event"], reason


@asynccontextmanager
async def reading(client: httpx.AsyncClient, query: str, **headers: str) -> AsyncIterator[Reader]:
    """An open feed."""
    async with client.stream("GET", f"/v1/events{query}", headers=headers) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        yield Reader(response)


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    """NATS and a metrics service."""
    async with Stack.private({"admin_open": "admin"}, services=("metrics",)) as running:
        yield running


@pytest.fixture
async def publisher(stack: Stack) -> AsyncIterator[Publisher]:
    """A source on its NATS."""
    bus = await Bus.connect(stack.admin, "test")
    await ensure_stream(bus, EVENTS)
    yield Publisher(bus)
    await bus.close()


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the service."""
    url = stack.services["metrics"].description
    async with httpx.AsyncClient(base_url=url, timeout=DEADLINE_S) as client:
        yield client


@pytest.mark.slow
async def test_history_then_live_then_resumed(
    publisher: Publisher, client: httpx.AsyncClient
) -> None:
    """1. What was before. 2. What comes. 3. A reader that was cut off goes on after its id."""
    await publisher.clears("one")
    async with reading(client, "?since=all") as reader:
        first = await reader.event()
        await publisher.clears("two")
        second = await reader.event()
    assert (first[1:], second[1:]) == (("cleared", "one"), ("cleared", "two"))
    await publisher.clears("three")
    async with reading(client, "", **{"last-event-id": second[0]}) as reader:
        assert (await reader.event())[2] == "three"


@pytest.mark.slow
async def test_an_id_from_before_nats_lost_its_store_begins_at_the_beginning(
    publisher: Publisher, client: httpx.AsyncClient
) -> None:
    """Goal: an EventSource that reconnects with an id of the lost stream hears the new one."""
    await publisher.clears("one")
    async with reading(client, "", **{"last-event-id": "201"}) as reader:
        assert (await reader.event())[2] == "one"
        await publisher.clears("two")
        assert (await reader.event())[2] == "two"


@pytest.mark.slow
async def test_a_feed_is_of_what_was_asked_for(
    publisher: Publisher, client: httpx.AsyncClient
) -> None:
    """Another source's events are not in it."""
    await publisher.clears("ours")
    await Publisher(publisher.bus, "disk-tier-0").clears("theirs")
    async with reading(client, "?since=all&source=disk-tier-0&host=h&kind=cleared") as reader:
        assert (await reader.event())[2] == "theirs"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("query", "headers"),
    [
        ("?since=yesterday", {}),
        ("?source=a.b", {}),
        ("?kind=lost", {}),
        ("", {"last-event-id": "x"}),
        ("?since=99999999999999999999d", {}),
        ("?since=%2399999999999999999999", {}),
        ("?since=%23" + "9" * 5000, {}),
        ("?since=0001-01-01T00:00:00%2B14:00", {}),
    ],
)
async def test_a_bad_query_of_the_feed_is_refused_with_422(
    client: httpx.AsyncClient, query: str, headers: dict[str, str]
) -> None:
    """Refused before a stream begins."""
    response = await client.get(f"/v1/events{query}", headers=headers)
    assert (response.status_code, response.json()["code"]) == (422, "bad_query")


async def test_so_many_readers_and_no_more(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    """1. One place: while it is taken, the next reader is refused. 2. Then it is free again."""
    monkeypatch.setattr(event_feed, "FEEDS_MAX", 1)
    registry = NatsRegistry(bus, ttl_s=5.0)
    counters = Metrics()
    api = Api(fleet=Fleet(bus, registry, counters), expected=(), version="1",
              access=Access(without_token="admin"))  # fmt: skip
    transport = httpx.ASGITransport(create_app(api, counters))
    parts = event_feed.counted(api, "kvbm.v1.events.>", "new")
    await anext(parts)
    async with httpx.AsyncClient(transport=transport, base_url="http://kvbm") as client:
        refused = await client.get("/v1/events")
    assert (refused.status_code, refused.json()["code"]) == (503, "too_many_feeds")
    await parts.aclose()
    assert api.feeds == set()
    await registry.close()


async def test_an_idle_feed_says_that_it_lives(bus: Bus) -> None:
    """Comments, which readers pass over."""
    parts = feed(bus, "kvbm.v1.events.>", "new", heartbeat_s=0.01)
    assert [await anext(parts) for _ in range(3)] == [b": kvbm\n\n", *[b": alive\n\n"] * 2]
    await parts.aclose()


def message(place: int) -> EventMessage:
    """An event at a place in the stream."""
    return EventMessage(sequence=place, subject="kvbm.v1.events.h.s.stored", payload=b"{}")


def places(text: bytes) -> list[int]:
    """The events in some text."""
    return [int(line[4:]) for line in text.split(b"\n") if line.startswith(b"id: ")]


def counts(text: bytes) -> tuple[int, int]:
    """What some text begins with: how many events were left out, and how many messages unread."""
    found = re.match(
        rb'event: skipped\ndata: {"skipped": (\d+), "unread_messages": (\d+)}\n\n', text
    )
    assert found is not None, text
    return int(found[1]), int(found[2])


def test_what_was_not_read_is_not_counted_as_events() -> None:
    """1. Two of three events are left out. 2. So are messages, of how many events is not known."""
    sample = Sample(1)
    sample.take([packed(1, "stored", "stored", "stored")], 7.0)
    sample.leave_out(5)
    assert counts(sample.take((), 8.0)) == (2, 5)
    owed = [sample.owes]
    sample.leave_out(1)
    assert [*owed, sample.owes] == [False, True]
    assert counts(sample.take((), 9.0)) == (0, 1)


def test_a_sample_of_a_second_and_a_count_of_the_rest() -> None:
    """1. Two of five pass. 2. In the same second no more. 3. Then the four are owed, and told."""
    sample = Sample(2)
    assert places(sample.take([message(place) for place in range(5)], 7.1)) == [0, 1]
    assert sample.take([message(5)], 7.9) == b""
    was_owing = sample.owes
    said = sample.take([message(6)], 8.0)
    assert counts(said) == (4, 0)
    assert places(said) == [6]
    assert (was_owing, sample.owes) == (True, False)
    assert sample.take((), 9.5) == b""


def test_without_a_limit_everything_passes() -> None:
    """And nothing is owed."""
    sample = Sample(0)
    assert places(sample.take([message(place) for place in range(100)], 7.1)) == list(range(100))
    assert not sample.owes


def packed(place: int, *kinds: str) -> EventMessage:
    """Packed events of one block each, at a place in the stream."""
    head: dict[str, Any] = {
        "host": "h", "source": "s", "tier": "host", "epoch": 1, "ts_ms": 1, "namespace": "0" * 64,
    }  # fmt: skip
    events: list[Packable] = []
    for seq, kind in enumerate(kinds, start=2):
        name = f"{seq:032x}"
        if kind == "stored":
            runs = [Run(parent="0" * 32, hashes=[name])]
            events.append(Stored(**head, seq=seq, runs=runs))
        else:
            events.append(Removed(**head, seq=seq, hashes=[name]))
    return EventMessage("kvbm.v1.events.h.s.packed", pack(events), place)


def test_packed_events_pass_one_by_one_as_json() -> None:
    """Goal: a page reads one form. The last of a message has its place: who goes on after it has
    had all of them. 1. All. 2. One kind. 3. A sample cuts within a message. 4. A broken one is
    counted as left out."""
    text = Sample(0).take([packed(7, "stored", "removed", "stored")], 1.0)
    assert re.findall(rb"^event: (\w+)$", text, re.MULTILINE) == [b"stored", b"removed", b"stored"]
    said = [event_codec.decode(line) for line in re.findall(rb"^data: (.*)$", text, re.MULTILINE)]
    assert [(one.source, one.seq) for one in said] == [("s", 2), ("s", 3), ("s", 4)]
    assert places(text) == [7]
    assert text.index(b"id: 7") > text.index(b"event: removed")

    assert places(Sample(0, "removed").take([packed(8, "stored", "removed", "stored")], 1.0)) == [8]
    assert Sample(0, "removed").take([packed(8, "stored")], 1.0) == b""

    sample = Sample(2)
    assert sample.take([packed(9, "stored", "stored", "stored")], 1.0).count(b"event: ") == 2
    subject, payload, place = packed(10, "stored")
    sample.take([EventMessage(subject, payload[:-1], place)], 1.5)
    assert counts(sample.take((), 2.0)) == (2, 0)


@pytest.mark.slow
async def test_a_reader_of_a_sample_is_told_what_it_has_not_seen(
    stack: Stack, publisher: Publisher
) -> None:
    """Ten events, one a second: one comes, and a count."""
    for number in range(10):
        await publisher.clears(f"e{number}")
    url = f"{stack.services['metrics'].description}/v1/events?since=all&per_second=1"
    async with httpx.AsyncClient() as client, client.stream("GET", url) as response:
        async with asyncio.timeout(DEADLINE_S):
            lines = [line async for line in _until_skipped(response)]
    assert sum(line.startswith("id: ") for line in lines) <= 2
    assert sum(counts(f"event: skipped\n{lines[-1]}\n\n".encode())) >= 8


@pytest.mark.slow
async def test_what_a_sample_leaves_out_is_not_even_read(
    stack: Stack, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. One event fills the second. 2. Hundreds come, of which the reader's connection hears
    nothing. 3. In the next second they are counted."""
    clock_s, paused, goes_on = 7.0, asyncio.Event(), asyncio.Event()

    async def pause(seconds: float) -> None:
        assert 0 < seconds <= 1
        paused.set()
        await goes_on.wait()

    monkeypatch.setattr(event_feed, "_pause", pause)
    monkeypatch.setattr(event_feed, "_now_s", lambda: clock_s)
    connections = recorded(monkeypatch, bus_module, "DirectClient")
    reader = await Bus.connect(stack.admin, "reader")
    [connection] = connections
    await publisher.clears("first")
    parts = feed(reader, event_feed.EVERYTHING, "all", per_second=1)
    said = [await anext(parts) for _ in range(2)]
    assert places(said[1]) == [1]
    async with asyncio.timeout(DEADLINE_S):
        next_part = asyncio.ensure_future(anext(parts))
        await paused.wait()
        before = connection.stats["in_msgs"]
        for number in range(HUNDREDS):
            await publisher.clears(f"e{number}")
        assert connection.stats["in_msgs"] - before < HUNDREDS / 10
        clock_s = 8.0
        goes_on.set()
        assert counts(await next_part) == (0, HUNDREDS)
    await parts.aclose()
    await reader.close()


async def _until_skipped(response: httpx.Response) -> AsyncIterator[str]:
    async for line in response.aiter_lines():
        yield line
        if 'skipped":' in line:
            return
