"""A stack with two disks, of which one cannot be used: it starts, says why, and heals."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from kvbm_cli.demo.check import check_stack

from tests.integration.running import Running, running
from tests.small_tmpfs import small_tmpfs
from tests.waiting import ask_until

TOKEN = "a-token-for-operators"
SIZES = {
    "cpu_cache_gb": 0.03,
    "disk_cache_gb": 0.1,
    "disable_disk_offload_filter": True,
    "admin_token": TOKEN,
}


def ready(run: Running) -> tuple[int, str]:
    """What the metrics service says."""
    url = f"http://127.0.0.1:{run.stack.settings.metrics_port}/readyz"
    answer = httpx.get(url, trust_env=False)
    return answer.status_code, answer.text


def status(run: Running) -> str:
    """What `kvbm status` prints."""
    url = f"http://127.0.0.1:{run.stack.settings.metrics_port}"
    command = [sys.executable, "-m", "kvbm_cli.main", "status", "--url", url, "--json"]
    environ = os.environ | {"KVBM_ADMIN_TOKEN": TOKEN}
    return subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=30, env=environ
    ).stdout


@pytest.mark.timeout(180)
async def test_of_two_disks_one_may_be_read_only(tmp_path: Path) -> None:
    """Goal: a directory that cannot be used costs its blocks and nothing else, and comes back.

    1. The stack starts with one of two directories read-only. The other disk takes blocks.
    2. `/readyz`, `kvbm status` and the demo's checks name the directory and the reason.
    3. It becomes writable: everything is ready, and it takes blocks, too.
    """
    with small_tmpfs(tmp_path / "ro", 100_000_000) as directory:
        remount(directory, "ro")
        directories = f"{tmp_path / 'rw'},{directory}"
        async with running(SIZES | {"disk_cache_dirs": directories}) as run:
            await run.run(requests=40)
            assert not run.errors()

            async def is_told() -> str | None:
                code, text = ready(run)
                return text if code == 503 and str(directory) in text else None

            text = await ask_until(is_told, deadline_s=20.0)
            assert "cannot be used" in text
            assert "Read-only file system" in text
            assert "Read-only file system" in status(run)
            verdict = await check_stack(run.view, run.engines, with_disk=True)
            assert verdict.differences == []
            [trouble] = verdict.troubles
            assert trouble.startswith(f"disk-tier-0-1: DYN_KVBM_DISK_CACHE_DIR {directory} cannot")

            remount(directory, "rw")

            async def is_ready() -> bool:
                return ready(run)[0] == 200

            await ask_until(is_ready, deadline_s=30.0)
            await run.run(requests=40, seed=2, prefix="later")
            assert run.mismatches() == 0
            verdict = await check_stack(run.view, run.engines, with_disk=True)
            assert (verdict.differences, verdict.troubles) == ([], [])
            snapshot = await run.view.snapshot("disk-tier", "0-1")
            assert snapshot.parts, "the disk that was read-only has blocks"


def remount(path: Path, option: str) -> None:
    """Make a file system read-only, or writable again."""
    subprocess.run(["mount", "-o", f"remount,{option}", str(path)], check=True)
