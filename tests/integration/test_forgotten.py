"""A machine that is forgotten and comes back: it was cut off for longer than NATS waits for it."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest
from kvbm_cli.demo.check import check_stack
from kvbm_common.nats.embedded_server import NatsServer

from tests.integration.running import running
from tests.waiting import ask_until

TTL_S = 2.0
SETTINGS = {
    "cpu_cache_gb": 0.05, "disk_cache_gb": 0.2, "disable_disk_offload_filter": True,
    "registry_ttl_s": TTL_S, "admin_open": "admin",
}  # fmt: skip
IMPATIENT = {"ping_interval": "1s", "ping_max": 1}
"""A server that drops a client which does not answer for two seconds; as shipped after minutes."""
DEADLINE_S = 40.0


async def status(client: httpx.AsyncClient) -> dict[str, Any]:
    """Return what `kvbm status` asks for."""
    said: dict[str, Any] = (await client.get("/v1/status")).json()
    return said


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "stopped", [("host-tier", "disk-tier", "consolidator"), ("host-tier", "disk-tier")]
)
async def test_a_machine_that_was_forgotten_is_whole_again_when_it_comes_back(
    tmp_path: Path, stopped: tuple[str, ...]
) -> None:
    """Goal: `kvbm forget` of a machine that was only cut off costs nothing but the time until then.

    1. Engines fill the tiers. 2. The tiers are stopped until NATS has dropped them, and forgotten;
    engines work on. 3. The tiers go on: they are registered, the index has their blocks again, and
    blocks are served. Nothing was started again.
    """
    async with (
        NatsServer(tmp_path / "nats", more=IMPATIENT) as server,
        running(SETTINGS, engines=1, nats_url=server.url) as run,
    ):
        await run.run(requests=30)
        url = run.stack.services["metrics"].description
        before = run.stack.pids
        async with httpx.AsyncClient(base_url=url, timeout=20) as client:
            await ask_until(lambda: whole(client), deadline_s=DEADLINE_S)
            for name in stopped:
                os.kill(before[name], signal.SIGSTOP)
            try:
                host, count = run.stack.settings.host, 0
                async with asyncio.timeout(DEADLINE_S):
                    while count < len(stopped):
                        count += await ask_until(lambda: forget(client, host))
                assert (await status(client))["gone"] == []
                await run.run(requests=10, seed=2, prefix="away")
            finally:
                for name in stopped:
                    os.kill(before[name], signal.SIGCONT)
            await ask_until(lambda: whole(client), deadline_s=DEADLINE_S)
        verdict = await check_stack(run.view, run.engines, with_disk=True)
        assert verdict.differences == []
        await run.until_hit("host", "disk")
        assert run.stack.pids == before
        assert run.mismatches() == 0


async def whole(client: httpx.AsyncClient) -> bool:
    """Tell whether every service is there and ready, and none is remembered as gone."""
    said = await status(client)
    return bool(said["ready"]) and not said["gone"]


async def forget(client: httpx.AsyncClient, host: str) -> int:
    """Forget the lost services of a host; return how many, 0 where it is refused."""
    said = await client.post("/v1/forget", json={"lost_host": host})
    return sum(one["reply"].get("forgotten", 0) for one in said.json()["outcomes"])
