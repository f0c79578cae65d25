"""The GPU benchmark: what it copies is right, and what it has no GPU for it says."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvbm_common.cuda.runtime import CudaUnavailable, CupyRuntime

from benchmarks import gpu
from tests.gpu.fake_runtime import FakeRuntime

ROOT = Path(__file__).parents[3]


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[gpu.Bench]:
    """A small one, on a runtime that keeps CUDA's order only."""
    for name, size in (("ARENA_BYTES", 1 << 20), ("MOVED_BYTES", 1 << 20), ("ROUNDS", 2),
                       ("ONBOARD_ROUNDS", 2)):  # fmt: skip
        monkeypatch.setattr(gpu, name, size)
    monkeypatch.setattr(gpu, "BLOCK_KIB", (64,))
    monkeypatch.setattr(gpu, "torch_copy", lambda _: None)
    bench = gpu.Bench(FakeRuntime(seed=1), str(tmp_path))
    yield bench
    bench.pinning.close()
    bench.arena.close()


def test_every_layout_comes_back(bench: gpu.Bench) -> None:
    """By the engine and by the kernel: no figure is of wrong bytes."""
    assert gpu.same_bytes(bench) == dict.fromkeys(gpu.LAYOUTS, True)


def test_every_case_has_its_figures(bench: gpu.Bench) -> None:
    rows = gpu.copy_rates(bench)
    assert {(row["direction"], row["layout"]) for row in rows} == {
        (direction, layout) for direction in ("d2h", "h2d") for layout in gpu.LAYOUTS
    }
    for row in rows:
        assert {"ours_gb_s", "engine_gb_s", "kernel_gb_s", "plain_gb_s"} <= row.keys()
    assert gpu.onboard(bench).keys() == gpu.LAYOUTS.keys() | {"bytes"}


def test_a_section_that_fails_is_a_finding(bench: gpu.Bench) -> None:
    bench.section("bad", lambda: 1 // 0)
    assert bench.figures["bad"] == {
        "error": "ZeroDivisionError: integer division or modulo by zero"
    }
    bench.started -= gpu.BUDGET_S
    bench.section("late", lambda: 1)
    assert bench.figures["left_out"] == ["late"]


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    """Run as users run it, in a bare interpreter."""
    try:
        CupyRuntime()
    except CudaUnavailable:
        pass
    else:
        pytest.skip("there is a GPU")
    command = [sys.executable, str(ROOT / "benchmarks/gpu.py"), str(tmp_path / "gpu.json")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert ended.returncode == 2
    assert "no figures" in ended.stderr
    assert not list(tmp_path.iterdir())
