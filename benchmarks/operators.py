"""What operators cost: the time of an answer, and the data path with and without an onlooker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial

import httpx
import msgspec
from kvbm_cli.stack import Stack
from kvbm_common.identity import hash_from_hex
from kvbm_common.nats.bus import Bus
from kvbm_common.nats.streams import EVENTS
from kvbm_common.registry.nats_kv import NatsRegistry
from kvbm_common.runtime.metrics import Metrics
from kvbm_common.tier.announcer import Announcer
from kvbm_common.tier.slots import Block
from kvbm_common.wire.events import Event, event_codec, event_subject
from kvbm_common.wire.scores import HoldersReply
from kvbm_common.wire.verbs import verb_subject

from benchmarks.fleet_stub import recorded, serve_fleet
from benchmarks.harness import Row, info_row, percentile, processor_s, time_row
from benchmarks.watched import SERVICES, Onlooker, cost_rows

SOURCES = 100
BLOCKS_OF_A_SOURCE = 100
ASKED = 40
VERBS_ASKED = 300
KINDS = ("index", "host-tier", "disk-tier", "metrics", "consolidator")
LOOKED_S = 12.0
PROCESSOR_MS_PER_S = 20.0
"""1 % of two cores."""


def run() -> list[Row]:
    """First the answers, then the data path, each on a stack of its own."""
    said: dict[str, bytes] = {}
    answers = asyncio.run(_answers(said))
    fleet, processor = asyncio.run(_fleet(said)), asyncio.run(_processor())
    return [*answers, *fleet, *processor, *asyncio.run(_throughput())]


# --- answers ------------------------------------------------------------------------------------


async def _answers(said: dict[str, bytes]) -> list[Row]:
    """A stack whose index follows many sources of events; keeps what its host tier says."""
    async with Stack.private({"cpu_cache_gb": 0.1, "admin_open": "read"}) as stack:
        bus = await Bus.connect(stack.admin, "bench", counters=Metrics(), deadline_s=5)
        try:
            await _many_sources(bus, stack.settings.host)
            said |= await recorded(bus, stack.settings.host)
            verbs = [await _verb_row(bus, stack.settings.host, kind) for kind in KINDS]
            return [*verbs, *await _http_rows(stack, f"five services, {SOURCES} sources", 20.0)]
        finally:
            await bus.close()


async def _many_sources(bus: Bus, host: str) -> None:
    for number in range(SOURCES):
        source = Announcer(host=host, source=f"source-{number}", tier="device", epoch=1)
        names = [f"{number * 1000 + place + 1:032x}" for place in range(BLOCKS_OF_A_SOURCE)]
        parent = hash_from_hex("0" * 32)
        blocks = [Block(hash_from_hex(name), parent, bytes(32), 0, 4096) for name in names]
        events: list[Event] = [source.cleared("start"), *source.stored(blocks)]
        for event in events:
            payload = event_codec.encode(event)
            await bus.publish_raw(event_subject(event), payload, headers=EVENTS.marked)
    async with asyncio.timeout(30):
        while await _known(bus) < SOURCES:  # noqa: ASYNC110 - it has no event.
            await asyncio.sleep(0.05)


async def _known(bus: Bus) -> int:
    """Sources of which the index has everything."""
    reply = await bus.request(verb_subject("index", "holders"), b"{}", deadline_s=5)
    holders = msgspec.json.decode(reply, type=HoldersReply).holders
    return sum(one.blocks == BLOCKS_OF_A_SOURCE for one in holders)


async def _verb_row(bus: Bus, host: str, kind: str) -> Row:
    subject = verb_subject(kind, "metrics", host=host, instance="0")
    ask = partial(bus.request, subject, b"{}", deadline_s=5)
    times = await _times(ask, pause_s=0.01, count=VERBS_ASKED)
    name = f"metrics of the service {kind}, p99, index follows {SOURCES} sources"
    return time_row(name, percentile(times, 0.99) * 1e3, unit="ms", target=20.0)


async def _fleet(said: dict[str, bytes]) -> list[Row]:
    """A metrics service that speaks for many instances, which this process plays."""
    async with Stack.private({"admin_open": "read"}, services=("metrics",)) as stack:
        bus = await Bus.connect(stack.admin, "bench", counters=Metrics(), deadline_s=5)
        registry = NatsRegistry(bus, ttl_s=5.0)
        try:
            await serve_fleet(bus, registry, said, count=SOURCES)
            return await _http_rows(stack, f"{SOURCES} instances", None)
        finally:
            await registry.close()
            await bus.close()


async def _http_rows(stack: Stack, what: str, metrics_ms: float | None) -> list[Row]:
    """Answers that are new each time: asked less often than they are kept."""
    async with httpx.AsyncClient(base_url=stack.services["metrics"].description) as client:
        scrape = await _times(lambda: client.get("/metrics"), pause_s=0.3)
        status = await _times(lambda: client.get("/v1/status"), pause_s=0.3)
    scraped_ms, status_ms = percentile(scrape, 0.5) * 1e3, percentile(status, 0.5) * 1e3
    return [
        time_row(f"GET /metrics, p50, {what}", scraped_ms, unit="ms", target=metrics_ms)
        if metrics_ms is not None
        else info_row(f"GET /metrics, p50, {what}", scraped_ms, unit="ms"),
        time_row(f"GET /v1/status, p50, {what}", status_ms, unit="ms", target=50.0),
    ]


async def _times(
    ask: Callable[[], Awaitable[object]], *, pause_s: float, count: int = ASKED
) -> list[float]:
    times: list[float] = []
    for _ in range(count):
        started_s = time.perf_counter()
        await ask()
        times.append(time.perf_counter() - started_s)
        await asyncio.sleep(pause_s)
    return times


# --- the data path ------------------------------------------------------------------------------


async def _processor() -> list[Row]:
    """What the services compute for an onlooker: the difference to a time without one."""
    async with Stack.private({"cpu_cache_gb": 0.1, "admin_open": "read"}) as stack:
        await asyncio.sleep(5)  # What starting takes is over.
        alone_s = await _computed(stack)
        with Onlooker(stack) as onlooker:
            await asyncio.to_thread(onlooker.tell, looks=True)
            watched_s = await _computed(stack)
    return [
        time_row("processor time of five services for a page and a scrape each second",
                 (watched_s - alone_s) / LOOKED_S * 1e3, unit="ms/s", target=PROCESSOR_MS_PER_S)
    ]  # fmt: skip


async def _computed(stack: Stack) -> float:
    """Processor time of all services over a while."""
    pids = [one.pid for one in stack.services.values() if one.pid]
    before_s = sum(map(processor_s, pids))
    await asyncio.sleep(LOOKED_S)
    return sum(map(processor_s, pids)) - before_s


async def _throughput() -> list[Row]:
    async with Stack.private(
        {"cpu_cache_gb": 1.0, "admin_open": "read"}, services=SERVICES
    ) as stack:
        return await asyncio.to_thread(cost_rows, stack)
