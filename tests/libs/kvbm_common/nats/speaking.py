"""What the tests of the bus say to each other: verbs that answer, and numbered events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvbm_common.errors import KvbmError
from kvbm_common.nats.bus import Bus, EventPublisher, EventSubscription
from kvbm_common.nats.streams import EVENTS

DEADLINE_S = 10.0


class OutOfCheese(KvbmError):
    """An error with a code and a field of its own."""

    code = "out_of_cheese"
    field = "cheese"


async def echo(payload: bytes) -> bytes:
    return payload


async def fail(payload: bytes) -> bytes:
    raise OutOfCheese("no\ncheese")


@asynccontextmanager
async def publishing(bus: Bus, **limits: int) -> AsyncIterator[EventPublisher]:
    """A running publisher of source `sim-0`."""
    publisher = EventPublisher(
        bus, EVENTS, source="sim-0", counters=bus.counters, metrics_prefix="kvbm", **limits
    )
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
