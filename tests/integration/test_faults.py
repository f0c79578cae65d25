"""kill -9 of each service while engines work: nothing wrong is served, and all converges."""

from __future__ import annotations

import asyncio
import itertools
import time
from functools import partial
from pathlib import Path

import pytest
from kvbm_cli.demo.check import check_stack
from kvbm_common.registry.etcd import EtcdRegistry
from kvbm_common.registry.records import ENGINE, Left, RegistryEvent

from tests.etcd_server import EtcdServer
from tests.integration.running import HIT_DEADLINE_S, Running, running
from tests.waiting import ask_until, wait_until

TIERS = {"cpu_cache_gb": 0.1, "disk_cache_gb": 0.5, "disable_disk_offload_filter": True}
REQUESTS_PER_FAULT = 80
TTL_S = 2.0
"""Of the registry on etcd."""


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_every_service_may_be_killed_during_the_load() -> None:
    """Goal: losing a service loses at most cached blocks.

    1. Engines work all the time. After each 80 requests one service is killed with SIGKILL and
       started again while the requests go on.
    2. Every request has finished, none with an error, none with a wrong block.
    3. At the end no lease is left and the index agrees with every tier and engine.
    4. After that the cache still works: the same requests hit again.
    """
    victims = ("host-tier", "disk-tier", "index", "consolidator", "nats")
    async with running(TIERS) as run, asyncio.TaskGroup() as faults:

        async def fail(kind: str) -> None:
            await run.stack.kill(kind)
            await run.stack.start(kind)
            await run.stack.wait_ready(kind)

        def strike(kind: str) -> None:
            faults.create_task(fail(kind), name=f"kill {kind}")

        for number, kind in enumerate(victims):
            run.on_count[40 + number * REQUESTS_PER_FAULT] = partial(strike, kind)
        await run.run(requests=REQUESTS_PER_FAULT * len(victims))

        assert len(run.finished) == REQUESTS_PER_FAULT * len(victims)
        assert not run.errors()
        assert run.mismatches() == 0
        verdict = await check_stack(run.view, run.engines, with_disk=True)
        assert verdict.differences == []
        assert verdict.leases_left == verdict.staged_left == 0

        run.on_count.clear()
        await run.until_hit("host", "disk")
        assert run.mismatches() == 0


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_etcd_may_forget_everybody_during_the_load(etcd_server: EtcdServer) -> None:
    """Goal: the registry's outage is nobody's death.

    1. The whole stack is registered in etcd. etcd is killed, and the index too; engines work for
       three times the time to live. Then etcd comes back, and knows nothing.
    2. Every request has finished, none with an error, none with a wrong block.
    3. A reader has seen nobody leave but the index. All are registered again, in the same lives;
       the index lives a later one.
    """
    overrides = TIERS | {"registry_url": f"etcd://{etcd_server.server}", "registry_ttl_s": TTL_S}
    reader = EtcdRegistry((etcd_server.server,), ttl_s=TTL_S)
    epochs: dict[str, int] = {}
    left: set[str] = set()

    def note(event: RegistryEvent) -> None:
        if isinstance(event, Left):
            left.add(event.record.kind)
        else:
            epochs[event.record.key] = event.record.epoch

    reader.watch(note)
    async with running(overrides) as run:
        await run.run(requests=40)
        before = {record.key: record.epoch for record in await reader.list()}
        assert {key.split(".")[0] for key in before} >= {"index", "host-tier", "disk-tier", ENGINE}
        (index,) = (key for key in before if key.startswith("index."))

        etcd_server.kill()
        etcd_server.empty()
        await run.stack.kill("index")
        await run.stack.start("index")
        end_s = time.monotonic() + 3 * TTL_S
        while time.monotonic() < end_s:
            await run.run(requests=20, prefix=f"away{time.monotonic()}")
        await etcd_server.start()
        await run.stack.wait_ready("index")
        await run.run(requests=40, prefix="back")

        assert not run.errors()
        assert run.mismatches() == 0
        verdict = await check_stack(run.view, run.engines, with_disk=True)
        assert verdict.differences == []
        await wait_until(lambda: epochs[index] > before[index])
        assert epochs == before | {index: epochs[index]}
        assert left <= {"index"}
        assert {record.key for record in await reader.list()} == before.keys()
    await reader.close()


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_of_two_disks_one_may_be_lost(tmp_path: Path) -> None:
    """Goal: blocks are spread over the disks, and a lost disk loses only its own.

    1. With two directories, each block is on exactly one disk, and both have many.
    2. One disk tier is killed: its blocks are misses, the other one's are hits, no request fails,
       and the other one takes all new blocks.
    3. It returns, with every block that it had.
    """
    directories = f"{tmp_path / 'd1'},{tmp_path / 'd2'}"
    async with running(TIERS | {"cpu_cache_gb": 0.03, "disk_cache_dirs": directories}) as run:
        await until_both_have_many(run)
        assert (await check_stack(run.view, run.engines, with_disk=True)).differences == []
        first, second = await disk_blocks(run, "0"), await disk_blocks(run, "0-1")
        assert not first & second

        await run.stack.kill("disk-tier-1")
        await run.run(requests=60, seed=2, prefix="one disk")
        assert not run.errors()
        assert run.mismatches() == 0

        async def has_more() -> bool:
            return len(await disk_blocks(run, "0")) > len(first)

        await ask_until(has_more)

        await run.stack.start("disk-tier-1")
        await run.stack.wait_ready("disk-tier-1")
        assert await disk_blocks(run, "0-1") >= second
        await run.until_hit("disk")
        assert run.mismatches() == 0
        assert (await check_stack(run.view, run.engines, with_disk=True)).differences == []


async def until_both_have_many(run: Running) -> None:
    """Rounds of requests until each disk tier has a third of the blocks; raises TimeoutError.

    A disk that is slower loses more of a small arena's blocks, which leave it too soon.
    """
    async with asyncio.timeout(HIT_DEADLINE_S):
        for turn in itertools.count(1):
            await run.run(requests=100, seed=turn, prefix=f"both{turn}-")
            first, second = await disk_blocks(run, "0"), await disk_blocks(run, "0-1")
            if min(len(first), len(second)) > 0.3 * len(first | second):
                return


async def disk_blocks(run: Running, instance: str) -> set[str]:
    """What a disk tier holds by its own account."""
    snapshot = await run.view.snapshot("disk-tier", instance)
    return {name for part in snapshot.parts for group in part.runs for name in group.hashes}


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_a_killed_engine_leaves_nothing_behind() -> None:
    """Goal: an engine's death ends its leases and its blocks leave the index.

    1. Two engines work; one is killed with SIGKILL in the middle.
    2. Its leases are taken back, the index forgets its blocks, the other one goes on.
    """
    async with running(TIERS | {"registry_ttl_s": 5}) as run:
        await run.run(requests=40)
        dead = run.engines.pop()
        await dead.kill()
        verdict = await check_stack(run.view, run.engines, with_disk=True)
        assert verdict.differences == []
        assert verdict.leases_left == 0
        await run.run(requests=20, seed=3, prefix="after")
        assert run.mismatches() == 0
        await dead.stop()
