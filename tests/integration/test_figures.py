"""The metrics service beside a working stack: ready, true, and every figure explained."""

from __future__ import annotations

import httpx
import pytest
from kvbm_cli.demo.check import wait_until
from prometheus_client.parser import text_string_to_metric_families

from tests.integration.running import running
from tests.test_documents import documented_metrics

KVBM_NAMES = {
    "kvbm_matched_tokens", "kvbm_offload_blocks_d2h", "kvbm_offload_blocks_h2d",
    "kvbm_offload_blocks_d2d", "kvbm_onboard_blocks_h2d", "kvbm_onboard_blocks_d2d",
    "kvbm_host_cache_hit_rate", "kvbm_disk_cache_hit_rate",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_figures_of_a_working_stack() -> None:
    """Goal: engines at work make nobody unready; KVBM's names are exact; all are explained."""
    async with running({"cpu_cache_gb": 0.1, "disk_cache_gb": 0.5, "admin_open": "read"}) as run:
        await run.run(requests=30)
        for engine in run.engines:
            await wait_until(engine.reset, "the engine is not idle")
        await run.run(requests=30, prefix="again")
        base_url = f"http://127.0.0.1:{run.stack.settings.metrics_port}"
        async with httpx.AsyncClient(base_url=base_url, timeout=10) as client:

            async def all_seen() -> bool:
                text = (await client.get("/metrics")).text
                return "\nkvbm_onboard_blocks_h2d 0.0" not in text

            await wait_until(all_seen, "the metrics service has not seen the onboards")
            ready = await client.get("/readyz")
            text = (await client.get("/metrics")).text
            workers = (await client.get("/v1/workers")).json()
    assert (ready.status_code, ready.json()["reasons"]) == (200, [])
    assert {worker["engine"] for worker in workers} == {"sim-0", "sim-1"}
    assert {line.split(" ")[0].split("{")[0] for line in text.splitlines()} >= KVBM_NAMES
    known = documented_metrics()
    families = {family.name for family in text_string_to_metric_families(text)}
    assert not {name for name in families if not {name, f"{name}_total"} & known}
