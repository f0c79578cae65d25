"""The tier feed: which service is asked for the snapshot of a source."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from kvbm_common.config.settings import Settings
from kvbm_common.nats.bus import Bus
from kvbm_common.nats.event_message import EventMessage
from kvbm_common.registry.nats_kv import NatsRegistry
from kvbm_common.runtime.metrics import Metrics
from kvbm_common.service.process import ServiceContext
from kvbm_common.tier.announcer import Announcer
from kvbm_common.wire.events import Cleared, Tier, event_codec, event_subject
from kvbm_connectors.consolidator.core.messages import Input, TierSnapshot
from kvbm_connectors.consolidator.shell.tier_feed import TierFeed


async def nobody(_: Input) -> None:
    """Takes nothing."""


def test_an_event_from_the_future_is_dropped() -> None:
    """A later life than any clock can have begun would hide all that the tier says from then on."""
    counters = Metrics()
    context: Any = SimpleNamespace(counters=counters)
    tasks: Any = None
    feed = TierFeed(context, tasks=tasks, take=nobody, complete=lambda _: None)
    event = Cleared(host="h", source="host-tier-0", tier="host", epoch=2**62, seq=1, ts_ms=0)
    message = EventMessage(event_subject(event), event_codec.encode(event), 1)
    assert feed.events_of(message) == []
    assert counters.value("kvbm_consolidator_messages_dropped_total", reason="future_epoch") == 1


@pytest.mark.parametrize(
    ("kind", "instance", "tier"),
    [("host-tier", "0", "host"), ("disk-tier", "0-1", "disk"), ("object-tier", "0", "object")],
)
async def test_the_snapshot_is_asked_from_who_speaks(
    bus: Bus, nats_url: str, kind: str, instance: str, tier: Tier
) -> None:
    """The second disk's instance has a dash: `disk-tier-0` was asked for instance `1`, in vain."""
    source = f"{kind}-{instance}"
    reply = Announcer(host="h", source=source, tier=tier, epoch=1).snapshot([])

    async def snapshot(_payload: bytes) -> bytes:
        return msgspec.json.encode(reply)

    await bus.add_verbs(kind, instance, "h", {"snapshot": snapshot})
    registry = NatsRegistry(bus, ttl_s=2.0)
    registration = await registry.register("consolidator", "h", "0")
    try:
        context = ServiceContext(
            settings=Settings.load({}, {"nats_url": nats_url, "host": "h"}), kind="consolidator",
            bus=bus, registry=registry, registration=registration, counters=Metrics(),
            stopping=asyncio.Event(),
        )  # fmt: skip
        async with asyncio.TaskGroup() as tasks:
            feed = TierFeed(context, tasks=tasks, take=nobody, complete=lambda _: None)
            assert await feed.ask(source) == TierSnapshot(reply)
    finally:
        await registration.revoke()
        await registry.close()
