"""Publishers of events on a real nats-server: no duplicates, and what a full outbox drops."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from itertools import count
from typing import Any

import msgspec
import pytest
from kvbm_common.identity import SequenceHash
from kvbm_common.nats import event_publisher
from kvbm_common.nats.bus import Bus
from kvbm_common.nats.embedded_server import NatsServer
from kvbm_common.nats.jetstream import call_api
from kvbm_common.nats.streams import EVENTS
from kvbm_common.wire.events import Cleared, Event, Removed, Run, Stored
from kvbm_common.wire.packed_events import PACKED_BLOCKS_MAX, events_on
from kvbm_common.wire.raw_events import RawRemoved, RawStored, as_json

from tests.libs.kvbm_common.nats.speaking import DEADLINE_S, publishing, put, read
from tests.waiting import wait_until


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


async def test_the_counts_of_dropped_events_begin_at_zero(bus: Bus) -> None:
    """Goal: `increase()` sees the first loss of a process; a series born at N shows none."""
    bus.event_publisher("test")
    (dropped,) = [one for one in bus.counters.families() if "events_dropped" in one.name]
    shown = {sample.labels["reason"]: sample.value for sample in dropped.samples}
    assert shown == {"outbox_full": 0, "too_large": 0, "invalid_subject": 0}


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
    """Goal: an event that the server will never take does not hold up those after it."""
    async with publishing(bus) as publisher, bus.event_subscription() as subscription:
        put(publisher, 1, 1)
        huge = bytes(9 * 1024 * 1024)
        publisher.publish("kvbm.v1.events.h.sim-0.stored", huge, epoch=1, seq=2)
        put(publisher, 3, 3)
        assert await read(subscription, 3) == [1, 3]


async def test_an_event_above_an_operator_s_limit_is_dropped_alone(bus: Bus) -> None:
    """Goal: nor does one that the stream refuses: `nats stream edit --max-msg-size`."""
    async with publishing(bus) as publisher, bus.event_subscription() as subscription:
        put(publisher, 1, 1)
        assert await read(subscription, 1) == [1]
        info = msgspec.json.decode(await call_api(bus, f"STREAM.INFO.{EVENTS.name}"))
        config = info["config"] | {"max_msg_size": 1_024}
        await call_api(bus, f"STREAM.UPDATE.{EVENTS.name}", config)
        publisher.publish("kvbm.v1.events.h.sim-0.stored", bytes(4_096), epoch=1, seq=2)
        put(publisher, 3, 3)
        assert await read(subscription, 3) == [3]
        assert bus.counters.value("kvbm_events_dropped_total", reason="too_large") == 1


@pytest.mark.parametrize("name", ["e\n", "e f", "", "*", ">", "\ud800"])
async def test_an_event_on_no_subject_is_dropped_alone(bus: Bus, name: str) -> None:
    """Goal: a source with a name that NATS refuses does not hold up the others of its outbox."""
    async with publishing(bus) as publisher, bus.event_subscription() as subscription:
        put(publisher, 1, 1)
        publisher.publish(f"kvbm.v1.events.h.{name}.cleared", b"2", epoch=1, seq=2)
        put(publisher, 3, 3)
        assert await read(subscription, 3) == [1, 3]
        await publisher.flush(deadline_s=DEADLINE_S)
    assert bus.counters.value("kvbm_events_dropped_total", reason="invalid_subject") == 1


async def test_a_lost_acknowledgement_is_missed_while_the_source_talks_on(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: nothing waits after it for a pause of the source. Method: a message asks for none."""
    monkeypatch.setattr(event_publisher, "ACK_DEADLINE_S", 0.1)
    send, sent = bus.publish_raw, count(1)

    async def lossy(
        subject: str, payload: bytes, *, reply: str = "", headers: Mapping[str, str] | None = None
    ) -> None:
        is_lost = next(sent) == 5
        await send(subject, payload, reply="" if is_lost else reply, headers=headers)

    monkeypatch.setattr(bus, "publish_raw", lossy)
    seqs = count(1)
    async with publishing(bus) as publisher, bus.event_subscription() as subscription:

        def says_more() -> bool:
            seq = next(seqs)
            was_empty = publisher.pending == 0
            put(publisher, seq, seq)
            return was_empty and seq > 10

        await wait_until(says_more, poll_s=0.01, deadline_s=DEADLINE_S)
        last = next(seqs) - 1
        assert await read(subscription, last) == list(range(1, last + 1))
    assert next(sent) > last + 1, "it was sent again"


# ---- packed events ---------------------------------------------------------------------------


def stored(seq: int, blocks: int = 1, source: str = "sim-0") -> Stored:
    """An event whose blocks have the number of the event in their names."""
    names = [f"{seq:016x}{number:016x}" for number in range(blocks)]
    run = Run(parent=f"{seq - 1:016x}{0:016x}", hashes=names)
    return Stored(
        host="h", source=source, tier="device", epoch=1, seq=seq, ts_ms=9, namespace="0" * 64,
        runs=[run],
    )  # fmt: skip


def removed(seq: int) -> Removed:
    """The removal of a block."""
    return Removed(
        host="h", source="sim-0", tier="device", epoch=1, seq=seq, ts_ms=9, namespace="0" * 64,
        hashes=["f" * 32], reason="evicted",
    )  # fmt: skip


def cleared(seq: int) -> Cleared:
    """The end of all blocks."""
    return Cleared(
        host="h", source="sim-0", tier="device", epoch=1, seq=seq, ts_ms=9, reason="admin"
    )


async def read_events(bus: Bus, last: int) -> list[tuple[str, list[Event]]]:
    """What each message of the stream has, by kind of its subject, until an event's number."""
    found: list[tuple[str, list[Event]]] = []
    async with asyncio.timeout(DEADLINE_S), bus.event_subscription() as subscription:
        async for batch in subscription:
            for message in batch:
                events = events_on(message.subject, message.payload)
                found.append((message.subject.rpartition(".")[2], events))
            if found[-1][1][-1].seq == last:
                break
    return found


async def test_what_is_said_in_one_turn_is_one_message(bus: Bus) -> None:
    """Goal: nothing is lost, and order is kept around a clear, which is never packed."""
    said: list[Event] = [cleared(1), stored(2), stored(3), removed(4), cleared(5), stored(6)]
    async with publishing(bus) as publisher:
        for one in said:
            publisher.publish_event(one)
        assert publisher.pending == 6
        await publisher.flush(deadline_s=DEADLINE_S)
        assert publisher.pending == 0
    messages = await read_events(bus, 6)
    assert [(kind, len(events)) for kind, events in messages] == [
        ("cleared", 1), ("packed", 3), ("cleared", 1), ("packed", 1),
    ]  # fmt: skip
    assert [one for _, events in messages for one in events] == said
    assert bus.counters.value("kvbm_events_published_total") == 6
    assert bus.counters.value("kvbm_event_messages_total") == 4


async def test_where_a_reader_knows_json_only_each_event_has_its_message(bus: Bus) -> None:
    """Goal: a rolling upgrade. Method: what the registry says changes between two events."""
    async with publishing(bus) as publisher:
        publisher.publish_event(stored(1))
        bus.packs_events = lambda: False
        for seq in (2, 3):
            publisher.publish_event(stored(seq))
        bus.packs_events = lambda: True
        publisher.publish_event(stored(4))
        await publisher.flush(deadline_s=DEADLINE_S)
    assert await read_events(bus, 4) == [
        ("packed", [stored(1)]), ("stored", [stored(2)]), ("stored", [stored(3)]),
        ("packed", [stored(4)]),
    ]  # fmt: skip


async def test_raw_event_is_json_for_a_reader_of_json_only(bus: Bus) -> None:
    block, other = SequenceHash(b"\x01" * 16), SequenceHash(b"\x02" * 16)
    head: dict[str, Any] = {
        "host": "h", "source": "sim-0", "tier": "device", "epoch": 1, "ts_ms": 9,
        "namespace": "0" * 64,
    }  # fmt: skip
    said: list[RawStored | RawRemoved] = [
        RawStored(**head, seq=1, runs=[(other, [block])]), RawRemoved(**head, seq=2, hashes=[block])
    ]  # fmt: skip
    bus.packs_events = lambda: False
    async with publishing(bus) as publisher:
        for one in said:
            publisher.publish_event(one)
        await publisher.flush(deadline_s=DEADLINE_S)
    assert await read_events(bus, 2) == [
        ("stored", [as_json(said[0])]), ("removed", [as_json(said[1])]),
    ]  # fmt: skip


async def test_message_has_no_more_blocks_than_a_reader_takes_at_once(bus: Bus) -> None:
    """Goal: messages are cut at PACKED_BLOCKS_MAX; an event that is larger goes alone."""
    sizes = [PACKED_BLOCKS_MAX - 1, 1, 1, PACKED_BLOCKS_MAX + 1, 2]
    async with publishing(bus) as publisher:
        for seq, blocks in enumerate(sizes, start=1):
            publisher.publish_event(stored(seq, blocks))
        await publisher.flush(deadline_s=DEADLINE_S)
    messages = await read_events(bus, 5)
    assert [[one.seq for one in events] for _, events in messages] == [[1, 2], [3], [4], [5]]


async def test_a_hole_and_a_new_life_end_a_message(bus: Bus) -> None:
    """Goal: the numbers of a message follow each other, so that a reader sees each hole."""
    again = msgspec.structs.replace(stored(1), epoch=2)
    async with publishing(bus) as publisher:
        for one in (stored(1), stored(2), stored(4), again):
            publisher.publish_event(one)
        await publisher.flush(deadline_s=DEADLINE_S)
    messages = await read_events(bus, 1)
    assert [events for _, events in messages] == [[stored(1), stored(2)], [stored(4)], [again]]


async def test_packed_messages_that_are_sent_again_are_stored_once(
    bus: Bus, nats_server: NatsServer
) -> None:
    """Goal: no event twice and none missing over deaths of NATS, whatever was acknowledged."""
    async with publishing(bus) as publisher:
        for first in (1, 101, 201):
            for seq in range(first, first + 100):
                publisher.publish_event(stored(seq))
                if seq % 10 == 0:
                    await asyncio.sleep(0)
            nats_server.kill()
            await nats_server.start()
        await publisher.flush(deadline_s=DEADLINE_S)
    messages = await read_events(bus, 300)
    assert [one.seq for _, events in messages for one in events] == list(range(1, 301))
    assert len(messages) < 300


async def test_full_outbox_counts_the_events_of_what_it_drops(
    bus: Bus, nats_server: NatsServer
) -> None:
    """Goal: the oldest messages go, and the counter is of events."""
    half = PACKED_BLOCKS_MAX // 2
    async with publishing(bus, outbox_max=2) as publisher:
        nats_server.kill()
        await wait_until(lambda: not bus.connected)
        for seq in range(1, 9):
            publisher.publish_event(stored(seq, half))
        assert publisher.pending == 4
        await nats_server.start()
        await publisher.flush(deadline_s=DEADLINE_S)
    messages = await read_events(bus, 8)
    assert [[one.seq for one in events] for _, events in messages] == [[5, 6], [7, 8]]
    assert bus.counters.value("kvbm_events_dropped_total", reason="outbox_full") == 4


async def test_event_without_a_time_gets_that_of_its_message(bus: Bus) -> None:
    """Goal: a core has no clock, and its shell need not stamp each event."""
    async with publishing(bus) as publisher:
        for seq in (1, 2):
            publisher.publish_event(msgspec.structs.replace(stored(seq), ts_ms=0))
        await publisher.flush(deadline_s=DEADLINE_S)
    ((kind, events),) = await read_events(bus, 2)
    assert kind == "packed"
    assert events[0].ts_ms == events[1].ts_ms > 1_700_000_000_000


@pytest.mark.parametrize("name", ["e\n", "e f", "", "*", ">"])
async def test_packed_events_on_no_subject_are_dropped_alone(bus: Bus, name: str) -> None:
    """Goal: a source with a name that NATS refuses holds up no other, and no end of a service."""
    async with publishing(bus) as publisher:
        publisher.publish_event(stored(1, source=name))
        await publisher.flush(deadline_s=DEADLINE_S)
        publisher.publish_event(stored(2))
        publisher.publish_event(stored(2, source=name))
        await publisher.flush(deadline_s=DEADLINE_S)
    assert await read_events(bus, 2) == [("packed", [stored(2)])]
    assert bus.counters.value("kvbm_events_dropped_total", reason="invalid_subject") == 2
