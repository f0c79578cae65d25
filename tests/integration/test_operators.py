"""What operators type and send, against a whole stack with an engine at work."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from kvbm_common.nats.bus import Bus
from kvbm_common.wire.verbs import SnapshotReply, verb_subject

from tests.integration.running import Running, running
from tests.waiting import ask_until

KVBM = Path(sys.executable).parent / "kvbm"
TOKEN = "an-operators-token"
TIERS = {"cpu_cache_gb": 0.1, "disk_cache_gb": 0.5, "disable_disk_offload_filter": True}


@pytest.fixture
async def stack() -> AsyncIterator[Running]:
    """A stack that wants a token, and has blocks in host memory and on disk."""
    async with running(TIERS | {"admin_token": TOKEN}, engines=1) as run:
        await run.run(requests=10)
        yield run


class Operator:
    """Types commands."""

    def __init__(self, run: Running) -> None:
        self._environ = os.environ | run.stack.settings.as_environ()

    async def says(self, *arguments: str, code: int = 0, **environ: str) -> str:
        """What a command prints when it ends with this code."""
        process = await asyncio.create_subprocess_exec(
            str(KVBM), *arguments, env=self._environ | environ,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        output, errors = await process.communicate()
        assert process.returncode == code, errors.decode()
        return output.decode() + errors.decode()

    async def reads(self, *arguments: str, code: int = 0) -> Any:
        """The same as JSON."""
        return json.loads(await self.says(*arguments, "--json", code=code))


async def is_ready(run: Running) -> bool:
    """Whether everything serves: `kvbm status` ends with 1 until then."""
    url = f"http://127.0.0.1:{run.stack.settings.metrics_port}/readyz"
    async with httpx.AsyncClient(trust_env=False, timeout=5.0) as client:
        return (await client.get(url)).status_code == 200


async def on_disk(run: Running) -> list[str]:
    """The longest run that the disk tier has, when it has one."""
    subject = verb_subject("disk-tier", "snapshot", host=run.stack.settings.host, instance="0")
    bus = await Bus.connect(run.stack.admin, "test")
    try:

        async def longest() -> list[str] | None:
            payload = await bus.request(subject, b'{"source": "disk-tier-0"}', deadline_s=5.0)
            reply = msgspec.json.decode(payload, type=SnapshotReply)
            runs = [one.hashes for part in reply.parts for one in part.runs]
            found = max(runs, key=len, default=[])
            return found if len(found) > 1 else None

        return await ask_until(longest, deadline_s=20, poll_s=0.05)
    finally:
        await bus.close()


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_an_operators_day(stack: Running) -> None:
    """1. Look. 2. Pin a block, empty host memory around it. 3. Bring a run back from disk.

    4. Drain, undrain, log level. 5. Empty everything. 6. All of it is in the audit.
    """
    operator = Operator(stack)
    await ask_until(partial(is_ready, stack), deadline_s=30)
    for command in ("status", "services", "tiers", "workers", "pins", "audit", "jobs"):
        assert await operator.says(command)
        assert await operator.reads(command) is not None
    assert {one["tier"] for one in await operator.reads("tiers")} == {"host", "disk"}
    names = await on_disk(stack)
    block = await operator.reads("block", names[0])
    assert {tier["tier"] for tier in block["tiers"]} >= {"disk"}
    assert "committed" in await operator.says("block", names[0])

    await operator.reads("prefetch", *names)
    assert (await operator.reads("block", names[0][:20]))["hash"] == names[0]
    [pinned] = (await operator.reads("pin", names[0][:20], "--tier", "host"))["outcomes"]
    assert pinned["reply"]["pinned"] == 1
    evicted = await operator.reads("evict", "--tier", "host", "--everything", "--yes")
    assert evicted["state"] == "done"
    assert evicted["progress"]["kept"] >= 1
    back = await operator.reads("prefetch", *names)
    assert back["progress"] == {"blocks": len(names), "filled": len(names) - 1}

    host = stack.stack.settings.host
    pin = str(pinned["reply"]["pin"])
    assert "ended=yes" in await operator.says("unpin", pin, "--tier", "host", "--host", host)
    for command in ("drain", "undrain"):
        [drained] = (await operator.reads(command, "--tier", "disk"))["outcomes"]
        assert drained["reply"]["draining"] is (command == "drain")
    [filtered] = (await operator.reads("filter", "--tier", "disk", "--on", "--pass-count", "4"))[
        "outcomes"
    ]
    assert filtered["reply"]["pass_count"] == 4
    policies = (await operator.reads("policy", "lfu", "--tier", "all"))["outcomes"]
    assert [one["reply"]["was"] for one in policies] == ["lru", "lru"]
    assert {one["policy"] for one in await operator.reads("tiers")} == {"lfu"}
    smaller = await operator.reads("resize", "10", "--tier", "disk")
    assert (smaller["state"], smaller["progress"]["slots"]) == ("done", 10)
    assert "slots=10" in await operator.says("audit")
    [disk] = [one for one in await operator.reads("tiers") if one["tier"] == "disk"]
    assert disk["slots"]["total"] == 10
    refused = str(await operator.reads("resize", "99999999", "--tier", "disk", code=1))
    assert refused.count("bad_size") == 1
    levels = (await operator.reads("loglevel", "warning"))["outcomes"]
    assert {one["kind"] for one in levels} == {
        "index", "host-tier", "disk-tier", "metrics", "consolidator",
    }  # fmt: skip
    await operator.reads("reset", "--tier", "all", "--everything", "--yes")
    assert await operator.reads("block", names[-1])
    verbs = [one["verb"] for one in (await operator.reads("audit", "--last", "1000"))["entries"]]
    assert {"pin", "unpin", "evict", "reset", "prefetch", "drain", "log_level", "resize", "policy",
            "filter"} <= set(verbs)  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(60)
async def test_what_is_typed_wrongly(stack: Running) -> None:
    """1 for a refusal, 2 for what cannot be meant; a sentence on standard error."""
    operator = Operator(stack)
    assert "bad_query" in await operator.says("evict", "--tier", "host", code=2)
    assert "unknown_block" in await operator.says("block", "f" * 32, code=1)
    assert "unknown_block" in await operator.says("block", "f" * 31, code=1)
    assert "unauthorized" in await operator.says("status", code=1, KVBM_ADMIN_TOKEN="not-the-token")
    assert "api_away" in await operator.says("status", "--url", "http://127.0.0.1:9", code=1)
    await operator.says("prefetch", "--tokens", "1", "--namespace", "{", code=2)
    await operator.says("jobs", "--cancel", code=2)
    await operator.says("jobs", "0" * 16, code=1)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_the_api_is_what_it_says(stack: Running, tmp_path: Path) -> None:
    """schemathesis sends what the document allows and what it does not, to every route.

    No answer is an accident (5xx of ours), and every answer is in the document.
    """
    url = f"http://127.0.0.1:{stack.stack.settings.metrics_port}"
    process = await asyncio.create_subprocess_exec(
        str(KVBM.parent / "schemathesis"), "run", f"{url}/openapi.json",
        "--header", f"Authorization: Bearer {TOKEN}",
        "--exclude-path", "/v1/events",  # It never ends.
        "--max-examples", "10", "--seed", "1", "--generation-database", "none", "--no-color",
        # A stack at work may refuse what is well formed, and takes unknown query parameters.
        "--exclude-checks", "positive_data_acceptance,negative_data_rejection",
        cwd=tmp_path, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()[-20_000:]
