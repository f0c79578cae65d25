"""The routing proxy before two sim engines and a whole stack, and the commands of its document."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from kvbm_cli.stack import Stack
from kvbm_connectors.sim.workload import conversations

from benchmarks.route import AUTHORIZED, TOKEN, chat, engines_served, proxy
from tests.integration.test_document_commands import ends

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(sys.executable).parent
DOCUMENT = (ROOT / "docs/routing.md").read_text()
LINES = [
    line.strip()
    for line in DOCUMENT.splitlines()
    if line.startswith(("    kvbm ", "    curl ", "    python3 "))
]
DEADLINE_S = 60.0
BLOCK = "ab" * 16

Served = tuple[Stack, dict[str, str]]


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    """One host with two engines."""
    async with engines_served(hosts=1) as found:
        yield found


@pytest.mark.slow
async def test_a_prompt_goes_where_its_blocks_are(served: Served, tmp_path: Path) -> None:
    """Goal: the proxy, the HTTP API, the index and engines agree about a prompt.

    1. A chat load passes through the proxy: every request is answered.
    2. What one engine has just had, it gets again; its device has all of it but the last block.
    3. The commands of docs/routing.md answer, and name both engines.
    """
    stack, fronts = served
    url = stack.services["metrics"].description
    with proxy(fronts, url) as address:
        answers = await chat(address, requests=24)
        assert answers.device_hits > 0.3, "turns come back to the engine that had the others"
        turn = next(conversations(requests=1, seed=99))
        body = {"prompt": turn.prompt.tolist(), "outputs": [], "request_id": "twice"}
        async with httpx.AsyncClient(base_url=address, timeout=DEADLINE_S) as client:
            names = set()
            for number in range(4):
                body["request_id"] = f"again-{number}"
                reply = await client.post("/v1/completions", json=body)
                assert reply.is_success, reply.text
                names.add(reply.headers["x-kvbm-engine"])
        assert len(names) == 1, "one engine has the prompt"
    async with httpx.AsyncClient(base_url=url, headers=AUTHORIZED) as client:
        worker = (await client.get("/v1/workers")).json()[0]
        question = {"tokens": body["prompt"], "namespace": worker["namespace_fields"]}
        ranked = (await client.post("/v1/route", json=question)).json()
    first, second = ranked["engines"]
    assert {first["source"]} == names
    assert first["found"]["device"] >= ranked["asked"] - 1
    assert first["cost"] < second["cost"]
    await _commands_work(stack, fronts, tmp_path / "question.json")


async def _commands_work(stack: Stack, fronts: dict[str, str], file: Path) -> None:
    """Run each line of the document; the proxy's own is run by `proxy`, with its options."""
    environ = {key: value for key, value in os.environ.items() if "KVBM_" not in key}
    environ |= stack.settings.as_environ() | {
        "AUTH": f"Authorization: Bearer {TOKEN}",
        "PATH": f"{PROGRAMS}:{os.environ['PATH']}",
    }
    lines = [line for line in LINES if not line.startswith("python3")]
    assert len(lines) == len(LINES) - 1 >= 6
    engine = next(iter(fronts))
    _write_question(file, engine)
    for line in lines:
        text = line.replace("localhost:6880", stack.services["metrics"].description.split("//")[1])
        text = text.replace("HASH", BLOCK).replace("FILE", str(file))
        code, output = await ends(["bash", "-c", text], environ)
        assert code == 0, f"{text}: {output}"
        assert engine in output, f"{text}: {output}"


def _write_question(file: Path, engine: str) -> None:
    """Write the JSON of the document, with names that this stack has."""
    (question,) = re.findall(r"```json\n(.*?)```", DOCUMENT, re.DOTALL)
    file.write_text(question.replace("HASH", BLOCK).replace("ENGINE", engine))
