"""The demo and the modes of the tiers, end to end."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import orjson
import pytest
from kvbm_cli.demo.check import check_stack, wait_until

from tests.integration.running import Running, running

ANSWER_BLOCKS = 5 * 8
"""Five answers of at most 128 tokens."""


def demo(*arguments: str, json: Path) -> tuple[int, dict[str, Any]]:
    """Run `kvbm demo`; returns its exit code and figures."""
    command = [sys.executable, "-m", "kvbm_cli.main", "demo", "--json", str(json), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert json.exists(), done.stdout + done.stderr
    print(done.stdout, done.stderr)  # A failed verdict names its row.
    return done.returncode, orjson.loads(json.read_bytes())


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_what_a_killed_demo_leaves_is_swept_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGKILL comes while requests run. The next demo, started at once, removes what is left."""
    with tempfile.TemporaryDirectory() as directory, tempfile.TemporaryDirectory() as shm_dir:
        monkeypatch.setenv("TMPDIR", directory)
        monkeypatch.setenv("KVBM_SHM_DIR", shm_dir)
        command = [sys.executable, "-u", "-m", "kvbm_cli.main", "demo", "--disk-gb", "0.2"]
        with subprocess.Popen(
            [*command, "--requests", "100000"], stdout=subprocess.PIPE, text=True
        ) as running_demo:
            assert running_demo.stdout is not None
            assert "the stack is up" in running_demo.stdout.readline()
            running_demo.kill()
        assert len(list(Path(directory).iterdir())) == 1
        subprocess.run([*command, "--requests", "1"], timeout=100, check=True)
        assert list(Path(directory).iterdir()) == []
        assert list(Path(shm_dir).iterdir()) == []


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_disk_tier_that_cannot_be_made_is_said_at_once_and_fails_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One request is enough: it is said before the table, and the logs are kept."""
    with tempfile.TemporaryDirectory() as directory:
        monkeypatch.setenv("TMPDIR", directory)
        command = [sys.executable, "-m", "kvbm_cli.main", "demo", "--requests", "1"]
        done = subprocess.run(
            [*command, "--disk-gb", "100000"],
            capture_output=True, text=True, timeout=100, check=False,
        )  # fmt: skip
        lines = done.stdout.splitlines()
        assert (done.returncode, lines[-1]) == (1, "FAILED"), done.stdout
        assert lines[1].startswith("not ready: disk-tier-0: no room for")
        [kept] = Path(directory).iterdir()
        assert lines[2] == f"the logs of the services and engines are in {kept}"
        assert "no room for" in (kept / "disk-tier.log").read_text()


@pytest.mark.slow
def test_the_logs_of_a_stack_that_does_not_start_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as directory:
        monkeypatch.setenv("TMPDIR", directory)
        done = subprocess.run(
            [sys.executable, "-m", "kvbm_cli.main", "demo", "--host-gb", "100000"],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 1, done.stderr
        [kept] = Path(directory).iterdir()
        assert f"the logs of the services and engines are in {kept}" in done.stdout
        assert "100000" in (kept / "host-tier.log").read_text()


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_an_attached_demo_counts_its_own(tmp_path: Path) -> None:
    """An engine of ours asks much meanwhile, and a pin of an operator stays: both are not its."""
    async with running({"cpu_cache_gb": 0.2, "disk_cache_gb": 0.2}, engines=1) as run:
        done = asyncio.Event()
        work = asyncio.create_task(run.work(done))
        await wait_until(lambda: _have_finished(run, 30), "no request has finished")
        await _attached_demo(run, tmp_path / "figures", requests=5)
        done.set()
        await work
        host = (await run.view.stats("host-tier")).figures
    figures = orjson.loads((tmp_path / "figures").read_bytes())
    pairs_blocks = figures["blocks_verified"]
    assert 0 < figures["paths"]["d2h"]["blocks"] <= figures["blocks_asked"] + ANSWER_BLOCKS
    assert 0 < sum(figures["missed"].values()) <= figures["blocks_asked"] + pairs_blocks
    assert host["lookup_blocks.miss"] > 3 * sum(figures["missed"].values()), "others missed more"
    assert figures["paths"]["h2disk"]["of_all_engines"] is True


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_demos_that_join_a_busy_stack_pass(tmp_path: Path) -> None:
    """The tiers are small, so that blocks of an engine of ours come and go during every check."""
    async with running({"cpu_cache_gb": 0.1, "disk_cache_gb": 0.1}, engines=1) as run:
        done = asyncio.Event()
        work = asyncio.create_task(run.work(done))
        try:
            await wait_until(lambda: _have_finished(run, 30), "no request has finished")
            demos = [
                _attached_demo(run, tmp_path / f"figures-{one}", requests=20) for one in range(2)
            ]
            codes = await asyncio.gather(*demos)
            assert not work.done(), "the stack was busy until the end"
        finally:
            done.set()
            await work
    reports = [orjson.loads((tmp_path / f"figures-{one}").read_bytes()) for one in range(2)]
    assert codes == [0, 0], reports


async def _attached_demo(run: Running, json: Path, *, requests: int) -> int:
    """Run `kvbm demo --attach` beside others; returns its exit code."""
    command = ["demo", "--attach", "--requests", str(requests), "--engines", "1"]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvbm_cli.main", *command, "--block-kib", "64", "--json", str(json),
        env=os.environ | run.stack.settings.as_environ(),
    )  # fmt: skip
    try:
        return await asyncio.wait_for(process.wait(), 200)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _have_finished(run: Running, count: int) -> bool:
    return len(run.finished) >= count


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("no/x", "No such file or directory"),
        (".", "Is a directory"),
        ("/proc/x", "No such file or directory"),
        ("fifo", "No such device or address"),
    ],
)
def test_figures_that_cannot_be_written_fail_before_the_run(
    place: str, reason: str, tmp_path: Path
) -> None:
    """A missing directory, a directory, `/proc` even as root, and a pipe without a reader."""
    os.mkfifo(tmp_path / "fifo")
    command = [sys.executable, "-m", "kvbm_cli.main", "demo", "--json", str(tmp_path / place)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert f"--json: '{tmp_path / place}' cannot be written: {reason}" in done.stderr
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
