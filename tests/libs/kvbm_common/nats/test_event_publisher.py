"""Publishers of events on a real nats-server: no duplicates, and what a full outbox drops."""

from __future__ import annotations

import pytest
from kvbm_common.nats.bus import Bus
from kvbm_common.nats.embedded_server import NatsServer

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
