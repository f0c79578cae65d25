"""The bus on a real nats-server: requests, verbs, drops, and events through every outage."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise

import pytest
from kvbm_common.errors import (
    BusUnavailable,
    DeadlineExceeded,
    KvbmError,
    NoResponder,
    RequestFailed,
)
from kvbm_common.nats.bus import Bus, EventPublisher, EventSubscription
from kvbm_common.nats.embedded_server import NatsServer
from kvbm_common.nats.event_message import EventMessage
from kvbm_common.nats.jetstream import EVENTS, call_api

from tests.waiting import wait_until

DEADLINE_S = 10.0


class OutOfCheese(KvbmError):
    """An error with a code and a field of its own."""

    code = "out_of_cheese"
    field = "cheese"


async def echo(payload: bytes) -> bytes:
    return payload


async def fail(payload: bytes) -> bytes:
    raise OutOfCheese("no\ncheese")


async def break_down(payload: bytes) -> bytes:
    raise ZeroDivisionError


@asynccontextmanager
async def publishing(bus: Bus, **limits: int) -> AsyncIterator[EventPublisher]:
    """A running publisher of source `sim-0`."""
    publisher = EventPublisher(bus, EVENTS, source="sim-0", counters=bus.counters, **limits)
    task = asyncio.create_task(publisher.run())
    yield publisher
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def put(publisher: EventPublisher, first: int, last: int) -> None:
    """Publish events first..last; the payload is the number."""
    for seq in range(first, last + 1):
        publisher.publish("kvbm.v1.events.h.sim-0.stored", b"%d" % seq, epoch=1, seq=seq)


async def read(subscription: EventSubscription, *until: int) -> list[int]:
    """The numbers that arrive, until these are among them."""
    seen: list[int] = []
    async with asyncio.timeout(DEADLINE_S):
        async for batch in subscription:
            seen += [int(message.payload) for message in batch]
            if {*until} <= {*seen}:
                break
    return seen


async def test_request_reaches_a_verb_of_one_instance_and_of_any_replica(bus: Bus) -> None:
    """Goal: both subjects of the contract. Method: a shared verb, asked both ways."""
    await bus.add_verbs("index", "0", "h", {"match": echo}, shared=True)
    assert await bus.request("kvbm.v1.index.match", b"1", deadline_s=2) == b"1"
    assert await bus.request("kvbm.v1.index.h.0.match", b"2", deadline_s=2) == b"2"


async def test_unshared_verb_is_not_served_for_all(bus: Bus) -> None:
    """Goal: a stateful service answers only as itself."""
    await bus.add_verbs("host-tier", "0", "h", {"lookup": echo})
    with pytest.raises(NoResponder):
        await bus.request("kvbm.v1.host-tier.lookup", b"", deadline_s=2)


async def test_typed_error_travels(bus: Bus) -> None:
    """Goal: the requester sees code, message and field of the handler's error."""
    await bus.add_verbs("index", "0", "h", {"match": fail, "broken": break_down})
    with pytest.raises(RequestFailed) as caught:
        await bus.request("kvbm.v1.index.h.0.match", b"", deadline_s=2)
    assert (caught.value.code, caught.value.field) == ("out_of_cheese", "cheese")
    assert caught.value.message == "no\ncheese"
    with pytest.raises(RequestFailed, match="internal"):
        await bus.request("kvbm.v1.index.h.0.broken", b"", deadline_s=2)


async def test_reply_that_is_too_large_is_a_typed_error(bus: Bus) -> None:
    """Goal: the requester learns at once what its deadline would not tell."""

    async def huge(payload: bytes) -> bytes:
        return bytes(9 * 1024 * 1024)

    await bus.add_verbs("index", "0", "h", {"dump": huge})
    with pytest.raises(RequestFailed, match="message_too_large"):
        await bus.request("kvbm.v1.index.h.0.dump", b"", deadline_s=2)


async def test_too_many_requests_are_refused(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: a bounded number of requests is served. Method: a limit of one, and two requests."""
    monkeypatch.setattr("kvbm_common.nats.verb_server.CONCURRENT_MAX", 1)
    taken, release = asyncio.Event(), asyncio.Event()

    async def wait(payload: bytes) -> bytes:
        taken.set()
        await release.wait()
        return payload

    await bus.add_verbs("index", "0", "h", {"wait": wait})
    first = asyncio.create_task(bus.request("kvbm.v1.index.h.0.wait", b"1", deadline_s=5))
    await taken.wait()
    with pytest.raises(RequestFailed, match="busy"):
        await bus.request("kvbm.v1.index.h.0.wait", b"2", deadline_s=2)
    release.set()
    assert await first == b"1"


async def test_verbs_are_a_micro_service(bus: Bus) -> None:
    """Goal: `nats micro ls` finds us."""
    await bus.add_verbs("index", "0", "h", {"match": echo})
    assert b'"kvbm-index"' in await bus.request("$SRV.PING", b"", deadline_s=2)


async def test_slow_request_does_not_hold_up_another(bus: Bus) -> None:
    """Goal: requests of one verb run concurrently. Method: the first waits for the second."""
    released = asyncio.Event()

    async def meet(payload: bytes) -> bytes:
        if payload == b"second":
            released.set()
        await released.wait()
        return payload

    await bus.add_verbs("index", "0", "h", {"meet": meet})
    answers = await asyncio.gather(
        bus.request("kvbm.v1.index.h.0.meet", b"first", deadline_s=2),
        bus.request("kvbm.v1.index.h.0.meet", b"second", deadline_s=2),
    )
    assert list(answers) == [b"first", b"second"]


async def test_request_has_a_deadline(bus: Bus) -> None:
    """Goal: a silent peer is a typed error."""
    await bus.subscribe("silent", lambda subject, payload: None)
    with pytest.raises(DeadlineExceeded):
        await bus.request("silent", b"", deadline_s=0.05)


async def test_slow_subscriber_drops_and_counts(bus: Bus) -> None:
    """Goal: a bounded queue. Method: a handler that waits while 20 messages come for room of 5."""
    go_on = asyncio.Event()
    seen: list[bytes] = []

    async def slow(subject: str, payload: bytes) -> None:
        await go_on.wait()
        seen.append(payload)

    await bus.subscribe("offers", slow, pending_max=5)
    await bus.subscribe("marker", lambda subject, payload: go_on.set())
    for number in range(20):
        await bus.publish("offers", b"%d" % number)
    await bus.publish("marker", b"")
    await wait_until(lambda: len(seen) >= 5)
    dropped = bus.counters.value("kvbm_bus_dropped_total", reason="slow_consumer", subject="offers")
    assert dropped + len(seen) >= 19  # One more may be in the handler's hands.
    assert dropped >= 14


async def test_without_nats_everything_fails_at_once_and_recovers(
    bus: Bus, nats_server: NatsServer
) -> None:
    """Goal: typed failures while NATS is away, verbs served again after its return."""
    await bus.add_verbs("index", "0", "h", {"match": echo})
    nats_server.kill()
    await wait_until(lambda: not bus.connected)
    assert not await bus.publish("offers", b"")
    with pytest.raises(BusUnavailable):
        await bus.request("kvbm.v1.index.match", b"", deadline_s=2)
    await nats_server.start()
    async with asyncio.timeout(DEADLINE_S):
        await bus.wait_connected()
    assert await bus.request("kvbm.v1.index.h.0.match", b"3", deadline_s=2) == b"3"


async def test_connect_has_a_deadline(nats_server: NatsServer) -> None:
    """Goal: no NATS is a typed error."""
    nats_server.kill()
    with pytest.raises(BusUnavailable):
        await Bus.connect(nats_server.url, "test", deadline_s=0.2)


async def test_events_arrive_in_order_and_in_batches(bus: Bus) -> None:
    """Goal: 2,000 events through window and flow control, in far fewer batches."""
    batches: list[list[EventMessage]] = []
    async with publishing(bus) as publisher, bus.event_subscription() as subscription:
        put(publisher, 1, 2000)
        await publisher.flush(deadline_s=DEADLINE_S)
        async with asyncio.timeout(DEADLINE_S):
            async for batch in subscription:
                batches.append(batch)
                if batch[-1].payload == b"2000":
                    break
    messages = [message for batch in batches for message in batch]
    assert [int(message.payload) for message in messages] == list(range(1, 2001))
    assert [message.sequence for message in messages] == list(range(1, 2001))
    assert len(batches) < 200


async def test_subscription_starts_where_it_is_told(bus: Bus) -> None:
    """Goal: from the beginning, from a sequence, from now on."""
    async with publishing(bus) as publisher:
        put(publisher, 1, 5)
        await publisher.flush(deadline_s=DEADLINE_S)
        async with (
            bus.event_subscription(start="all") as everything,
            bus.event_subscription(start=4) as later,
            bus.event_subscription(start="new") as news,
        ):
            waiting = asyncio.create_task(read(news, 7))
            assert await read(everything, 5) == [1, 2, 3, 4, 5]
            assert await read(later, 5) == [4, 5]
            await news.wait_caught_up(deadline_s=DEADLINE_S)
            put(publisher, 6, 7)
            assert await waiting == [6, 7]


async def test_nothing_is_lost_when_nats_is_killed(bus: Bus, nats_server: NatsServer) -> None:
    """Goal: order and completeness over kill -9 and restart, in mid-stream.

    1. Publish 300, kill NATS as soon as the first ones were read. 2. Publish 300 more while it is
    away. 3. Start it again. 4. All 600 arrive in order.
    """
    async with publishing(bus) as publisher, bus.event_subscription() as subscription:
        put(publisher, 1, 300)
        seen = await read(subscription, 1)
        nats_server.kill()
        put(publisher, 301, 600)
        await nats_server.start()
        seen += await read(subscription, 600)
        await publisher.flush(deadline_s=DEADLINE_S)
    assert seen == list(range(1, 601))


async def test_deleted_consumer_is_made_again(bus: Bus) -> None:
    """Goal: a reader notices a consumer that vanished. Method: delete it through the API."""
    async with publishing(bus) as publisher, bus.event_subscription() as subscription:
        put(publisher, 1, 3)
        assert await read(subscription, 3) == [1, 2, 3]
        names = await call_api(bus, f"CONSUMER.NAMES.{EVENTS.name}")
        name = names.split(b'"consumers":["')[1].split(b'"')[0].decode()
        await call_api(bus, f"CONSUMER.DELETE.{EVENTS.name}.{name}")
        put(publisher, 4, 6)
        assert await read(subscription, 6) == [4, 5, 6]
        assert subscription.recreated == 1


async def test_deleted_stream_is_made_again(bus: Bus) -> None:
    """Goal: events go on after somebody deleted the stream; what it held is gone."""
    async with publishing(bus) as publisher, bus.event_subscription() as subscription:
        put(publisher, 1, 3)
        assert await read(subscription, 3) == [1, 2, 3]
        await call_api(bus, f"STREAM.DELETE.{EVENTS.name}")
        put(publisher, 4, 6)
        await publisher.flush(deadline_s=DEADLINE_S)
        assert await read(subscription, 6) == [4, 5, 6]


async def test_lost_store_is_noticed(bus: Bus, nats_server: NatsServer) -> None:
    """Goal: NATS comes back with an empty store, and its sequences start again from 1."""
    import shutil

    lost: list[str] = []
    reading = bus.event_subscription(on_stream_lost=lambda: lost.append("stream"))
    async with publishing(bus) as publisher, reading as subscription:
        put(publisher, 1, 50)
        await read(subscription, 50)
        await publisher.flush(deadline_s=DEADLINE_S)
        nats_server.kill()
        shutil.rmtree(nats_server.directory / "jetstream")
        await nats_server.start()
        put(publisher, 51, 53)
        assert await read(subscription, 53) == [51, 52, 53]
        assert lost == ["stream"]


async def test_a_slow_reader_is_told_what_the_stream_has_dropped(bus: Bus) -> None:
    """1. The reader pauses. 2. The stream drops what the server has not sent yet. 3. It reads on.

    Told between the last message before the hole and the first one behind it.
    """
    small = replace(EVENTS, name="SMALL", subjects=("small.>",), bytes_max=4 * 1024 * 1024)
    seen: list[int] = []
    losses: list[int] = []
    publisher = EventPublisher(bus, small, source="sim-0", counters=bus.counters)
    async with (
        asyncio.TaskGroup() as tasks,
        bus.event_subscription(
            spec=small, subject="small.>", on_stream_lost=lambda: losses.append(len(seen))
        ) as subscription,
    ):
        running = tasks.create_task(publisher.run())
        padding = b" " * 64 * 1024
        for seq in range(1, 401):
            publisher.publish("small.stored", b"%d" % seq + padding, epoch=1, seq=seq)
            if seq == 1:
                seen += await read(subscription, 1)
        await publisher.flush(deadline_s=DEADLINE_S)
        async with asyncio.timeout(DEADLINE_S):
            async for batch in subscription:
                seen += [int(message.payload) for message in batch]
                if 400 in seen:
                    break
        running.cancel()
    holes = [at for at, (one, other) in enumerate(pairwise(seen), 1) if other != one + 1]
    assert holes, "the stream has dropped nothing: the test is too small"
    assert losses == holes


async def test_a_slow_reader_of_a_part_is_told_what_the_stream_has_dropped(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. The reader of a part pauses. 2. The stream drops what was not sent yet. 3. It is told.

    A part has holes anyway, so nobody was told.
    """
    monkeypatch.setattr("kvbm_common.nats.event_subscription.CHECK_S", 0.05)
    small = replace(EVENTS, name="SMALL", subjects=("small.>",), bytes_max=4 * 1024 * 1024)
    lost = asyncio.Event()
    publisher = EventPublisher(bus, small, source="sim-0", counters=bus.counters)
    async with (
        asyncio.TaskGroup() as tasks,
        bus.event_subscription(
            spec=small, subject="small.mine.*", start="last_per_subject", on_stream_lost=lost.set
        ) as subscription,
    ):
        running = tasks.create_task(publisher.run())
        padding = b" " * 64 * 1024
        publisher.publish("small.mine.stored", b"1" + padding, epoch=1, seq=1)
        seen = await read(subscription, 1)
        assert not lost.is_set()
        for seq in range(2, 401):
            publisher.publish("small.mine.stored", b"%d" % seq + padding, epoch=1, seq=seq)
        await publisher.flush(deadline_s=DEADLINE_S)
        seen += await read(subscription, 400)
        assert len(seen) < 400, "the stream has dropped nothing: the test is too small"
        async with asyncio.timeout(DEADLINE_S):
            await lost.wait()
        running.cancel()


async def test_a_reader_of_a_quiet_part_of_a_busy_stream_is_told_of_no_loss(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others fill the stream three times over, a quarter of it between two looks."""
    monkeypatch.setattr("kvbm_common.nats.event_subscription.CHECK_S", 0.02)
    small = replace(EVENTS, name="SMALL", subjects=("small.>",), bytes_max=4 * 1024 * 1024)
    losses: list[str] = []
    publisher = EventPublisher(bus, small, source="sim-0", counters=bus.counters)
    async with (
        asyncio.TaskGroup() as tasks,
        bus.event_subscription(
            spec=small, subject="small.mine.*", on_stream_lost=lambda: losses.append("stream")
        ) as subscription,
    ):
        running = tasks.create_task(publisher.run())
        publisher.publish("small.mine.stored", b"1", epoch=1, seq=1)
        assert await read(subscription, 1) == [1]
        reading = tasks.create_task(read(subscription, 2))
        padding = b" " * 64 * 1024
        for seq in range(2, 193):
            publisher.publish("small.other.stored", padding, epoch=1, seq=seq)
            if seq % 16 == 0:
                await publisher.flush(deadline_s=DEADLINE_S)
                await wait_until(lambda seq=seq: subscription._horizon.certain >= seq)  # type: ignore[misc]
        publisher.publish("small.mine.stored", b"2", epoch=1, seq=193)
        assert await reading == [2]
        running.cancel()
    assert losses == []


async def test_same_event_is_stored_once(bus: Bus) -> None:
    """Goal: sending again after a failure makes no duplicates. Method: the same (epoch, seq)."""
    async with publishing(bus) as publisher, bus.event_subscription() as subscription:
        put(publisher, 1, 2)
        put(publisher, 1, 3)
        assert await read(subscription, 3) == [1, 2, 3]


async def test_full_outbox_drops_the_oldest_and_counts(bus: Bus, nats_server: NatsServer) -> None:
    """Goal: bounded memory while NATS is away, and a visible gap afterwards."""
    async with publishing(bus, outbox_max=10) as publisher:
        nats_server.kill()
        await wait_until(lambda: not bus.connected)
        put(publisher, 1, 25)
        assert publisher.pending == 10
        await nats_server.start()
        await publisher.flush(deadline_s=DEADLINE_S)
        async with bus.event_subscription() as subscription:
            assert await read(subscription, 25) == list(range(16, 26))
    assert bus.counters.value("kvbm_events_dropped_total", reason="outbox_full") == 15


async def test_full_outbox_keeps_the_last_event_of_each_source(
    bus: Bus, nats_server: NatsServer
) -> None:
    """Goal: a source that falls silent shows its gap, however much another one says.

    Two engines share a consolidator's outbox: the quiet one's events are the oldest.
    """
    async with publishing(bus, outbox_max=4) as publisher:
        nats_server.kill()
        await wait_until(lambda: not bus.connected)
        for seq in (1, 2):
            publisher.publish("kvbm.v1.events.h.quiet.stored", b"%d" % seq, epoch=1, seq=seq)
        for seq in range(11, 31):
            publisher.publish("kvbm.v1.events.h.loud.stored", b"%d" % seq, epoch=2, seq=seq)
        assert publisher.pending == 4
        await nats_server.start()
        await publisher.flush(deadline_s=DEADLINE_S)
        async with bus.event_subscription() as subscription:
            found = sorted(await read(subscription, 2, 30))
    assert found == [2, 28, 29, 30]


async def test_oversized_event_is_dropped_alone(bus: Bus) -> None:
    """Goal: an event that the server will never take does not hold up those behind it."""
    async with publishing(bus) as publisher, bus.event_subscription() as subscription:
        put(publisher, 1, 1)
        huge = bytes(9 * 1024 * 1024)
        publisher.publish("kvbm.v1.events.h.sim-0.stored", huge, epoch=1, seq=2)
        put(publisher, 3, 3)
        assert await read(subscription, 3) == [1, 3]
