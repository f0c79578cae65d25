"""`kvbm demo --device cuda`, whole: real services and engines, each in its process, on a fake GPU
that all of them share. It keeps CUDA's rules of order and no other; see tests/gpu."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.shared_runtime import ROT, SharedRuntime

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]
KVBM = Path(sys.executable).with_name("kvbm")
DEADLINE_S = 90.0
REQUESTS = 60


def demo(report: Path, *options: str, **environ: str) -> tuple[int, dict[str, Any]]:
    """Its exit status and its report."""
    path = os.pathsep.join(map(str, (ROOT / "tests/gpu/everywhere", ROOT)))
    done = subprocess.run(
        [KVBM, "demo", "--device", "cuda", "--requests", str(REQUESTS), "--host-gb", "0.05",
         "--disk-gb", "0.2", "--block-kib", "32", "--json", report, *options],
        env=os.environ | {"PYTHONPATH": path} | environ, timeout=DEADLINE_S,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert report.exists(), done.stdout + done.stderr
    return done.returncode, json.loads(report.read_text())


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_block_that_comes_back_is_right(tmp_path: Path, ranks: int) -> None:
    """Blocks go to host memory and disk by way of the GPU's streams and come back; each is
    compared."""
    status, report = demo(tmp_path / "report.json", "--tensor-parallel", str(ranks))
    assert (status, report["failed_requests"], report["mismatches"]) == (0, 0, 0)
    assert report["failed_blocks"] == 0
    assert report["blocks_verified"] > REQUESTS
    assert report["paths"]["d2h"]["blocks"] > REQUESTS
    assert report["paths"]["h2d"]["blocks"] > 0, "before the pairs, whose loads are most of all"


def test_wrong_bytes_are_told(tmp_path: Path) -> None:
    """Goal: the check can fail. One byte of every block that it reads back is wrong."""
    status, report = demo(tmp_path / "report.json", **{ROT: "1"})
    assert status == 1
    assert report["mismatches"] == report["blocks_verified"] > 0


def test_memory_is_the_same_at_another_address() -> None:
    """What the two tests above stand on."""
    owner, opener = SharedRuntime(), SharedRuntime()
    address = owner.allocate(8192)
    theirs = opener.open(owner.export(address + 4096))
    assert theirs != address
    owner.memory[address][:] = 7
    assert opener.memory[theirs].tolist() == [7] * 8192
    opener.close(theirs)
    owner.free(address)
