"""The whole stack on a NATS cluster of three, and on an etcd of three: leaders are lost."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from kvbm_cli.demo.check import check_stack
from kvbm_common.errors import DeadlineExceeded, KvbmError
from kvbm_common.nats.bus import Bus
from kvbm_common.nats.embedded_server import NatsServer
from kvbm_common.nats.jetstream import call_api
from kvbm_common.nats.streams import EVENTS, REGISTRY, STREAMS
from kvbm_common.registry.etcd import EtcdRegistry
from kvbm_common.registry.records import Left, RegistryEvent
from kvbm_common.wire.index_verbs import MatchRequest

from tests.etcd_server import EtcdCluster
from tests.integration.running import running
from tests.nats_cluster import NatsCluster
from tests.waiting import ask_until

TIERS = {"cpu_cache_gb": 0.1, "disk_cache_gb": 0.5, "disable_disk_offload_filter": True}
REQUESTS = 80
STALL_MAX_S = 2.0
"""Of a question to the index while a leader is replaced, and clients look for another server."""
DEADLINE_S = 30.0
ETCD_TTL_S = 5.0
"""As shipped: longer than an election, which begins after a second of silence."""
BUSY = 4
"""Processes ready to run, for each core, from which a lease that ends says nothing."""
LEASES_ARE_KEPT = (3, 4, 31)
"""The etcd since which a former leader ends no leases (its issue 15247)."""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", ["killed", "frozen", "cut off"])
async def test_leaders_of_streams_may_be_lost_during_the_load(how: str, tmp_path: Path) -> None:
    """Goal: what was acknowledged is there, and nobody goes on with a wrong picture.

    1. Every stream has three replicas. Engines work all the time. 2. The server that leads the
       events is lost and comes back, then the one that leads the registry's stream. A server that
       is frozen keeps its connections; one that is cut off still answers its clients.
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
                leader = await leader_of(bus, cluster, spec.name)
                lose(how, cluster, leader)
                try:
                    await work
                    if how != "cut off":
                        continue
                    others = [one for one in cluster.servers if one is not leader]
                    await one_leads(cluster, others, spec.name)
                finally:
                    await bring_back(how, cluster, leader)
            assert len(run.finished) == 2 * REQUESTS
            assert not run.errors()
            assert run.mismatches() == 0
            assert (await check_stack(run.view, run.engines, with_disk=True)).differences == []
            assert run.stack.pids == before
            if how == "killed":
                assert max(stalls) < STALL_MAX_S, f"the index was silent for {max(stalls):.1f} s"
        finally:
            await bus.close()


def check_load() -> None:
    """Raise DeadlineExceeded on a machine where heartbeats and elections wait for a core."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > BUSY * cores:
        raise DeadlineExceeded(f"leases ended at a load of {load:.1f} on {cores} cores")


def key_of(event: RegistryEvent) -> list[str]:
    """The key of an entry that has left; of no other event."""
    return [event.record.key] if isinstance(event, Left) else []


def lose(how: str, cluster: NatsCluster, server: NatsServer) -> None:
    """A server of the cluster is no use any more."""
    if how == "killed":
        server.kill()
    elif how == "frozen":
        os.kill(server.pid, signal.SIGSTOP)
    else:
        cluster.cut_off(server)


async def bring_back(how: str, cluster: NatsCluster, server: NatsServer) -> None:
    """It is one of the cluster again."""
    if how == "killed":
        await server.start()
    elif how == "frozen":
        os.kill(server.pid, signal.SIGCONT)
    else:
        cluster.rejoin(server)


async def leader_of(bus: Bus, cluster: NatsCluster, stream: str) -> NatsServer:
    """The server that leads a stream, when there is one: for a moment none may."""

    async def name() -> str:
        return str((await describe(bus, stream))["cluster"].get("leader", ""))

    return cluster.led_by(await ask_until(name, despite=KvbmError))


async def one_leads(cluster: NatsCluster, servers: list[NatsServer], stream: str) -> None:
    """Wait until one of these servers leads a stream, by what one of them says.

    Raises TimeoutError. They elect after seconds without the old leader; the load may end sooner.
    """
    bus = await Bus.connect(servers[0].url, "look")

    async def elected() -> bool:
        leader = (await describe(bus, stream))["cluster"].get("leader")
        return leader in [server.name for server in servers]

    try:
        await ask_until(elected, deadline_s=2 * DEADLINE_S)
    finally:
        await bus.close()


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("how", ["killed", "frozen"])
async def test_the_leader_of_etcd_may_be_lost_during_the_load(how: str) -> None:
    """Goal: whoever is registered stays registered, in the same life.

    1. The whole stack is registered in an etcd of three. Its leader is lost during the load.
    2. It comes back. No request has failed, and all are there that were. An etcd from before
       3.4.31 ends leases when a leader that stood still goes on: who has left is back at once.
    """
    with tempfile.TemporaryDirectory(prefix="kvbm-etcd-", dir="/dev/shm") as directory:
        async with EtcdCluster(Path(directory)) as etcd:
            reader = EtcdRegistry(tuple(one.server for one in etcd.members), ttl_s=ETCD_TTL_S)
            registered = TIERS | {"registry_url": etcd.url, "registry_ttl_s": ETCD_TTL_S}
            try:
                async with running(registered) as run:
                    await run.run(requests=REQUESTS // 2)
                    before = {record.key: record.epoch for record in await reader.list()}
                    assert {key.split(".")[0] for key in before} >= {"index", "host-tier"}
                    left: list[str] = []
                    reader.watch(lambda event: left.extend(key_of(event)))
                    leader = await etcd.leader()
                    leader.kill() if how == "killed" else leader.freeze()
                    end_s = time.monotonic() + 3 * ETCD_TTL_S
                    while time.monotonic() < end_s:
                        await run.run(requests=20, prefix=f"away{time.monotonic()}")
                    listed = {record.key: record.epoch for record in await reader.list()}
                    if left or listed != before:
                        check_load()
                    assert listed == before, "without the old leader"
                    assert not left, "without the old leader"
                    if how == "killed":
                        await leader.start()
                    else:
                        leader.thaw()
                    await run.run(requests=REQUESTS // 2, prefix="back")
                    assert not run.errors()
                    assert run.mismatches() == 0
                    verdict = await check_stack(run.view, run.engines, with_disk=True)
                    assert verdict.differences == []

                    async def all_are_there() -> bool:
                        return {one.key: one.epoch for one in await reader.list()} == before

                    await ask_until(all_are_there, deadline_s=ETCD_TTL_S)
                    ends_leases = how == "frozen" and await leader.version() < LEASES_ARE_KEPT
                    assert ends_leases or not left
            finally:
                await reader.close()


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
