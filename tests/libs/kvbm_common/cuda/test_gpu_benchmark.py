"""The GPU benchmark: what it copies is right, and what it has no GPU for it says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from kvbm_common.cuda.runtime import CudaUnavailable, CupyRuntime

from benchmarks import gpu, gpu_tables
from tests.gpu.fake_runtime import FakeRuntime

pytestmark = pytest.mark.usefixtures("small_measurements")
ROOT = Path(__file__).parents[4]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[gpu.Bench]:
    """A small one, on a runtime that keeps CUDA's order only."""
    for name, size in (("ARENA_BYTES", 2 << 20), ("MOVED_BYTES", 1 << 20), ("ROUNDS", 2),
                       ("ONBOARD_ROUNDS", 2)):  # fmt: skip
        monkeypatch.setattr(gpu, name, size)
    monkeypatch.setattr(gpu, "BLOCK_KIB", (64,))
    monkeypatch.setattr(gpu, "torch_copy", lambda _: None)
    bench = gpu.Bench(FakeRuntime(seed=1))
    yield bench
    bench.pinning.close()
    bench.arena.close()


@pytest.mark.slow
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


def test_pieces_of_one_size_go_each_way_and_both_at_once(
    bench: gpu.Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "PIECE_KIB", (1, 4))
    rows = gpu.pieces(bench)
    assert [row["piece_kib"] for row in rows] == [1, 4]
    for row in rows:
        assert all(row[f"{way}_gb_s"] > 0 for way in ("d2h", "h2d", "both", "plain_both"))


def test_the_documents_figures_are_those_of_the_run() -> None:
    """Goal: no figure of a GPU in docs/gpu.md that no run has printed."""
    figures = json.loads((ROOT / "benchmarks/results/gpu/h100.json").read_text())
    assert gpu_tables.tables(figures) in (ROOT / "docs/gpu.md").read_text()
    # That machine had no msgspec, which one test needed: `test_the_trial_of_the_sums_…`.
    assert "1 failed, 34 passed" in figures["tests"]["tail"]
    assert gpu.passed(figures | {"tests": {"exit": 0}})


def test_a_section_that_fails_is_a_finding(bench: gpu.Bench) -> None:
    bench.section("bad", lambda: 1 // 0)
    assert bench.figures["bad"] == {
        "error": "ZeroDivisionError: integer division or modulo by zero"
    }
    bench.started -= gpu.BUDGET_S
    bench.section("late", lambda: 1)
    assert bench.figures["left_out"] == ["late"]


def test_sums_are_checked(bench: gpu.Bench) -> None:
    assert gpu.right_sums(bench)


def test_what_has_no_package_here_is_left_out(
    bench: gpu.Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. It is said, and is no failure. 2. Wrong bytes, sums or a failed test are one."""
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    sections: dict[str, Callable[[], Any]] = {
        "tests": gpu.contract_tests,
        "right_sums": partial(gpu.right_sums, bench),
        "stolen": partial(gpu.stolen, bench),
    }
    for name, section in sections.items():
        bench.section(name, section)
    assert [text.partition(": ")[2] for text in bench.figures["left_out"]] == [
        "pytest is not installed", "xxhash is not installed", "torch is not installed",
    ]  # fmt: skip
    bench.figures["same_bytes"] = {"a": True}
    assert gpu.passed(bench.figures)
    for what, wrong in (
        ("same_bytes", {"a": False}),
        ("same_bytes", {"error": "CudaError"}),
        ("right_sums", False),
        ("tests", {"exit": 1}),
        ("tests", {"error": "TimeoutExpired"}),
    ):
        assert not gpu.passed(bench.figures | {what: wrong})


BARE = """
import importlib.abc, runpy, sys
class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in {missing}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Missing())
sys.argv = sys.argv[1:]
{run}
"""
NEVER = {
    "msgspec",
    "nixl",
    "nixl_cu12",
    "zmq",
    "nats",
    "xxhash",
    "kvbm_connectors",
    "typer",
    "yaml",
}
"""What a bare machine has not: of ours only `kvbm_common`, by its path."""


def in_a_bare_interpreter(
    run: str, missing: set[str], *arguments: str, **environ: str
) -> tuple[int, str]:
    """Run something where some packages cannot be imported."""
    try:
        CupyRuntime()
    except CudaUnavailable:
        pass
    else:
        pytest.skip("there is a GPU")
    command = [sys.executable, "-c", BARE.format(missing=missing, run=run), *arguments]
    environ = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **environ}
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=60, cwd=ROOT, env=environ, check=False
    )
    return ended.returncode, ended.stdout + ended.stderr


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    """Run as users run it, with nothing but numpy installed."""
    run = "runpy.run_path(sys.argv[0], run_name='__main__')"
    missing = NEVER | {"pytest", "torch"}
    file = tmp_path / "gpu.json"
    code, said = in_a_bare_interpreter(run, missing, str(ROOT / "benchmarks/gpu.py"), str(file))
    assert (code, "no figures: CUDA cannot be used here" in said) == (2, True), said
    assert not file.exists()


@pytest.mark.slow
def test_without_a_gpu_its_tests_say_so() -> None:
    """1. They can all be imported where there is pytest, and are skipped with the reason. 2. Where
    the benchmark has found a GPU, they fail for want of one: cupy may be broken in other ways."""
    run = "import pytest; sys.exit(pytest.main(sys.argv))"
    arguments = ("-c", "tests/gpu/pytest.ini", "tests/gpu")
    code, said = in_a_bare_interpreter(run, NEVER, *arguments)
    assert (code, "CUDA cannot be used here" in said, " passed" in said) == (0, True, False), said
    code, said = in_a_bare_interpreter(run, NEVER, *arguments, KVBM_TEST_GPU="1")
    assert (code, "CUDA cannot be used here" in said) == (1, True), said


def test_the_trial_of_the_sums_needs_only_xxhash() -> None:
    """It is part of `tests/gpu`, and imports the library's checksums when it runs."""
    run = """
sys.path[:0] = [".", "libs/kvbm_common"]
from kvbm_common.cuda.device_sums import sums_are_right
from tests.gpu.fake_runtime import FakeRuntime
print(sums_are_right(FakeRuntime()))
"""
    code, said = in_a_bare_interpreter(run, NEVER - {"xxhash"})
    assert (code, said.strip()) == (0, "True"), said
