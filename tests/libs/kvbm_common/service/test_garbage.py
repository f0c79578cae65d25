"""The collector of a service: what it leaves out, and what it finds in the end."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.libs.kvbm_common.service import garbage_programs


@pytest.mark.parametrize("name", garbage_programs.PROGRAMS)
def test_in_a_process_of_its_own(name: str) -> None:
    """Goal: each program holds, on a heap without what other tests have left."""
    command = [sys.executable, "-m", garbage_programs.__name__, name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
