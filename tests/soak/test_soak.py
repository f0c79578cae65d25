"""The short soak that CI runs; `make soak MINUTES=30` is the long one."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import pytest

from tests.soak.__main__ import table
from tests.soak.run import soak

MINUTES = float(os.environ.get("KVBM_TEST_SOAK_MINUTES", "4"))


@pytest.mark.slow
@pytest.mark.flaky(reruns=0)  # Its report names deadlines that passed, which is no reason.
@pytest.mark.timeout(60 * MINUTES + 120)
async def test_nothing_grows(tmp_path: Path) -> None:
    """Goal: a stack under engines that come and go, kills and operators is the same afterwards."""
    seed = secrets.randbelow(1 << 31)
    report = await soak(seconds=60 * MINUTES, seed=seed)
    assert report.red == [], f"seed {seed}\n{table(report)}"
