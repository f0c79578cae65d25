"""The demo and the modes of the tiers, end to end."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import orjson
import pytest
from kvbm_cli.demo.check import check_stack, wait_until

from tests.integration.running import running


def demo(*arguments: str, json: Path) -> tuple[int, dict[str, Any]]:
    """Run `kvbm demo`; returns its exit code and figures."""
    command = [sys.executable, "-m", "kvbm_cli.main", "demo", "--json", str(json), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert json.exists(), done.stdout + done.stderr
    return done.returncode, orjson.loads(json.read_bytes())


@pytest.mark.timeout(120)
def test_the_demo_uses_every_tier_and_verifies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: the figures that `--json` promises, and a stack that leaves nothing behind."""
    shm_dir = Path(tempfile.mkdtemp(dir="/dev/shm"))
    monkeypatch.setenv("KVBM_SHM_DIR", str(shm_dir))
    code, figures = demo("--requests", "300", json=tmp_path / "figures.json")
    assert code == 0
    assert figures["requests"] == 300
    assert figures["mismatches"] == figures["leases_left"] == 0
    assert figures["views_consistent"] is True
    assert figures["blocks_verified"] > 1000
    assert all(figures["hit_rate"][tier] > 0 for tier in ("device", "host", "disk"))
    assert all(figures["ttft_ms"][kind] > 0 for kind in ("cached", "recomputed"))
    assert set(figures["paths"]) == {"d2h", "h2d", "h2disk", "disk2h", "d2disk"}
    for path in ("d2h", "h2d", "h2disk", "disk2h"):
        assert figures["paths"][path]["blocks"] > 0
        assert figures["paths"][path]["gb_per_s"] > 0
    shm_dir.rmdir()  # Only an empty directory can be removed.


@pytest.mark.timeout(120)
def test_a_demo_that_is_ended_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM comes while requests run: no directory, no shared memory, no process of it stays."""
    with tempfile.TemporaryDirectory() as directory, tempfile.TemporaryDirectory() as shm_dir:
        monkeypatch.setenv("TMPDIR", directory)
        monkeypatch.setenv("KVBM_SHM_DIR", shm_dir)
        with subprocess.Popen(
            [sys.executable, "-u", "-m", "kvbm_cli.main", "demo", "--requests", "100000"],
            stdout=subprocess.PIPE, text=True,
        ) as running_demo:  # fmt: skip
            assert running_demo.stdout is not None
            assert "the stack is up" in running_demo.stdout.readline()
            running_demo.terminate()
            assert "ended by SIGTERM" in running_demo.stdout.read()
        assert running_demo.returncode == 128 + signal.SIGTERM
        assert list(Path(directory).iterdir()) == []
        assert list(Path(shm_dir).iterdir()) == []


def test_figures_into_a_missing_directory_fail_before_the_run(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvbm_cli.main", "demo", "--json", str(tmp_path / "no" / "x")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "--json" in done.stderr
    assert "the stack is up" not in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_disk_only(tmp_path: Path) -> None:
    """Goal: DYN_KVBM_DISK_CACHE_GB alone stages in a small arena, and counts d2d."""
    code, figures = demo(
        "--requests", "400", "--host-gb", "0", "--disk-gb", "1", json=tmp_path / "figures.json"
    )
    assert code == 0
    assert figures["hit_rate"]["disk"] > 0
    assert figures["paths"]["d2disk"]["blocks"] > 0
    assert figures["mismatches"] == 0


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_tensor_parallel_blocks_are_the_parts_of_all_ranks() -> None:
    """Goal: with two ranks a block is stored and loaded as two parts, and both are compared."""
    async with running({"cpu_cache_gb": 0.2}, engines=1, tensor_parallel=2) as run:
        await run.run(requests=60)
        await wait_until(run.engines[0].reset, "the engine is not idle")
        await run.run(requests=30, prefix="again")
        assert sum(finished.host_blocks for finished in run.finished) > 0
        assert run.mismatches() == 0
        verdict = await check_stack(run.view, run.engines, with_disk=False)
        assert verdict.differences == []


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_two_engines_share_one_cache() -> None:
    """Goal: what one engine computed, the other onboards."""
    async with running({"cpu_cache_gb": 0.3}) as run:
        first, second = run.engines
        run.engines[:] = [first]
        await run.run(requests=30)
        run.engines[:] = [second]
        run.finished.clear()
        await run.run(requests=30, prefix="other")
        assert sum(finished.host_blocks for finished in run.finished) > 0
        assert run.mismatches() == 0
        run.engines[:] = [first, second]


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_an_arena_of_so_many_blocks() -> None:
    """Goal: DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS alone is a size, whatever a block's bytes."""
    async with running({"cpu_cache_override_num_blocks": 700}, engines=1) as run:
        await run.run(requests=30)
        await wait_until(run.engines[0].reset, "the engine is not idle")
        await run.run(requests=30, prefix="again")
        assert sum(finished.host_blocks for finished in run.finished) > 0
        assert run.mismatches() == 0
        assert (await run.view.stats("host-tier")).slots["total"] == 700
