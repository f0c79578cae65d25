"""What a host tier hears of the tiers below it, on a real NATS."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

from kvbm_common.nats.bus import Bus
from kvbm_common.nats.streams import EVENTS
from kvbm_common.runtime.metrics import Metrics
from kvbm_common.wire.events import Cleared
from kvbm_host_tier.core.messages import DiskEvent
from kvbm_host_tier.shell.lower_tier_client import LowerTierClient

from tests.waiting import ask_until


async def test_an_event_from_the_future_is_dropped(bus: Bus) -> None:
    """A forged life would hide all that the disk tier says from then on."""
    dropped = Metrics().counter("dropped", "Dropped.", labels=("reason",))
    context: Any = SimpleNamespace(bus=bus, host="h", events=EVENTS)
    heard: list[DiskEvent] = []

    def take(event: DiskEvent) -> bool:
        heard.append(event)
        return True

    publisher = bus.event_publisher("disk-tier-0")
    now = int(time.time() * 1_000_000)
    async with asyncio.timeout(10.0), asyncio.TaskGroup() as tasks:
        running = [
            tasks.create_task(LowerTierClient(context, dropped).follow(take)),
            tasks.create_task(publisher.run()),
        ]
        seq = 0

        async def is_heard() -> bool:
            """Each try says a forged event and a true one: the first may come too early."""
            nonlocal seq
            seq += 1
            for epoch in (2**62, now):
                publisher.publish_event(
                    Cleared(host="h", source="disk-tier-0", tier="disk", epoch=epoch, seq=seq,
                            ts_ms=1)
                )  # fmt: skip
            await publisher.flush(deadline_s=5.0)
            return bool(heard)

        await ask_until(is_heard, deadline_s=10.0)
        for task in running:
            task.cancel()
    assert {event.event.epoch for event in heard} == {now}
