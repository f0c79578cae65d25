"""What the registry of a fleet on NATS costs: a reader, and nats-server.

A hundred hosts, each with a consolidator that has entered eight engines, a host tier and a disk
tier. Their heartbeats come from one process, over a connection for each kind of service. For
comparison each entry has a heartbeat of its own.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from kvbm_common.config.settings import Settings
from kvbm_common.nats.bus import Bus
from kvbm_common.nats.embedded_server import NatsServer
from kvbm_common.registry.nats_kv import NatsRegistry
from kvbm_common.registry.records import ENGINE, Info
from kvbm_common.runtime.processes import free_port

from benchmarks.harness import Row, info_row, processor_s, time_row

HOSTS, ENGINES = 100, 8
KINDS = ("consolidator", "host-tier", "disk-tier")
ENTRIES = HOSTS * (len(KINDS) + ENGINES)
INFO: Info = {"endpoint": "tcp://10.0.0.1:5557", "namespace": "ab" * 32, "block_count": 4_096}
READER_MAX = 1.0
"""Percent of a core."""
ENTER_S, SETTLE_S, SECONDS, ROUNDS = 120.0, 5.0, 10.0, 5


def run() -> list[Row]:
    """Return the rows of a reader and of the server, beside a heartbeat for each entry."""
    with tempfile.TemporaryDirectory() as directory:
        ours, alone = (
            asyncio.run(_run(Path(directory) / name, name)) for name in ("by process", "by entry")
        )
    name = f"{ENTRIES} entries of {HOSTS} hosts: "
    reader, server = name + "a reader", name + "nats-server, with one reader"
    return [
        time_row(reader, ours[0], unit="% of a core", target=READER_MAX),
        info_row(f"{reader}, with a heartbeat for each entry", alone[0], unit="% of a core"),
        info_row(server, ours[1], unit="% of a core"),
        info_row(f"{server}, with a heartbeat for each entry", alone[1], unit="% of a core"),
    ]


async def _run(directory: Path, heartbeats: str) -> tuple[float, float]:
    """Return what a reader and the server take of a core."""
    async with NatsServer(directory, port=free_port()) as server:
        owners = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "benchmarks.registry", server.url, heartbeats),
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(ENTER_S):
                assert owners.stdout is not None
                await owners.stdout.readline()
            return await _look(server)
        finally:
            owners.kill()
            await owners.wait()


async def _look(server: NatsServer) -> tuple[float, float]:
    bus = await Bus.connect(server.url, "reader")
    registry = NatsRegistry(bus, ttl_s=Settings().registry_ttl_s)
    looks: list[tuple[float, float]] = []
    try:
        registry.watch(lambda event: None)
        await asyncio.sleep(SETTLE_S)
        for _ in range(ROUNDS):
            assert len(await registry.list()) == ENTRIES, "not all are there"
            began_s, before = time.monotonic(), (time.process_time(), processor_s(server.pid))
            await asyncio.sleep(SECONDS)
            spent = time.process_time() - before[0], processor_s(server.pid) - before[1]
            took_s = time.monotonic() - began_s
            looks.append((100 * spent[0] / took_s, 100 * spent[1] / took_s))
    finally:
        await registry.close()
        await bus.close()
    readers, servers = zip(*looks, strict=True)
    return median(readers), median(servers)


async def _own(url: str, heartbeats: str) -> None:
    """Enter all, say so, and stay entered."""
    buses = {kind: await Bus.connect(url, kind) for kind in (*KINDS, ENGINE)}

    def process(kind: str) -> NatsRegistry:
        return NatsRegistry(buses[kind], ttl_s=Settings().registry_ttl_s)

    for host in (f"host-{number}" for number in range(HOSTS)):
        processes = {kind: process(kind) for kind in KINDS}
        for kind, registry in processes.items():
            await registry.register(kind, host, "0", INFO)
        for engine in range(ENGINES):
            by_entry = heartbeats == "by entry"
            registry = process(ENGINE) if by_entry else processes["consolidator"]
            await registry.register(ENGINE, host, f"e-{engine}", INFO)
    print("entered", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_own(*sys.argv[1:]))
