"""Storms of faults below a disk tier: nothing wrong is served, nothing sound is lost, it heals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.services.disk_tier.faults.plan import SITES, Plan, compiled

ROOT = Path(__file__).resolve().parents[4]


def storm(directory: Path, *, faults: int, seed: int, timeout_s: float) -> dict[str, Any]:
    """Run a storm in a process of its own; what it has counted."""
    library = compiled(directory)
    if library is None:
        pytest.skip("needs a C compiler")
    (directory / "disk").mkdir()
    plan = directory / "plan"
    Plan(plan)
    environ = os.environ | {
        "KVBM_FAULTS_DIR": str(directory / "disk"), "KVBM_FAULTS_PLAN": str(plan),
        "LD_PRELOAD": str(library), "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    command = [
        sys.executable, "-m", "tests.services.disk_tier.faults.storm", str(directory / "disk"),
        str(plan), "--faults", str(faults), "--seed", str(seed),
    ]  # fmt: skip
    done = subprocess.run(
        command, env=environ, cwd=ROOT, capture_output=True, text=True, check=False,
        timeout=timeout_s,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    counted: dict[str, Any] = json.loads(done.stdout)
    return counted


@pytest.mark.slow
def test_a_short_storm(tmp_path: Path) -> None:
    """A few lives of it, in every run of the suite."""
    counted = storm(tmp_path, faults=300, seed=5, timeout_s=100)
    assert counted["counts"]["served"] > 0
    assert counted["counts"]["not ready"] > 0
    for site in ("open", "write", "pwrite", "fallocate", "mkdir", "flock"):
        assert counted["faults"][site]["fail"], f"no {site} has failed"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_long_storm_reaches_every_call(tmp_path: Path) -> None:
    """10,000 faults: EIO, ENOSPC, EROFS, short and late calls, at every call on the store's files;
    and in what io_uring is given."""
    counted = storm(tmp_path, faults=10_000, seed=1, timeout_s=800)
    untouched = [site for site in SITES if not counted["faults"][site]["fail"]]
    assert not untouched
    assert counted["counts"]["restarts"] > 20
    assert counted["counts"]["served"] > 1_000
