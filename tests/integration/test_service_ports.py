"""Every service of a stack on a port of its own: readers that are not ours read each page."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import httpx
import pytest
from kvbm_cli.stack import SERVICES, Stack
from kvbm_common.runtime.processes import free_port
from prometheus_client.parser import text_string_to_metric_families

OURS = {"service", "host", "instance", "exported_service"}
OF_THE_FLEET = "kvbm_tier_"
"""What the metrics service makes of the verb `stats`."""
Known = dict[str, tuple[str, str, set[frozenset[str]]]]
"""By name: type, help, and the sets of label names."""


def known(text: str, service: str = "") -> Known:
    """The metrics of a page, of one service only if it is named."""
    found: Known = {}
    for family in text_string_to_metric_families(text):
        labels = {
            frozenset(one.labels.keys() - OURS)
            for one in family.samples
            if not service or one.labels.get("service") == service
        }
        if labels and not family.name.startswith(OF_THE_FLEET):
            found[family.name] = family.type, family.documentation, labels
    return found


def series(text: str) -> Counter[str]:
    """How often each series stands in a page, by its name and labels."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return Counter(line.rpartition(" ")[0] for line in lines)


def starts_warned_of(logs: Path) -> list[str]:
    """The warnings about services that had not yet started: every start has such a moment."""
    lines = [line for log in logs.glob("*.log") for line in log.read_text().splitlines()]
    return [
        line for line in lines if " WARNING " in line and re.search("no_responder|not_ready", line)
    ]


def check_with_promtool(text: str) -> None:
    """It ends with 1 for what it cannot read; with 3 for names that it would not have chosen."""
    if shutil.which("promtool"):
        done = subprocess.run(
            ["promtool", "check", "metrics"], input=text, capture_output=True, text=True, timeout=60
        )
        assert done.returncode in (0, 3), done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_every_service_answers_on_a_port_of_its_own() -> None:
    """Goal: alive, ready, and the same metrics as the fleet's page has of it."""
    base = free_port(also_above=len(SERVICES))
    sizes = {"cpu_cache_gb": 0.05, "disk_cache_gb": 0.05}
    async with Stack.private(sizes | {"service_port": base}) as stack, httpx.AsyncClient(
        trust_env=False, timeout=10.0
    ) as client:  # fmt: skip
        assert stack.log_dir is not None
        assert starts_warned_of(stack.log_dir) == []
        fleet = (await client.get(f"{stack.services['metrics'].description}/metrics")).text
        for number, kind in enumerate(stack.services):
            url = f"http://127.0.0.1:{base + number}"
            assert (await client.get(f"{url}/healthz")).status_code == 200
            assert (await client.get(f"{url}/readyz")).json() == {"ready": True, "reasons": []}
            text = (await client.get(f"{url}/metrics")).text
            await asyncio.to_thread(check_with_promtool, text)
            assert [name for name, count in series(text).items() if count > 1] == [], kind
            own, theirs = known(text), known(fleet, kind)
            assert own, kind
            for name, (type_, help_, labels) in theirs.items():
                assert own[name][:2] == (type_, help_), name
                assert labels <= own[name][2], name
            assert not {name for name in own if not name.startswith("kvbm_")}
