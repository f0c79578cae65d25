"""The whole stack on a NATS cluster of three: the leaders of its streams are killed under load."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from kvbm_cli.demo.check import check_stack
from kvbm_common.errors import KvbmError
from kvbm_common.nats.bus import Bus
from kvbm_common.nats.jetstream import call_api
from kvbm_common.nats.streams import EVENTS, REGISTRY, STREAMS
from kvbm_common.wire.verbs import MatchRequest

from tests.integration.running import running
from tests.nats_cluster import NatsCluster
from tests.waiting import ask_until

TIERS = {"cpu_cache_gb": 0.1, "disk_cache_gb": 0.5, "disable_disk_offload_filter": True}
REQUESTS = 80
STALL_MAX_S = 2.0
"""Of a question to the index while a leader is replaced, and clients look for another server."""
DEADLINE_S = 30.0


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_leaders_of_streams_may_be_killed_during_the_load(tmp_path: Path) -> None:
    """Goal: what was acknowledged is there, and nobody goes on with a wrong picture.

    1. Every stream has three replicas. Engines work all the time. 2. The server that leads the
       events is killed and started again, then the one that leads the registry's stream.
    3. Every request has finished, none with an error, none with a wrong block; no process has
       ended; the index agrees with every tier and engine.
    """
    overrides = TIERS | {"stream_replicas": 3}
    async with (
        NatsCluster(tmp_path) as cluster,
        running(overrides, nats_url=cluster.url) as run,
        watching(cluster) as stalls,
    ):
        bus = await Bus.connect(cluster.url, "test")
        try:
            for spec in STREAMS[:2]:
                assert (await describe(bus, spec.name))["config"]["num_replicas"] == 3
            before = run.stack.pids
            for spec in (EVENTS, REGISTRY):
                work = asyncio.create_task(run.run(requests=REQUESTS, prefix=spec.name))
                leader = cluster.led_by((await describe(bus, spec.name))["cluster"]["leader"])
                leader.kill()
                await work
                await leader.start()
            assert len(run.finished) == 2 * REQUESTS
            assert not run.errors()
            assert run.mismatches() == 0
            assert (await check_stack(run.view, run.engines, with_disk=True)).differences == []
            assert run.stack.pids == before
            assert max(stalls) < STALL_MAX_S, f"the index was silent for {max(stalls):.1f} s"
        finally:
            await bus.close()


async def describe(bus: Bus, stream: str) -> dict[str, Any]:
    """A stream, as the cluster describes it."""
    text = await ask_until(
        lambda: call_api(bus, f"STREAM.INFO.{stream}"), deadline_s=DEADLINE_S, despite=KvbmError
    )
    found: dict[str, Any] = msgspec.json.decode(text)
    return found


@asynccontextmanager
async def watching(cluster: NatsCluster) -> AsyncIterator[list[float]]:
    """Ask the index all the time; notes how long each answer took, tries that failed included."""
    bus, took = await Bus.connect(cluster.url, "watch"), [0.0]
    question = msgspec.json.encode(MatchRequest(hashes=["0" * 32]))

    async def ask() -> None:
        while True:
            started_s = time.monotonic()
            await ask_until(
                lambda: bus.request("kvbm.v1.index.match", question, deadline_s=0.5),
                deadline_s=DEADLINE_S, despite=KvbmError,
            )  # fmt: skip
            took.append(time.monotonic() - started_s)

    asking = asyncio.create_task(ask())
    try:
        yield took
    finally:
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await bus.close()
