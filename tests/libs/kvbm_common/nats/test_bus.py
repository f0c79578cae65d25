"""The bus on a real nats-server: requests, drops, deadlines, and an outage."""

from __future__ import annotations

import asyncio

import pytest
from kvbm_common.errors import BusUnavailable, DeadlineExceeded
from kvbm_common.nats.bus import Bus
from kvbm_common.nats.embedded_server import NatsServer

from tests.libs.kvbm_common.nats.speaking import DEADLINE_S, echo
from tests.waiting import wait_until


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


async def test_connect_has_a_deadline(
    nats_server: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Goal: no NATS is a typed error, which says all: no line of a log stands before it."""
    nats_server.kill()
    with pytest.raises(BusUnavailable, match="Connect call failed"):
        await Bus.connect(nats_server.url, "test", deadline_s=0.2)
    assert caplog.messages == []
