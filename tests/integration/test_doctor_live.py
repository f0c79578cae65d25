"""The command `kvbm doctor --live` over a stack at work: well, then with what it must notice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from kvbm_cli.demo.check import wait_until
from kvbm_common.wire.bounds import BOUNDS

from tests.integration.running import Running, running

TIERS = {"cpu_cache_gb": 0.02, "disk_cache_gb": 0.1, "disable_disk_offload_filter": True}
EVERY = {"memory", "descriptors"}
EXPECTED = {
    "host-tier": EVERY
    | {"inbox", "outbox", "outbox_bytes", "departures", "departures_disk", "departures_object"}
    | {
        "first_blocks",
        "former_blocks",
        "explanations",
        "open_explanations",
        "offers",
        "lookups",
        "pinned",
    }
    | {"hinted", "awaited_demotions", "known_runs", "diary"},
    "disk-tier": EVERY
    | {"inbox", "outbox", "outbox_bytes", "departures", "pinned", "waiting_writes"}
    | {"waiting_reads", "sights", "journal", "diary"},
    "index": EVERY | {"inbox", "sources", "buffered_events", "event_stream"},
    "consolidator": EVERY
    | {"inbox", "outbox", "outbox_bytes", "consolidated_outbox", "streams", "pending_batches"}
    | {"orphan_blocks"},
    "metrics": EVERY | {"gone_services", "jobs"},
}
"""The bounds of each service."""
HISTORY_ENTRIES = 5_000
CHOSEN = {"departures", "departures_disk", "departures_object", "first_blocks"}
"""The histories that KVBM_HISTORY_ENTRIES sizes."""


def doctor(run: Running, *options: str) -> tuple[int, list[dict[str, str]]]:
    """Exit code and findings of the command, as a user runs it."""
    ours = ("KVBM_", "DYN_KVBM_")
    clean = {name: text for name, text in os.environ.items() if not name.startswith(ours)}
    done = subprocess.run(
        [sys.executable, "-m", "kvbm_cli.main", "doctor", "--live", "--json", *options],
        env=clean | run.stack.settings.as_environ(), capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_a_stack_at_work_is_well_and_its_bounds_are_all_looked_at() -> None:
    """1. Engines fill the tiers. 2. Each service shows each of its bounds, and none is beyond its
    size; histories have the chosen one. 3. The doctor finds nothing, and says what it looked at."""
    settings = TIERS | {"admin_open": "read", "history_entries": HISTORY_ENTRIES}
    async with running(settings, engines=1) as run:
        await run.run(requests=40)
        told = await _bounds(run)
        for one in told:
            assert {bound["bound"] for bound in one["bounds"]} == EXPECTED[one["service"]], one
            assert all(bound["used"] <= bound["size"] for bound in one["bounds"]), one
            sizes = {bound["size"] for bound in one["bounds"] if bound["bound"] in CHOSEN}
            assert sizes <= {HISTORY_ENTRIES}, one
        assert {bound["bound"] for one in told for bound in one["bounds"]} == BOUNDS.keys()
        code, findings = doctor(run)
        count = sum(len(one["bounds"]) for one in told)
        assert (code, [finding["level"] for finding in findings]) == (0, ["ok"]), findings
        assert findings[0]["found"].startswith(f"{count} bounds of 5 services on 1 hosts")


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_a_worn_history_is_found_on_a_running_stack() -> None:
    """1. Eight explanations are kept. 2. Many more lookups come. 3. The doctor says how far back
    they reach, and which setting keeps more."""
    async with running(TIERS | {"explain_requests": 8, "admin_open": "read"}, engines=1) as run:
        await run.run(requests=40)
        code, findings = doctor(run)
    (finding,) = (one for one in findings if "explained lookups" in one["found"])
    assert "100% full, reaches back" in finding["found"]
    assert finding["advice"] == "Raise KVBM_EXPLAIN_REQUESTS."
    assert code == (1 if finding["level"] == "wrong" else 0)


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_a_service_that_is_killed_is_found() -> None:
    """1. The disk tier is killed. 2. It is wrong while the registry still names it, for a minute
    here: doctor may take longer than the usual five seconds to start."""
    settings = TIERS | {"admin_open": "read", "registry_ttl_s": 60.0}
    async with running(settings, engines=1) as run:
        await run.stack.kill("disk-tier")

        async def is_away() -> bool:
            return any(not one["answers"] for one in await _bounds(run))

        await wait_until(is_away, "the disk tier still answers")
        code, findings = doctor(run)
    assert code == 1
    assert any(one["check"].startswith("disk-tier 0 of ") for one in findings), findings


async def _bounds(run: Running) -> list[dict[str, Any]]:
    url = f"http://127.0.0.1:{run.stack.settings.metrics_port}"
    async with httpx.AsyncClient(base_url=url, timeout=10) as client:
        answer = await client.get("/v1/bounds")
    assert answer.status_code == 200, answer.text
    return list(answer.json())


@pytest.mark.slow
def test_a_line_without_a_service_ends_with_one(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvbm_cli.main", "doctor", "--live", "--url=http://127.0.0.1:1"],
        capture_output=True, text=True, timeout=60, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.startswith("kvbm: api_away: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("options", [["--url=http://127.0.0.1:1"], ["--live", "--url=foo"]])
def test_a_wrong_line_ends_with_two(options: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvbm_cli.main", "doctor", *options],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, "--url" in done.stderr) == (2, True)
