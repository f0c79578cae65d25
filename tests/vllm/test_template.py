"""An engine that is forked from a template begins and ends as one that is started from nothing."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests import line_process
from tests.line_process import Process, Start
from tests.vllm.harness import ENVIRON, VLLM_PYTHON
from tests.vllm.template import UNHEARD, Templates

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

DEADLINE_S = 60.0
PROBE: tuple[str | Path, ...] = (VLLM_PYTHON, "-m", "tests.vllm.start_probe")


def begin(start: Start, how: str, directory: Path, **environ: str) -> Process:
    """Start a probe, which will end as it is told."""
    with (directory / how).open("ab") as log:
        return start([*PROBE, how], os.environ | ENVIRON | environ, log)


def end(process: Process) -> tuple[dict[str, Any], int]:
    """What a probe has seen, and its exit code."""
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin, process.stdout:
        process.stdin.close()
        return json.loads(process.stdout.read()), process.wait(DEADLINE_S)


@pytest.mark.parametrize("how", ["import", "exit", "raise"])
def test_a_fork_sees_and_ends_as_a_fresh_start(
    templates: Templates, tmp_path: Path, how: str
) -> None:
    """Goal: arguments, environment, streams, signals, limits and exit code are the same."""
    found = []
    for start in (line_process.fresh, templates.start):
        seen, code = end(begin(start, how, tmp_path, KVBM_OF_THIS_TEST="1"))
        assert code == {"import": 0, "exit": 3, "raise": 1}[how]
        found.append(seen)
    fresh, forked = found
    assert forked["environ"]["KVBM_OF_THIS_TEST"] == "1"
    if how == "import":
        for seen in found:
            del seen["drawn"], seen["parent"]
        assert forked == fresh
    if how == "raise":
        assert (tmp_path / how).read_text().count("\nValueError: as told\n") == len(found)


def test_a_signal_reaches_a_fork_and_no_other(templates: Templates, tmp_path: Path) -> None:
    killed, asked, left = (begin(templates.start, "read", tmp_path) for _ in range(3))
    killed.kill()
    asked.send_signal(signal.SIGTERM)
    assert killed.wait(DEADLINE_S) == -signal.SIGKILL
    assert asked.wait(DEADLINE_S) == -signal.SIGTERM
    killed.send_signal(signal.SIGTERM)
    assert killed.poll() == -signal.SIGKILL
    assert left.poll() is None
    assert end(left)[1] == 0


def test_forks_outlive_their_template_and_can_be_ended(
    templates: Templates, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. A template is killed: its forks run, and hear signals. 2. The next one gets another."""
    monkeypatch.setenv("TEMPLATE_OF_THIS_TEST", "1")
    left = begin(templates.start, "read", tmp_path)
    assert left.stdout is not None
    parent = json.loads(left.stdout.readline())["parent"]
    os.kill(parent, signal.SIGKILL)
    left.kill()
    assert left.wait(DEADLINE_S) == UNHEARD
    again = begin(templates.start, "read", tmp_path)
    assert end(again)[1] == 0


def test_forks_draw_numbers_of_their_own(templates: Templates, tmp_path: Path) -> None:
    drawn = [end(begin(templates.start, "import", tmp_path))[0]["drawn"] for _ in range(2)]
    assert drawn[0] != drawn[1]
