"""What closing the bus costs: a NATS that is open, one with passwords, one with NKeys and TLS.

The same services run against each. Engines speak to host tier and consolidator over ZMQ on sockets
of one user, whatever the bus is, so lookups are to cost the same. Events are compared by the
processor time of those that carry them: consolidator, NATS and index.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median

from kvbm_cli.stack import Stack
from kvbm_common.nats.bus import Bus
from kvbm_common.nats.embedded_server import NatsServer
from kvbm_common.runtime.processes import free_port

from benchmarks.harness import Row, info_row, processor_s, rate_row
from benchmarks.index_path import flood
from benchmarks.latency import BLOCK_BYTES, LOOKUP_BLOCKS, lookup_seconds
from benchmarks.probe import Probe
from tests.security.guarded_nats import guarded_nats

ARMS = ("open", "passwords", "NKeys and TLS")
SERVICES = ("consolidator", "index", "host-tier")
ROUNDS = 5
BLOCKS = 400_000
LOOKUPS = 400
SETTINGS: dict[str, object] = {"cpu_cache_gb": 0.1, "host": "a"}

Figures = dict[str, list[float]]


def run() -> list[Row]:
    """Each arm in turn, several times; ratios are medians over medians."""
    return asyncio.run(_run())


async def _run() -> list[Row]:
    rates: Figures = {arm: [] for arm in ARMS}
    lookups: Figures = {arm: [] for arm in ARMS}
    for _ in range(ROUNDS):
        for arm in ARMS:
            rate, seconds = await _measure(arm)
            rates[arm].append(rate)
            lookups[arm].append(seconds)
    open_rate, open_lookup = (median(figures[ARMS[0]]) for figures in (rates, lookups))
    rows = [
        info_row("events, open NATS", open_rate, unit="M blocks/CPU s"),
        info_row("lookup of 512 blocks, open NATS, p50", open_lookup * 1e3, unit="ms"),
    ]
    for arm in ARMS[1:]:
        rows += [
            rate_row(f"events, {arm}", median(rates[arm]), unit="M blocks/CPU s",
                     reference=open_rate, target=0.9),
            rate_row(f"lookups of 512 blocks, {arm}", 1 / median(lookups[arm]), unit="1/s",
                     reference=1 / open_lookup, target=0.98),
        ]  # fmt: skip
    return rows


async def _measure(arm: str) -> tuple[float, float]:
    """Millions of blocks for a second of a processor, and a lookup's median in seconds."""
    async with _stack(arm) as (stack, nats_pid):
        bus = await Bus.connect(stack.admin, "bench", deadline_s=5)
        probe = Probe(stack.settings, "probe", block_bytes=BLOCK_BYTES, block_count=LOOKUP_BLOCKS)
        pids = (stack.pids["consolidator"], stack.pids["index"], nats_pid)
        try:
            await asyncio.to_thread(probe.start)
            before_s = sum(map(processor_s, pids))
            sent = await flood(bus, probe, stack.settings.host, BLOCKS)
            spent_s = sum(map(processor_s, pids)) - before_s
            seconds = await asyncio.to_thread(lookup_seconds, probe, LOOKUPS)
        finally:
            probe.close()
            await bus.close()
    return sent / spent_s / 1e6, median(seconds)


@asynccontextmanager
async def _stack(arm: str) -> AsyncIterator[tuple[Stack, int]]:
    """Run the services against the NATS of an arm; yield them, and the number of its process."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        if arm == "open":
            async with (
                NatsServer(directory / "nats", port=free_port()) as server,
                Stack.private(SETTINGS, services=SERVICES, nats_url=server.url) as stack,
            ):
                yield stack, server.pid
        elif arm == "passwords":
            async with Stack.private(SETTINGS, services=SERVICES) as stack:
                yield stack, stack.pids["nats"]
        else:
            async with guarded_nats(directory, tls=True) as nats:
                own = SETTINGS | {
                    "creds_dir": nats.merged(),
                    "nats_ca_file": nats.directory / "server" / "ca.pem",
                }
                async with Stack.private(own, services=SERVICES, nats_url=nats.url) as stack:
                    yield stack, nats.server.pid
