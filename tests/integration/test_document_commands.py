"""The commands of the documents for users, typed against a whole stack with an engine at work."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from kvbm_common.config.declarations import all_settings

from tests.document_commands import commands_of
from tests.integration.running import Running, running

ROOT = Path(__file__).parents[2]
KVBM = Path(sys.executable).parent / "kvbm"
TIERS = {"cpu_cache_gb": 0.1, "disk_cache_gb": 0.5, "disable_disk_offload_filter": True}
TROUBLESHOOTING = (
    (ROOT / "docs/operating.md").read_text().split("## Troubleshooting\n")[1].split("\n## ")[0]
)
TEXTS = {
    "index": (ROOT / "docs/index.md").read_text(),
    "migration": (ROOT / "docs/migration.md").read_text(),
    "troubleshooting": TROUBLESHOOTING,
}
STARTS_A_STACK = {"up", "demo"}
"""Run by tests of their own: tests/integration/test_modes.py and test_figures.py."""
JUDGES_THE_HOST = {"doctor"}
"""Ends with 1 where the host is not as it should be."""


@pytest.fixture
async def stack() -> AsyncIterator[Running]:
    """A stack whose host tier and disk tier have blocks."""
    async with running(TIERS, engines=1) as run:
        await run.run(requests=10)
        yield run


def typed(name: str) -> list[list[str]]:
    """Return the words of each command of a document once, those that only read first."""
    words = {tuple(words): words for _, words in commands_of(TEXTS[name])}
    found = [one for one in words.values() if one[0] not in STARTS_A_STACK]
    return sorted(found, key=lambda one: one[0] in ("reset", "filter"))


@pytest.mark.parametrize("name", TEXTS)
async def test_commands_work(name: str, stack: Running, tmp_path: Path) -> None:
    """Goal: what a document tells to type answers, and none of it fails.

    1. HASH is a block of the host tier, FILE a trace.
    2. Each command ends with 0; the doctor may find something wrong with the host.
    """
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 32, "output_length": 1, "hash_ids": [1]}\n')
    environ = {key: value for key, value in os.environ.items() if "KVBM_" not in key}
    environ |= stack.stack.settings.as_environ()
    commands = typed(name)
    assert len(commands) >= 3
    for words in commands:
        line = [word.replace("FILE", str(trace)).replace("HASH", "0" * 32) for word in words]
        code, output = await ends([str(KVBM), *line], environ)
        wanted = {0, 1} if words[0] in JUDGES_THE_HOST or "HASH" in words else {0}
        assert code in wanted, f"{shlex.join(words)}: {output}"
        assert "Traceback" not in output


async def test_lines_of_curl_answer(stack: Running) -> None:
    """Goal: the port in each `curl` of the three texts is the default one, and it answers."""
    port = next(one.default_text for one in all_settings() if one.field == "metrics_port")
    lines = {line for text in TEXTS.values() for line in re.findall(r"`(curl [^`]*)`", text)}
    assert len(lines) >= 2
    for line in lines:
        assert f"localhost:{port}/" in line
        mine = line.replace(f"localhost:{port}", f"localhost:{stack.stack.settings.metrics_port}")
        code, output = await ends(shlex.split(mine.replace("curl", "curl -f")), dict(os.environ))
        assert code == 0, f"{line}: {output}"


async def ends(line: list[str], environ: dict[str, str]) -> tuple[int, str]:
    """Return how a command ends, and what it prints."""
    process = await asyncio.create_subprocess_exec(
        *line, env=environ, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, output.decode()
