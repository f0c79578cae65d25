"""What a host tier hears of the tiers below it, on a real NATS."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from kvbm_common.nats.bus import Bus
from kvbm_common.nats.snapshots import pages_of
from kvbm_common.nats.streams import EVENTS
from kvbm_common.runtime.metrics import Metrics
from kvbm_common.tier.announcer import Announcer
from kvbm_common.wire.events import Cleared
from kvbm_common.wire.verbs import SnapshotRequest
from kvbm_host_tier.core.messages import LowerEventsLost, LowerTierEvent
from kvbm_host_tier.shell.lower_tier_client import LowerTierClient

from tests.services.host_tier.helpers import on_disk
from tests.waiting import ask_until


async def test_an_event_from_the_future_is_dropped(bus: Bus) -> None:
    """A forged life would hide all that the disk tier says from then on."""
    dropped = Metrics().counter("dropped", "Dropped.", labels=("reason",))
    context: Any = SimpleNamespace(bus=bus, host="h", events=EVENTS)
    heard: list[LowerTierEvent] = []

    def take(event: LowerTierEvent) -> bool:
        heard.append(event)
        return True

    def not_lost(event: LowerEventsLost) -> None:
        pytest.fail(f"nothing was lost: {event}")

    publisher = bus.event_publisher("disk-tier-0")
    now = int(time.time() * 1_000_000)
    async with asyncio.timeout(10.0), asyncio.TaskGroup() as tasks:
        running = [
            tasks.create_task(LowerTierClient(context, dropped).follow(take, not_lost)),
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


async def test_the_core_hears_that_the_stream_has_lost_events() -> None:
    """A quiet tier says nothing more that would show the gap."""
    dropped = Metrics().counter("dropped", "Dropped.", labels=("reason",))
    lost: list[LowerEventsLost] = []

    @contextlib.asynccontextmanager
    async def event_subscription(
        *, on_stream_lost: Callable[[], None], **_: Any
    ) -> AsyncIterator[AsyncIterator[Any]]:
        async def loses() -> AsyncIterator[Any]:
            on_stream_lost()
            for batch in list[Any]():
                yield batch

        yield loses()

    fake = SimpleNamespace(event_subscription=event_subscription)
    context: Any = SimpleNamespace(bus=fake, host="h", events=EVENTS)
    await LowerTierClient(context, dropped).follow(lambda _: True, lost.append)
    assert lost == [LowerEventsLost()]


@pytest.mark.parametrize("is_bad", [False, True])
async def test_a_snapshot_is_read_page_by_page_and_one_bad_page_is_no_answer(is_bad: bool) -> None:
    """The core asks again for what it could not read."""
    source = Announcer(host="h", source="disk-tier-0", tier="disk", epoch=3)
    source.cleared("start")
    pages = pages_of(source.snapshot([on_disk(number) for number in range(1, 21)]), page_bytes=400)
    assert len(pages) > 2
    if is_bad:
        pages[1].parts[0].runs[0].hashes[0] = "no"

    async def request(_subject: str, payload: bytes, *, deadline_s: float) -> bytes:
        assert deadline_s > 0
        return msgspec.json.encode(pages[msgspec.json.decode(payload, type=SnapshotRequest).page])

    context: Any = SimpleNamespace(bus=SimpleNamespace(request=request), host="h")
    dropped = Metrics().counter("dropped", "Dropped.", labels=("reason",))
    heard = await LowerTierClient(context, dropped).snapshot("0", "disk")
    if is_bad:
        assert heard.snapshot is None
    else:
        assert heard.snapshot is not None
        count = sum(len(names) for part in heard.snapshot.parts for names in part.pieces(99))
        assert count == 20
