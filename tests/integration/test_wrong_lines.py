"""No line of `kvbm` ends with a traceback: a wrong one gets one line that names what is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import typer
from kvbm_cli.main import make_app

from tests.integration.wrong_lines import RIGHT, Case, Ended, cases
from tests.vllm.harness import LiveStack, live_stack

CASES = 50
SHOWN = 20


@pytest.fixture(scope="module")
def stack() -> Iterator[LiveStack]:
    """A small stack, for what the API has to refuse."""
    overrides = {"cpu_cache_gb": 0.01, "disk_cache_gb": 0.01}
    services = ("index", "host-tier", "disk-tier", "consolidator", "metrics")
    with live_stack(overrides, services) as running:
        yield running


@pytest.fixture
def environ(stack: LiveStack, tmp_path: Path) -> dict[str, str]:
    """The variables of that stack, for lines in an empty directory."""
    ours = ("KVBM_", "DYN_KVBM_")
    clean = {name: text for name, text in os.environ.items() if not name.startswith(ours)}
    root = str(Path(__file__).parents[2])
    own = {"PYTHONPATH": root, "HOME": str(tmp_path)}
    return clean | stack.settings.as_environ() | own


def test_every_command_is_here() -> None:
    """Goal: a new command gets its wrong lines, too."""
    group = typer.main.get_command(make_app([]))
    assert isinstance(group, typer.core.TyperGroup)
    assert group.commands.keys() == RIGHT.keys()


@pytest.mark.timeout(300)
@pytest.mark.slow
@pytest.mark.parametrize("command", RIGHT)
def test_a_wrong_line_is_answered_by_one_line(
    command: str, environ: dict[str, str], tmp_path: Path
) -> None:
    """It ends with 2, and names the argument, the option or the variable."""
    (trace := tmp_path / "trace.jsonl").write_text('{"hash_ids": [1, 2]}\n')
    places = {"--out=OUT": f"--out={tmp_path / 'out'}", "--trace=TRACE": f"--trace={trace}"}
    lines = cases(command, CASES)
    assert len(lines) >= CASES
    asked = [
        asdict(one) | {"words": [places.get(word, word) for word in one.words]} for one in lines
    ]
    if command == "up":  # The stack that runs would be in its way first.
        environ |= {"KVBM_RUNTIME_DIR": str(tmp_path / "run")}
    done = subprocess.run(
        [sys.executable, "-m", "tests.integration.wrong_lines"], input=json.dumps(asked),
        env=environ, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = [Ended(**one) for one in json.loads(done.stdout)]
    wrong = [
        f"{_short(case.words)} {_short(list(case.environ.values()))}: {what}"
        for case, ended in zip(lines, found, strict=True)
        if (what := objection(case, ended))
    ]
    assert not wrong, f"{len(wrong)} of {len(lines)}:\n" + "\n".join(wrong[:SHOWN])


def objection(case: Case, ended: Ended) -> str:
    """Return what is not as it should be; nothing: all is."""
    if ended.trace or "Traceback" in ended.errors:
        return f"traceback: {(ended.trace or ended.errors)[-600:]}"
    said = ended.errors.rstrip("\n")
    if ended.code != 2:
        return f"code {ended.code}: {ended.output[:200]} {said[:200]}"
    if not said or "\n" in said or not said.isprintable():
        return f"not one line: {said[:400]!r}"
    names = {case.name, case.name.strip("-").replace("-", "_"), case.name.strip("-")}
    return "" if any(name and name in said for name in names) else f"names no field: {said[:300]}"


def _short(words: list[str]) -> str:
    return " ".join(repr(word) if len(word) < 60 else f"{word[:20]!r}…" for word in words)
