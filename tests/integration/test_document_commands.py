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
from kvbm_common.config.settings import Settings

from tests.document_commands import commands_of, named_in, wrong_with
from tests.integration.running import Running, running
from tests.integration.test_operators import on_disk

ROOT = Path(__file__).parents[2]
KVBM = Path(sys.executable).parent / "kvbm"
TIERS = {"cpu_cache_gb": 0.1, "disk_cache_gb": 0.5, "disable_disk_offload_filter": True}
TROUBLESHOOTING = (
    (ROOT / "docs/operating.md").read_text().split("## Troubleshooting\n")[1].split("\n## ")[0]
)
TEXTS = [
    (ROOT / "docs/index.md").read_text(),
    (ROOT / "docs/migration.md").read_text(),
    TROUBLESHOOTING,
]
STARTS_A_STACK = {"up", "demo"}
"""Run by tests/security/test_closed_by_default.py, and by test_modes.py beside this one."""


@pytest.fixture
async def stack() -> AsyncIterator[Running]:
    """A stack whose host tier and disk tier have blocks."""
    async with running(TIERS, engines=1) as run:
        await run.run(requests=10)
        yield run


def typed() -> list[list[str]]:
    """Return the words of each command of the documents once, those that only read first."""
    named = sorted({name for text in TEXTS for name in named_in(text)})
    complete = [[name] for name in named if not wrong_with([name])]
    lines = [words for text in TEXTS for _, words in commands_of(text)]
    once = {tuple(words): words for words in [*complete, *lines]}
    found = [words for words in once.values() if words[0] not in STARTS_A_STACK]
    return sorted(found, key=lambda words: words[0] in ("reset", "filter"))


def fetched(settings: Settings) -> list[list[str]]:
    """Return the words of each line of curl, with the port of this stack for the default one."""
    lines = {line for text in TEXTS for line in re.findall(r"`(curl [^`]*)`", text)}
    (default,) = (one.default_text for one in all_settings() if one.name == "metrics_port")
    assert all(f"localhost:{default}/" in line for line in lines)
    port = str(settings.metrics_port)
    return [["curl", "-f", *shlex.split(line.replace(default, port))[1:]] for line in lines]


@pytest.mark.slow
async def test_commands_work(stack: Running, tmp_path: Path) -> None:
    """Goal: what a document tells to type answers, and none of it fails.

    1. HASH is a block of the disk tier, FILE a trace.
    2. Each command ends with 0; the doctor may find something wrong with the host.
    3. Each line of curl is answered.
    """
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 32, "output_length": 1, "hash_ids": [1]}\n')
    block = (await on_disk(stack))[0]
    environ = {key: value for key, value in os.environ.items() if "KVBM_" not in key}
    environ |= stack.stack.settings.as_environ()
    commands, lines = typed(), fetched(stack.stack.settings)
    assert len(commands) >= 16
    assert len(lines) >= 2
    for words in [*lines, *([str(KVBM), *words] for words in commands)]:
        line = [word.replace("FILE", str(trace)).replace("HASH", block) for word in words]
        code, output = await ends(line, environ)
        assert code in ({0, 1} if "doctor" in line else {0}), f"{shlex.join(line)}: {output}"
        assert "Traceback" not in output


async def ends(line: list[str], environ: dict[str, str]) -> tuple[int, str]:
    """Return how a command ends, and what it prints."""
    process = await asyncio.create_subprocess_exec(
        *line, env=environ, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, output.decode()
