"""Twenty drawn programs on a real vLLM, over a few shapes; `make fuzz-vllm` runs more."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.vllm.harness import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_drawn_programs_answer_like_vllm_alone(tmp_path: Path) -> None:
    """Goal: whatever happens to engine and stack, answers are those of vLLM without us.

    A failure prints the program, made as small as the time allows, and the command that replays it.
    """
    command = [sys.executable, "-m", "tests.vllm.fuzz", "--seeds", "0:20", "--shapes",
               "chunked,tiny,hybrid-tiny", "--minutes", "6", "--shrink", "60", "--failures", "1",
               "--work", str(tmp_path)]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-4000:]}"
    assert "requests" in done.stdout
