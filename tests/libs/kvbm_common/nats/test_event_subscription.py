"""Subscriptions to events on a real nats-server: in order and complete through every outage."""

from __future__ import annotations

import asyncio
import shutil
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from itertools import pairwise

import msgspec
import pytest
from kvbm_common.nats.bus import Bus, EventPublisher, EventSubscription
from kvbm_common.nats.consumers import Resume, Start
from kvbm_common.nats.embedded_server import NatsServer
from kvbm_common.nats.event_message import EventMessage
from kvbm_common.nats.jetstream import call_api, ensure_stream
from kvbm_common.nats.streams import EVENTS

from tests.libs.kvbm_common.nats.speaking import DEADLINE_S, publishing, put, read
from tests.waiting import wait_until


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


async def test_a_start_beyond_the_stream_is_of_another_stream(bus: Bus) -> None:
    """Goal: a position from before NATS lost its store makes no reader deaf.

    1. The stream has 5 messages. 2. A start at 202 reads all of them, and the reader is told.
    3. A start at 6 is the next message of this stream: nothing is lost.
    """
    lost: list[str] = []
    async with publishing(bus) as publisher:
        put(publisher, 1, 5)
        await publisher.flush(deadline_s=DEADLINE_S)
        async with (
            bus.event_subscription(start=202, on_stream_lost=lambda: lost.append("202")) as before,
            bus.event_subscription(start=6, on_stream_lost=lambda: lost.append("6")) as following,
        ):
            waiting = asyncio.create_task(read(following, 6))
            assert await read(before, 5) == [1, 2, 3, 4, 5]
            await following.wait_caught_up(deadline_s=DEADLINE_S)
            put(publisher, 6, 6)
            assert await waiting == [6]
            assert await read(before, 6) == [6]
    assert lost == ["202"]


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


@pytest.mark.slow
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
        names = await call_api(bus, f"CONSUMER.NAMES.{EVENTS.name}")
        assert len(msgspec.json.decode(names)["consumers"]) == 1, "another one"


@pytest.mark.slow
async def test_what_is_no_event_makes_the_consumer_be_made_again(bus: Bus) -> None:
    """Goal: a status that a later NATS may send ends no reader, and loses nothing."""
    async with publishing(bus) as publisher, bus.event_subscription() as subscription:
        put(publisher, 1, 3)
        assert await read(subscription, 3) == [1, 2, 3]
        listed = await call_api(bus, f"CONSUMER.LIST.{EVENTS.name}")
        (consumer,) = msgspec.json.decode(listed)["consumers"]
        inbox = consumer["config"]["deliver_subject"]
        await bus.publish_raw(inbox, b"", headers={"Status": "409", "Description": "Shutdown"})
        put(publisher, 4, 6)
        assert await read(subscription, 6) == [4, 5, 6]
        listed = await call_api(bus, f"CONSUMER.NAMES.{EVENTS.name}")
        assert set(msgspec.json.decode(listed)["consumers"]) - {consumer["name"]}, "a new one"


@pytest.mark.slow
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


async def test_a_lost_store_is_noticed_from_every_start(bus: Bus, nats_server: NatsServer) -> None:
    """Goal: no reader waits for positions of the lost stream, whatever it was started with.

    1. Readers of all and of a part, as index, tiers, consolidator, feed and tail have them. 2. The
    store is lost under them. 3. Each is told once, and hears the new stream. 4. So does a reader
    that was away meanwhile, and goes on after its position.
    """
    part = "kvbm.v1.events.h.*.*"
    lost: list[str] = []
    async with publishing(bus) as publisher, AsyncExitStack() as stack:
        put(publisher, 1, 5)
        await publisher.flush(deadline_s=DEADLINE_S)
        created = (await ensure_stream(bus, EVENTS)).created
        starts: dict[str, tuple[Start, str]] = {
            "index": (Resume(created, 3), EVENTS.subjects[0]),
            "tier": ("new", part),
            "consolidator": ("last_per_subject", part),
            "feed": (4, EVENTS.subjects[0]),
            "feed of a host": (4, part),
            "tail": (created, EVENTS.subjects[0]),
        }

        async def begin(name: str) -> EventSubscription:
            start, subject = starts[name]
            told = partial(lost.append, name)
            reading = bus.event_subscription(start=start, subject=subject, on_stream_lost=told)
            return await stack.enter_async_context(reading)

        readers = [await begin(name) for name in starts]
        waiting = [asyncio.create_task(read(reader, 6)) for reader in readers]
        for reader in readers:
            await reader.wait_caught_up(deadline_s=DEADLINE_S)
        put(publisher, 6, 6)
        assert all(seen[-1] == 6 for seen in await asyncio.gather(*waiting))
        await publisher.flush(deadline_s=DEADLINE_S)
        assert lost == []
        nats_server.kill()
        shutil.rmtree(nats_server.directory / "jetstream")
        await nats_server.start()
        put(publisher, 7, 8)
        heard = await asyncio.gather(*(read(reader, 8) for reader in readers))
        assert all(seen in ([7, 8], [8]) for seen in heard), heard
        assert sorted(lost) == sorted(starts)
        starts = {"index": (Resume(created, 6), EVENTS.subjects[0]), "feed of a host": (7, part)}
        readers = [await begin(name) for name in starts]
        assert [await read(reader, 8) for reader in readers] == [[7, 8]] * 2
        assert sorted(lost[-2:]) == ["feed of a host", "index"]


async def test_a_slow_reader_is_told_what_the_stream_has_dropped(bus: Bus) -> None:
    """1. The reader pauses. 2. The stream drops what the server has not sent yet. 3. It reads on.

    Told between the last message before the hole and the first one after it.
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
