"""Campaigns: what is left to run, first failures, interruptions, and processes that die."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sim.campaign import SEEDS_PER_JOB, Campaign, Progress, load, merged, save
from tests.sim.one_seed import NeverEnds, Outcome, cpu_limit, run_elsewhere, run_seed
from tests.sim.simulation import Simulation

COUNT = 3 * SEEDS_PER_JOB


class Seeds:
    """Seeds without a simulation: some fail."""

    def __init__(self, *failing: int) -> None:
        self.failing = failing
        self.run: list[int] = []

    def __call__(self, first: int, count: int) -> Iterator[Outcome]:
        for seed in range(first, first + count):
            self.run.append(seed)
            yield Outcome(seed, "it fails" if seed in self.failing else "", 0.5)


def campaign(
    seeds: Seeds, progress: Progress, *, jobs: int = 1, keep_going: bool = False,
    path: Path | None = None,
) -> tuple[bool, list[str]]:  # fmt: skip
    """Run what is left; return whether all has held, and what was said."""
    said: list[str] = []
    one = Campaign(progress, seeds, jobs=jobs, keep_going=keep_going, path=path, say=said.append)
    return one.run(), said


def test_jobs_share_the_seeds_and_run_each_once() -> None:
    """Goal: every seed is run by one of the jobs."""
    seeds, progress = Seeds(), Progress(0, COUNT)
    held, said = campaign(seeds, progress, jobs=2)
    assert held
    assert sorted(seeds.run) == list(range(COUNT))
    assert (progress.done, progress.cpu_s, progress.left()) == ([(0, COUNT)], COUNT / 2, [])
    assert said[-1].startswith(f"{COUNT} of {COUNT} seeds, 0 failed")


def test_the_first_failure_ends_a_campaign_with_its_command() -> None:
    """Goal: what is printed can be pasted."""
    seeds, progress = Seeds(7, 9), Progress(0, COUNT)
    held, said = campaign(seeds, progress)
    assert not held
    assert progress.failed == {7: "it fails"}
    assert "    .venv/bin/python -m tests.sim 7 --verbose" in said


def test_with_keep_going_all_failures_are_found() -> None:
    """Goal: a night's campaign does not end with its first minute."""
    progress = Progress(0, COUNT)
    held, _ = campaign(Seeds(7, 9), progress, keep_going=True)
    assert not held
    assert sorted(progress.failed) == [7, 9]
    assert progress.count == COUNT


def test_a_campaign_goes_on_where_it_was(tmp_path: Path) -> None:
    """1. It ends with a failure. 2. The cause was mended: that seed and the others are run.

    3. With a larger count only the new seeds are.
    """
    path = tmp_path / "campaign.json"
    campaign(Seeds(7), load(path, 0, 10), path=path)
    seeds = Seeds()
    held, _ = campaign(seeds, load(path, 0, 10), path=path)
    assert held
    assert seeds.run == [7, 8, 9]
    seeds = Seeds()
    campaign(seeds, load(path, 0, 12), path=path)
    assert seeds.run == [10, 11]
    assert load(path, 0, 12).cpu_s == 13 / 2


def test_a_file_of_other_seeds_is_refused(tmp_path: Path) -> None:
    """Goal: no campaign is taken for another one."""
    path = tmp_path / "campaign.json"
    save(path, Progress(0, 10))
    for first, count in ((1, 10), (0, 9)):
        with pytest.raises(SystemExit, match="is of the seeds 0 to 9"):
            load(path, first, count)


def test_ranges_that_touch_are_one() -> None:
    """Goal: the file stays small, in whatever order the jobs report."""
    assert merged([(4, 5), (0, 2), (2, 3)]) == [(0, 3), (4, 5)]


def test_seeds_run_in_a_process_of_their_own() -> None:
    """Goal: the reports of a real process are those of the seeds that were asked for."""
    outcomes = list(run_elsewhere(0, 2))
    assert [(one.seed, one.failure, one.statistics.seeds) for one in outcomes] == [
        (0, "", 1),
        (1, "", 1),
    ]


def test_a_process_that_dies_is_the_failure_of_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: a crash is found, and the seeds after it are run all the same."""
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    outcomes = list(run_elsewhere(3, 2))
    assert [one.seed for one in outcomes] == [3, 4]
    assert {one.failure for one in outcomes} == {"its process ended with 1"}


def test_what_a_seed_raises_is_its_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: the text says when, and what."""

    def broken(simulation: Simulation) -> None:
        simulation.world.run_until(10)
        raise AssertionError("a promise is broken")

    monkeypatch.setattr(Simulation, "run", broken)
    assert run_seed(0).failure == "at 10.0 ms: AssertionError: a promise is broken"


def test_a_seed_without_an_end_is_ended() -> None:
    """Goal: a loop in the product is found as a failure."""
    with pytest.raises(NeverEnds):
        spin()


def spin() -> None:
    """Use a processor for longer than is allowed."""
    with cpu_limit(0.05):
        while True:
            pass
