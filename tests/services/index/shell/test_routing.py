"""The verb `route` on a real NATS: engines join, hold blocks, fall behind and go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from kvbm_common.identity import SequenceHash
from kvbm_common.nats.bus import Bus
from kvbm_common.nats.embedded_server import NatsServer
from kvbm_common.registry.nats_kv import NatsRegistry
from kvbm_common.registry.records import ENGINE
from kvbm_common.wire.events import Cleared, Event, Run, Stored, event_subject
from kvbm_common.wire.routes import RouteReply

from tests.services.index.shell.test_service import (
    CHAIN,
    DEADLINE_S,
    NAMESPACE,
    TOKENS,
    TTL_S,
    Source,
    ask,
    living,
    settings_of,
    wait_held,
    wait_ready,
)
from tests.waiting import ask_until

QUESTION: dict[str, Any] = {"tokens": TOKENS, "namespace": msgspec.to_builtins(NAMESPACE)}


@asynccontextmanager
async def engine(
    bus: Bus, name: str, held: list[SequenceHash], *, seq: int = 2, ranks: str = "0"
) -> AsyncIterator[None]:
    """An engine that holds blocks: registered, its events on the stream; `seq` of the second."""
    registry = NatsRegistry(bus, ttl_s=TTL_S)
    info = {"ranks": ranks, "namespaces": NAMESPACE.digest.hex()}
    life = await registry.register(ENGINE, "h", name, dict(info))
    publisher = bus.event_publisher(name)
    task = asyncio.create_task(publisher.run())
    envelope: dict[str, Any] = {"host": "h", "source": name, "tier": "device",
                                "epoch": life.epoch, "ts_ms": 1}  # fmt: skip
    run = Run(parent=NAMESPACE.root.hex(), hashes=[block.hex() for block in held])
    events: list[Event] = [Cleared(**envelope, seq=1)]
    if held:
        events.append(Stored(**envelope, seq=seq, namespace=NAMESPACE.digest.hex(), runs=[run]))
    for event in events:
        payload = msgspec.json.encode(event)
        publisher.publish(event_subject(event), payload, epoch=event.epoch, seq=event.seq)
    try:
        await publisher.flush(deadline_s=DEADLINE_S)
        yield
    finally:
        await life.revoke()
        task.cancel()
        await registry.close()


async def routed(bus: Bus, **more: object) -> RouteReply:
    """What the index answers."""
    return msgspec.json.decode(await ask(bus, "route", QUESTION | more), type=RouteReply)


async def wait_order(bus: Bus, expected: dict[str, int]) -> None:
    """Until these engines are ranked, in this order, with so many blocks to compute."""

    async def right() -> bool:
        reply = await routed(bus)
        return {one.source: one.compute for one in reply.engines} == expected and [
            one.source for one in reply.engines
        ] == list(expected)

    await ask_until(right, deadline_s=DEADLINE_S)


@pytest.fixture
async def index(nats_server: NatsServer, bus: Bus) -> AsyncIterator[None]:
    """A running index."""
    async with living(settings_of(nats_server)):
        await wait_ready(bus)
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("index")
async def test_engines_are_ranked_while_they_live(bus: Bus) -> None:
    """Goal: an order follows overlap, tiers and load, and knows who is there.

    1. One engine has four blocks of ten, one has none: the first one leads.
    2. It has much to do: the other leads.
    3. The host tier has eight: both find them.
    4. Another model: both are left out. The one that leaves is not ranked any more.
    """
    async with engine(bus, "idle", [], ranks="0"):
        async with engine(bus, "warm", CHAIN[:4]):
            await wait_order(bus, {"warm": 6, "idle": 10})
            busy = {"source": "warm", "running": 1, "waiting": 1, "waiting_blocks": 4}
            reply = await routed(bus, engines=[busy, {"source": "idle"}, {"source": "gone"}])
            assert [(one.source, one.cost) for one in reply.engines] == [
                ("idle", 10.0), ("warm", 11.0),
            ]  # fmt: skip
            assert [(one.source, one.reason) for one in reply.left_out] == [("gone", "unknown")]
            async with Source.living(bus) as host_tier:
                host_tier.store(CHAIN[:8])
                await wait_held(bus, host_tier)
                first, second = (await routed(bus, weights={"host": 0.5})).engines
                assert (first.source, first.found, first.cost) == (
                    "warm", {"device": 4, "host": 4}, 4.0,
                )  # fmt: skip
                assert (second.source, second.found, second.cost) == ("idle", {"host": 8}, 6.0)
            other = msgspec.to_builtins(msgspec.structs.replace(NAMESPACE, model="other"))
            reply = await routed(bus, namespace=other)
            assert reply.engines == []
            assert {one.reason for one in reply.left_out} == {"namespace"}
        await wait_order(bus, {"idle": 10})


@pytest.mark.usefixtures("index")
async def test_an_engine_with_a_hole_is_left_out(bus: Bus) -> None:
    """Its consolidator does not answer for it, so the index cannot know what it has."""
    async with engine(bus, "torn", CHAIN[:4], seq=3), engine(bus, "whole", [], ranks="0,1"):

        async def right() -> bool:
            reply = await routed(bus)
            ranks = [(one.source, one.rank) for one in reply.engines]
            left_out = [(one.source, one.reason) for one in reply.left_out]
            return (sorted(ranks), left_out) == ([("whole", 0), ("whole", 1)], [("torn", "behind")])

        await ask_until(right, deadline_s=DEADLINE_S)


@pytest.mark.usefixtures("index")
async def test_ranks_that_are_no_ranks_hide_no_engine(bus: Bus) -> None:
    """Goal: an entry of 5,000 digits, or the same rank twice, stops neither index nor answers."""
    async with engine(bus, "odd", [], ranks=f"1,{'9' * 5000},1"), engine(bus, "whole", []):

        async def right() -> bool:
            ranks = [(one.source, one.rank) for one in (await routed(bus)).engines]
            return sorted(ranks) == [("odd", 1), ("whole", 0)]

        await ask_until(right, deadline_s=DEADLINE_S)


@pytest.mark.usefixtures("index")
async def test_questions_without_blocks_take_turns(bus: Bus) -> None:
    """A prompt shorter than a block: equals are not always in the same order."""
    async with engine(bus, "one", []), engine(bus, "two", []):
        await ask_until(lambda: _both(bus), deadline_s=DEADLINE_S)
        firsts = [(await routed(bus, tokens=[1])).engines[0].source for _ in range(32)]
        assert set(firsts) == {"one", "two"}


async def _both(bus: Bus) -> bool:
    return len((await routed(bus)).engines) == 2
