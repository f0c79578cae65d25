"""Several host tiers on one host: engines are shared out, and move while they work."""

from __future__ import annotations

import asyncio
import os
import signal
from functools import partial

import msgspec
import pytest
from kvbm_cli.demo.check import check_stack
from kvbm_cli.service_process import ServiceProcess
from kvbm_common.errors import KvbmError
from kvbm_common.tier.rendezvous import owner_of
from kvbm_common.wire.admin import DrainRequest
from kvbm_common.wire.verbs import StatsReply, verb_subject

from tests.integration.running import Running, running
from tests.waiting import ask_until, wait_until

TIERS = {
    "cpu_cache_gb": 0.2,
    "disk_cache_gb": 0.5,
    "disable_disk_offload_filter": True,
    "host_tiers": 2,
    "registry_ttl_s": 5.0,
}
DEADLINE_S = 40.0


async def stats(run: Running, instance: str) -> StatsReply:
    return await run.view.stats("host-tier", instance)


async def served(run: Running, *instances: str) -> dict[str, set[str]]:
    """Who serves which engines now."""
    return {
        instance: {worker.engine for worker in (await stats(run, instance)).workers}
        for instance in instances
    }


def shares(run: Running, *instances: str) -> dict[str, set[str]]:
    """Who should."""
    names = {instance: instance.encode() for instance in instances}
    engines = [engine.config.name for engine in run.engines]
    return {
        instance: {name for name in engines if owner_of(name.encode(), names) == instance}
        for instance in instances
    }


async def wait_shared_out(run: Running, *instances: str) -> None:
    """Until every engine is where the map says, and nowhere else."""
    await wait_served(run, shares(run, *instances))


async def wait_served(run: Running, wanted: dict[str, set[str]]) -> None:
    """Until these instances serve these engines, and no others."""
    found: object = None

    async def right() -> bool:
        nonlocal found
        try:
            found = await served(run, *wanted)
        except KvbmError as error:
            found = error
        return found == wanted

    try:
        await ask_until(right, deadline_s=DEADLINE_S, poll_s=0.05)
    except TimeoutError:
        raise AssertionError(f"{found} instead of {wanted}") from None


async def drain(run: Running, instance: str, verb: str) -> None:
    subject = verb_subject("host-tier", verb, host=run.stack.settings.host, instance=instance)
    await run.view.ask(subject, msgspec.json.encode(DrainRequest()))


def third(run: Running) -> ServiceProcess:
    """One more, as `docker compose up --scale` adds one."""
    settings = run.stack.settings
    assert run.stack.log_dir is not None
    process = ServiceProcess(
        "host-tier",
        environ=os.environ | settings.as_environ() | {"KVBM_INSTANCE": "2"},
        restart=False,
        log_path=run.stack.log_dir / "host-tier-2.log",
    )
    run.stack.services["host-tier-2"] = process
    return process


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_host_tiers_join_drain_leave_and_die_under_traffic() -> None:
    """Goal: no request is lost and no byte is wrong, whatever becomes of the host tiers.

    1. Two host tiers share four engines, which work all the time. 2. The second is killed with
       SIGKILL and started again; the first, which holds the well-known endpoint, then too.
    3. The first is drained, and takes again. 4. A third joins, and leaves by SIGTERM.
    5. After each of these every engine is where the newest map says, and only there.
    6. Every request has finished, without an error or a wrong block; the index agrees with
       every tier, and no lease is left.
    """
    async with running(TIERS, engines=4) as run:
        await wait_shared_out(run, "0", "1")
        assert all(shares(run, "0", "1").values())
        enough = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:  # A request that is lost ends it all.
            tasks.create_task(run.work(enough, requests=100, rounds=3))
            for victim in ("host-tier-1", "host-tier"):
                done = len(run.finished)
                await run.stack.kill(victim)
                await wait_until(partial(more_than, run, done), deadline_s=DEADLINE_S)
                await run.stack.start(victim)
                await run.stack.wait_ready(victim)
                await wait_shared_out(run, "0", "1")

            await drain(run, "0", "drain")
            everybody = {engine.config.name for engine in run.engines}
            await wait_served(run, {"0": set(), "1": everybody})
            await drain(run, "0", "undrain")
            await wait_shared_out(run, "0", "1")

            joining = third(run)
            joining.start()
            await joining.wait_ready(deadline_s=DEADLINE_S)
            await wait_shared_out(run, "0", "1", "2")
            await joining.end(signal.SIGTERM, deadline_s=DEADLINE_S)
            await wait_shared_out(run, "0", "1")

            enough.set()

        assert not run.errors()
        assert run.mismatches() == 0
        assert sum(finished.host_blocks for finished in run.finished) > 0
        verdict = await check_stack(run.view, run.engines, with_disk=True)
        assert verdict.differences == []
        assert verdict.leases_left == verdict.staged_left == 0


def more_than(run: Running, done: int) -> bool:
    return len(run.finished) > done
