"""A stack under load is replaced a service at a time by another version, and back again."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from kvbm_cli.demo.check import check_stack
from kvbm_cli.service_process import ServiceProcess
from kvbm_cli.stack import STOP_DEADLINE_S, environ_of
from kvbm_cli.stack_processes import processes_of
from kvbm_connectors.sim.driver import EngineHandle

from tests.integration.running import Running, running
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
PREVIOUS = os.environ.get("KVBM_UPGRADE_FROM", "24a352de657f18f5f2067ef13e37d35fa60c7f7a")
"""The version before: a tag or commit of this repository."""
PACKAGES = (
    "libs/kvbm_common", "libs/kvbm_cli", "services/index", "services/host_tier",
    "services/disk_tier", "services/metrics", "connectors",
)  # fmt: skip
TIERS = {"cpu_cache_gb": 0.1, "disk_cache_gb": 3.0, "disable_disk_offload_filter": True}
"""A disk with room for all blocks of all rounds: it evicts none of those that it had."""
ORDERS = {
    "readers first": ("index", "metrics", "host-tier", "disk-tier", "consolidator"),
    "writers first": ("consolidator", "disk-tier", "host-tier", "metrics", "index"),
}
BETWEEN = 20
"""Requests that finish between two replacements."""


@pytest.fixture(scope="module")
def previous(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The version before, as a search path for modules; skips the test where git has it not."""
    tree = tmp_path_factory.mktemp("previous")
    archive = subprocess.run(
        ["git", "-C", str(ROOT), "archive", PREVIOUS, *PACKAGES], capture_output=True, timeout=60
    )
    if archive.returncode:
        pytest.skip(f"git has no {PREVIOUS}: {archive.stderr.decode(errors='replace').strip()}")
    subprocess.run(["tar", "-x", "-C", str(tree)], input=archive.stdout, check=True, timeout=60)
    path = os.pathsep.join(str(tree / package) for package in PACKAGES)
    found = subprocess.run(
        [sys.executable, "-c", "import kvbm_common; print(kvbm_common.__file__)"],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert found.stdout.startswith(str(tree)), "another tree is imported"
    return path


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("back", [False, True], ids=["upgrade", "rollback"])
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS.keys())
async def test_services_are_replaced_one_by_one_under_load(
    order: Sequence[str], back: bool, previous: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: whoever upgrades, or goes back, loses no request and no block that is on disk.

    1. All services and engines are of one version; engines work all the time.
    2. One service after the other ends and is started with the other version.
    3. No request has failed or got a wrong block, the index agrees with every tier and engine, and
       the disk tier has what it had.
    4. The engines, too, are replaced. The same holds, and blocks come from disk.
    """
    first, second = ("", previous) if back else (previous, "")
    import_from(first, monkeypatch)
    async with running(TIERS) as run:
        done = asyncio.Event()
        work = asyncio.create_task(run.work(done))
        await finish(run, BETWEEN, work)
        import_from(second, monkeypatch)
        for kind in order:
            await replace(run, kind)
            await finish(run, BETWEEN, work)
        done.set()
        await work
        await assert_whole(run)
        on_disk = await stored_on_disk(run)
        for number, engine in enumerate(run.engines):
            await engine.stop()
            run.engines[number] = EngineHandle(engine.config)
        try:
            assert all([await engine.start() for engine in run.engines])
            await run.until_hit("host", "disk")
            await assert_whole(run)
            assert await stored_on_disk(run) >= on_disk
        finally:
            for engine in run.engines:
                await engine.stop()


def import_from(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have processes that start from now on import our modules from there; "" is this tree."""
    if path:
        monkeypatch.setenv("PYTHONPATH", path)
    else:
        monkeypatch.delenv("PYTHONPATH", raising=False)


async def replace(run: Running, kind: str) -> None:
    """End a service in order, and start it with the version that is imported now."""
    stack = run.stack
    await stack.services[kind].end(signal.SIGTERM, deadline_s=STOP_DEADLINE_S)
    [own] = processes_of(kind, stack.settings).values()
    assert stack.log_dir is not None
    stack.services[kind] = ServiceProcess(
        kind,
        environ=environ_of(kind, stack.settings) | own,
        restart=False,
        log_path=stack.log_dir / f"{kind}.log",
    )
    await stack.start(kind)
    await stack.wait_ready(kind)


async def finish(run: Running, count: int, work: asyncio.Task[None]) -> None:
    """Wait until so many more requests have finished."""
    wanted = len(run.finished) + count
    await wait_until(lambda: len(run.finished) >= wanted or work.done(), deadline_s=60)
    assert len(run.finished) >= wanted, work


async def assert_whole(run: Running) -> None:
    """No request has failed, no block was wrong, and all views agree."""
    assert not run.errors()
    assert run.mismatches() == 0
    assert (await check_stack(run.view, run.engines, with_disk=True)).differences == []


async def stored_on_disk(run: Running) -> set[str]:
    """The blocks that the disk tier holds."""
    snapshot = await run.view.snapshot("disk-tier")
    return {name for part in snapshot.parts for one in part.runs for name in one.hashes}
