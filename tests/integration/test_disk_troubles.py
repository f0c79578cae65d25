"""A stack with two disks, of which one cannot be used: it starts, says why, and heals."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from kvbm_cli.demo.check import check_stack
from kvbm_common.wire.verbs import SnapshotPart

from tests.hung_mount import hung_mount
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


async def is_ready(run: Running) -> bool:
    """Whether everything serves."""
    return ready(run)[0] == 200


async def not_ready_text(run: Running, directory: Path) -> str | None:
    """What `/readyz` says once it is not ready because of this directory."""
    code, text = ready(run)
    return text if code == 503 and str(directory) in text else None


def status(run: Running) -> str:
    """What `kvbm status` prints of a system that is not ready: it ends with 1."""
    url = f"http://127.0.0.1:{run.stack.settings.metrics_port}"
    command = [sys.executable, "-m", "kvbm_cli.main", "status", "--url", url, "--json"]
    environ = os.environ | {"KVBM_ADMIN_TOKEN": TOKEN}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=30, env=environ
    )
    assert done.returncode == 1, done.stderr
    return done.stdout


@pytest.mark.slow
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

            text = await ask_until(lambda: not_ready_text(run, directory), deadline_s=20.0)
            assert "cannot be used" in text
            assert "Read-only file system" in text
            assert "Read-only file system" in status(run)
            verdict = await check_stack(run.view, run.engines, with_disk=True)
            assert verdict.differences == []
            [trouble] = verdict.troubles
            assert trouble.startswith(f"disk-tier-0-1: DYN_KVBM_DISK_CACHE_DIR {directory} cannot")

            remount(directory, "rw")

            await ask_until(lambda: is_ready(run), deadline_s=30.0)
            await run.run(requests=40, seed=2, prefix="later")
            assert run.mismatches() == 0
            verdict = await check_stack(run.view, run.engines, with_disk=True)
            assert (verdict.differences, verdict.troubles) == ([], [])
            snapshot = await run.view.snapshot("disk-tier", "0-1")
            assert snapshot.parts, "the disk that was read-only has blocks"


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_of_two_disks_one_may_hang(tmp_path: Path) -> None:
    """Goal: a disk that answers nothing, as of a dead server, keeps no stack from its start.

    1. The stack starts, and the other disk takes blocks. `/readyz` names the one that hangs.
    2. It answers: everything is ready, and it takes blocks, too.
    """
    with contextlib.ExitStack() as trouble:
        hung = trouble.enter_context(hung_mount(tmp_path / "hung"))
        directories = f"{tmp_path / 'well'},{hung}"
        async with running(SIZES | {"disk_cache_dirs": directories}) as run:
            await run.run(requests=40)
            assert not run.errors()

            text = await ask_until(lambda: not_ready_text(run, hung), deadline_s=20.0)
            assert "does not answer" in text
            await ask_until(lambda: parts_of(run, "0"), deadline_s=30.0)

            trouble.close()

            await ask_until(lambda: is_ready(run), deadline_s=30.0)
            await run.run(requests=40, seed=2, prefix="later")
            assert run.mismatches() == 0
            verdict = await check_stack(run.view, run.engines, with_disk=True)
            assert (verdict.differences, verdict.troubles) == ([], [])
            assert await parts_of(run, "0-1"), "the disk that did not answer has blocks"


async def parts_of(run: Running, instance: str) -> list[SnapshotPart]:
    """What a disk tier holds."""
    return (await run.view.snapshot("disk-tier", instance)).parts


def remount(path: Path, option: str) -> None:
    """Make a file system read-only, or writable again."""
    subprocess.run(["mount", "-o", f"remount,{option}", str(path)], check=True)
