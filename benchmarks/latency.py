"""Latencies: an engine's lookup, and an event's way from an engine's socket to the index."""

from __future__ import annotations

import asyncio
import time

import msgspec
import numpy as np
from kvbm_cli.stack import Stack
from kvbm_common.identity import hashes_to_hex
from kvbm_common.nats.bus import Bus
from kvbm_common.runtime.metrics import Metrics
from kvbm_common.wire.index_verbs import MatchReply, MatchRequest
from kvbm_common.wire.verbs import verb_subject

from benchmarks.harness import Row, info_row, percentile, time_row
from benchmarks.probe import Probe

LOOKUP_BLOCKS = 512
LOOKUPS = 2_000
FIRST_LOOKUPS = 40
"""Runs that fit into the arena together."""
QUIET_S = 0.1
"""After an offload: its events are stored by then."""
BLOCK_BYTES = 4096
EVENTS_PER_S = 1_000
EVENTS = 5_000


def run() -> list[Row]:
    """On an idle machine, both."""
    return asyncio.run(_run())


async def _run() -> list[Row]:
    services = ("consolidator", "index", "host-tier")
    async with Stack.private({"cpu_cache_gb": 0.1}, services=services) as stack:
        bus = await Bus.connect(stack.admin, "bench", counters=Metrics(), deadline_s=5)
        probe = Probe(stack.settings, "probe", block_bytes=BLOCK_BYTES, block_count=LOOKUP_BLOCKS)
        try:
            await asyncio.to_thread(probe.start)
            lookups = await asyncio.to_thread(_lookups, probe)
            return [*lookups, *await _events(bus, probe)]
        finally:
            probe.close()
            await bus.close()


def _lookups(probe: Probe) -> list[Row]:
    seconds = lookup_seconds(probe, LOOKUPS)
    return [
        time_row("lookup of 512 blocks, leased, p99", percentile(seconds, 0.99) * 1e3, unit="ms",
                 target=1.0),
        time_row("lookup of 512 blocks, leased, p50", percentile(seconds, 0.5) * 1e3, unit="ms",
                 target=0.4),
        info_row("lookup of 512 blocks that none has asked for before, p50",
                 percentile(_first_seconds(probe), 0.5) * 1e3, unit="ms"),
    ]  # fmt: skip


def _first_seconds(probe: Probe) -> list[float]:
    """Offload runs of 512 blocks, and look each up once: nothing of them is known by then."""
    seconds: list[float] = []
    for seed in range(1, 1 + FIRST_LOOKUPS):
        names = probe.chain(seed, LOOKUP_BLOCKS)
        assert probe.offload(names) == LOOKUP_BLOCKS
        time.sleep(QUIET_S)
        started = time.perf_counter()
        hit = probe.lookup(f"first {seed}", names)
        seconds.append(time.perf_counter() - started)
        assert hit.blocks == LOOKUP_BLOCKS
        probe.scheduler.forget(f"first {seed}")
    return seconds


def lookup_seconds(probe: Probe, count: int) -> list[float]:
    """Offload 512 blocks, and look them up one time after the other."""
    names = probe.chain(0, LOOKUP_BLOCKS)
    assert probe.offload(names) == LOOKUP_BLOCKS
    seconds: list[float] = []
    for number in range(count):
        started = time.perf_counter()
        hit = probe.lookup(str(number), names)
        seconds.append(time.perf_counter() - started)
        assert hit.blocks == LOOKUP_BLOCKS
        probe.scheduler.forget(str(number))
    return seconds


async def _events(bus: Bus, probe: Probe) -> list[Row]:
    """Publish one block per event at a steady rate; ask the index for one now and then."""
    size = probe.namespace.block_tokens
    tokens = np.random.default_rng(7).integers(0, 32_000, EVENTS * size, dtype=np.uint32)
    names = probe.hasher.chain(tokens)
    delays: list[float] = []
    sampling: set[asyncio.Task[None]] = set()
    started = time.perf_counter()
    for number, name in enumerate(names):
        pause = started + number / EVENTS_PER_S - time.perf_counter()
        if pause > 0:
            await asyncio.sleep(pause)
        probe.events.stored(
            [name],
            parent=names[number - 1] if number else None,
            tokens=tokens[number * size : (number + 1) * size].tolist(),
            block_tokens=size,
            salt=None,
        )
        probe.events.flush()
        if number % 50 == 49:
            prefix = hashes_to_hex(names[: number + 1][-1:])
            sampling.add(asyncio.create_task(_wait_known(bus, prefix, time.perf_counter(), delays)))
    await asyncio.wait_for(asyncio.gather(*sampling), 30)
    return [
        time_row("event, engine's socket → index's answer, p99 at 1,000 events/s",
                 percentile(delays, 0.99) * 1e3, unit="ms", target=50.0),
        info_row("event, engine's socket → index's answer, p50",
                 percentile(delays, 0.5) * 1e3, unit="ms"),
    ]  # fmt: skip


async def _wait_known(bus: Bus, hashes: list[str], since: float, delays: list[float]) -> None:
    request = msgspec.json.encode(MatchRequest(hashes=hashes))
    while True:
        reply = await bus.request(verb_subject("index", "match"), request, deadline_s=5)
        if msgspec.json.decode(reply, type=MatchReply).matches:
            delays.append(time.perf_counter() - since)
            return
        await asyncio.sleep(0.001)
