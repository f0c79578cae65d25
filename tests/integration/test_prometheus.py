"""Debian's Prometheus over a whole stack: panels have figures, alerts are well, fire and rest."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from kvbm_common.runtime.processes import free_port

from tests.integration.running import Running, running
from tests.waiting import ask_until

ROOT = Path(__file__).parents[2]
RULES = ROOT / "compose/prometheus/alerts.yml"
UNIT_TESTS = Path(__file__).with_name("alerts.test.yml")
DASHBOARD = json.loads((ROOT / "compose/grafana/dashboards/kvbm.json").read_text())
ALERTS = {
    rule["alert"]: rule["expr"] for rule in yaml.safe_load(RULES.read_text())["groups"][0]["rules"]
}
OPERATING = (ROOT / "docs/operating.md").read_text()
TIERS = {"cpu_cache_gb": 0.02, "disk_cache_gb": 0.1, "disable_disk_offload_filter": True}
DEADLINE_S = 60.0

NEEDS = {
    "kvbm_disk_troubles_total": "a disk that has failed",
    "kvbm_event_horizon_seconds": "an event stream that has forgotten",
    "kvbm_dropped_total": "work that was given up",
    'kvbm_missed_blocks_total{reason=~"not_remembered': "a miss that is not explained",
}
"""Series that begin with the first thing that they count."""

needs_prometheus = pytest.mark.skipif(
    not (shutil.which("prometheus") and shutil.which("promtool")),
    reason="no prometheus and promtool on this machine (Debian: apt-get install prometheus)",
)


class Prometheus:
    """One that runs."""

    def __init__(self, port: int) -> None:
        self._client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}/api/v1")

    async def close(self) -> None:
        """No more questions."""
        await self._client.aclose()

    async def get(self, path: str, **parameters: str) -> Any:
        """The data of an answer; None where it does not answer yet."""
        try:
            answer = await self._client.get(path, params=parameters)
        except httpx.TransportError:
            return None
        assert answer.status_code in (200, 503), answer.text
        return answer.json()["data"] if answer.status_code == 200 else None

    async def values(self, question: str) -> list[float]:
        """What a question finds now."""
        data = await self.get("/query", query=question)
        return [float(one["value"][1]) for one in data["result"]] if data else []

    async def wait(self, question: str) -> list[float]:
        """Its series, as soon as one of them is a number; what there is at the deadline."""
        values: list[float] = []

        async def is_number() -> bool:
            values[:] = await self.values(question)
            return any(value == value for value in values)

        with contextlib.suppress(TimeoutError):
            await ask_until(is_number, poll_s=0.5)
        return values


@asynccontextmanager
async def prometheus(target: str, folder: Path) -> AsyncIterator[Prometheus]:
    """Scrapes `target` once a second, with our rules."""
    config = folder / "prometheus.yml"
    said = yaml.safe_load((ROOT / "compose/prometheus/prometheus.yml").read_text())
    said["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    said["rule_files"] = [str(RULES)]
    del said["scrape_configs"][0]["authorization"]  # On loopback figures need no token.
    said["scrape_configs"][0]["static_configs"] = [{"targets": [target]}]
    config.write_text(yaml.safe_dump(said))
    port = free_port()
    with (folder / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            "prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}", stdout=log, stderr=log,
        )  # fmt: skip
    asked = Prometheus(port)
    try:

        async def scrapes() -> bool:
            assert process.returncode is None, (folder / "log").read_text()
            return await asked.values('up{job="kvbm"} == 1') != []

        await ask_until(scrapes, deadline_s=DEADLINE_S, poll_s=0.2)
        yield asked
    finally:
        await asked.close()
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def match(run: Running, done: asyncio.Event) -> None:
    """The index is asked until it is enough."""
    url = f"http://127.0.0.1:{run.stack.settings.metrics_port}"
    async with httpx.AsyncClient(base_url=url) as client:
        while not done.is_set():
            body = {"hashes": ["0" * 32]}
            assert (await client.post("/v1/match", json=body)).status_code == 200
            await asyncio.sleep(0.5)


async def check_figures(asked: Prometheus) -> None:
    """Each question of panels and alerts finds numbers, or its series needs something else."""
    panels = [
        one["expr"].replace("$host", ".*")  # As when all hosts are chosen.
        for panel in DASHBOARD["panels"]
        for one in panel["targets"]
    ]
    bare = [re.sub(r"\s*(==|>|<)\s*\d+$", "", expr) for expr in ALERTS.values()]
    assert not set(bare) & set(ALERTS.values())
    for question in [*panels, *bare]:
        if needed(question):
            assert await asked.get("/query", query=question) is not None
            continue
        values = await asked.wait(question)
        assert any(value == value for value in values), f"{question}: {values}"


def needed(question: str) -> str:
    """Why a question may find nothing; empty: it must find something."""
    return next((why for name, why in NEEDS.items() if name in question), "")


@pytest.mark.slow
@needs_prometheus
@pytest.mark.timeout(240)
async def test_every_panel_and_alert_has_its_figures(tmp_path: Path) -> None:
    """1. Each question of the dashboard finds numbers, or its series needs what has not happened.

    2. So does each alert's, without its threshold. 3. All rules are well, none fires.
    """
    async with running(TIERS | {"admin_open": "admin"}, engines=1) as run:
        target = f"127.0.0.1:{run.stack.settings.metrics_port}"
        done = asyncio.Event()
        async with prometheus(target, tmp_path) as asked, asyncio.TaskGroup() as tasks:
            tasks.create_task(run.work(done))
            tasks.create_task(match(run, done))
            try:
                await check_figures(asked)
            finally:
                done.set()
            rules = (await asked.get("/rules"))["groups"][0]["rules"]
            assert {rule["name"]: rule["health"] for rule in rules} == dict.fromkeys(ALERTS, "ok")
            assert await asked.values('ALERTS{alertstate="firing"}') == []


@pytest.mark.slow
@needs_prometheus
def test_alerts_fire_when_they_must() -> None:
    """promtool runs the rules over made-up series."""
    done = subprocess.run(
        ["promtool", "test", "rules", str(UNIT_TESTS)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


@needs_prometheus
def test_the_files_are_well() -> None:
    """promtool reads the rules as Prometheus does."""
    done = subprocess.run(
        ["promtool", "check", "rules", str(RULES)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_is_tried_and_explained() -> None:
    """Each has a case in which it fires, one in which it rests, and a line in the document."""
    cases = [case for one in yaml.safe_load(UNIT_TESTS.read_text())["tests"]
             for case in one["alert_rule_test"]]  # fmt: skip
    fires = {case["alertname"] for case in cases if case.get("exp_alerts")}
    rests = {case["alertname"] for case in cases if not case.get("exp_alerts")}
    assert fires == rests == set(ALERTS)
    for alert in ALERTS:
        assert re.search(rf"^\| `{alert}` \|", OPERATING, re.M), alert
