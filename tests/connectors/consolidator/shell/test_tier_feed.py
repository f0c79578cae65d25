"""The tier feed: which service is asked for the snapshot of a source."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from kvbm_common.config.settings import Settings
from kvbm_common.nats.bus import Bus
from kvbm_common.nats.event_message import EventMessage
from kvbm_common.registry.nats_kv import NatsRegistry
from kvbm_common.registry.records import Joined, Left, RegistryEvent, ServiceRecord
from kvbm_common.runtime.loop import CoreLoop
from kvbm_common.runtime.metrics import Metrics
from kvbm_common.service.context import ServiceContext
from kvbm_common.tier.announcer import Announcer
from kvbm_common.wire.events import Cleared, Event, Tier, event_codec, event_subject
from kvbm_connectors.consolidator.core.messages import (
    GoOn,
    GoOnLater,
    Input,
    Tick,
    TierJoined,
    TierLeft,
    TierSnapshot,
)
from kvbm_connectors.consolidator.shell.tier_feed import STEP_BLOCKS, TierFeed, in_steps

from tests.libs.helpers import block
from tests.waiting import wait_until


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


def test_no_step_takes_many_events_with_many_blocks() -> None:
    """Up to 128 messages come at once: a reset of a tier held the loop for 70 ms."""
    announcer = Announcer(host="h", source="host-tier-0", tier="host", epoch=1)
    some = [block(number) for number in range(1, STEP_BLOCKS // 4 + 1)]
    events: list[Event] = [announcer.cleared("start"), *announcer.stored(some)]
    events += [event for _ in range(9) for event in announcer.removed(some, "evicted")]
    parts = [*in_steps(events)]
    assert [len(part) for part in parts] == [5, 4, 2]
    assert [event for part in parts for event in part] == events
    assert [*in_steps([])] == []


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


class CountingCore:
    """Asks to go on at its first input; notes the inputs."""

    def __init__(self) -> None:
        self.taken: list[Input] = []

    def step(self, event: Input, _now_ms: int) -> list[GoOnLater]:
        self.taken.append(event)
        return [GoOnLater()] if len(self.taken) == 1 else []


async def test_what_waits_goes_before_the_next_part() -> None:
    """A completion goes before all inputs: many parts in a row would have beats wait for all."""
    core = CountingCore()
    loop: CoreLoop[Input, GoOnLater] = CoreLoop(core, lambda _: feed.go_on(), inbox_size=64)

    async def take(event: Input) -> None:
        await loop.offer(event, deadline_s=5.0)

    context: Any = SimpleNamespace(counters=Metrics())
    async with asyncio.TaskGroup() as tasks:
        feed = TierFeed(context, tasks=tasks, take=take, complete=loop.complete)
        waiting: list[Input] = [Tick(offers_open=bool(number % 2)) for number in range(9)]
        for event in waiting:
            await take(event)
        running = tasks.create_task(loop.run())
        await loop.wait_idle(deadline_s=5.0)
        running.cancel()
    assert core.taken == [*waiting, GoOn()]


class Subscriptions:
    """Counts the subscriptions that are open; they say nothing."""

    def __init__(self) -> None:
        self.open = 0

    def are(self, expected: int) -> bool:
        return self.open == expected

    def event_subscription(self, **_: object) -> Subscriptions:
        return self

    async def __aenter__(self) -> Subscriptions:
        self.open += 1
        return self

    async def __aexit__(self, *_: object) -> None:
        self.open -= 1

    def __aiter__(self) -> Subscriptions:
        return self

    async def __anext__(self) -> None:
        await asyncio.Event().wait()


async def test_a_tier_that_left_is_followed_no_more() -> None:
    """Goal: tiers that come and go for weeks leave no subscription. One that is back is heard."""
    told: list[Input] = []
    watched: list[Callable[[RegistryEvent], None]] = []
    subscriptions = Subscriptions()

    def watch(tell: Callable[[RegistryEvent], None]) -> Callable[[], None]:
        watched.append(tell)
        return watched.clear

    registry = SimpleNamespace(watch=watch)
    context: Any = SimpleNamespace(
        host="h", counters=Metrics(), events=None, registry=registry, bus=subscriptions
    )
    record = ServiceRecord(
        kind="host-tier", host="h", instance="0", epoch=1, pid=1, started_ms=1, ttl_s=5.0
    )
    async with asyncio.TaskGroup() as tasks:
        feed = TierFeed(context, tasks=tasks, take=nobody, complete=told.append)
        feed.start()
        for event, is_followed in ((Joined(record), 1), (Left(record, "deleted"), 0)) * 2:
            watched[0](event)
            await wait_until(partial(subscriptions.are, is_followed))
        feed.close()
    assert [type(one) for one in told] == [TierJoined, TierLeft] * 2
