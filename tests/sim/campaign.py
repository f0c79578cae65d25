"""A campaign: many seeds in several processes, which can be interrupted and goes on later."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from tests.sim.one_seed import Outcome
from tests.sim.statistics import Statistics

SEEDS_PER_JOB = 200
"""Seeds that one process runs: its start takes as long as one or two of them."""
LINE_EVERY_S = 60.0
Run = Callable[[int, int], Iterator[Outcome]]
"""Runs so many seeds from one on."""
Print = Callable[[str], None]


class Progress(msgspec.Struct):
    """What has been run of a campaign."""

    first: int
    end: int
    """The seed after the last one."""
    done: list[tuple[int, int]] = msgspec.field(default_factory=list)
    """Seeds that have been run: the first, and the one after the last; in order, apart."""
    failed: dict[int, str] = msgspec.field(default_factory=dict)
    cpu_s: float = 0.0
    elapsed_s: float = 0.0
    statistics: Statistics = msgspec.field(default_factory=Statistics)
    """Of the seeds that have held."""

    @property
    def count(self) -> int:
        """Return how many seeds have been run."""
        return sum(end - first for first, end in self.done)

    def take(self, outcome: Outcome) -> None:
        """Note how a seed went."""
        if outcome.failure:
            self.failed[outcome.seed] = outcome.failure
        else:
            self.statistics.add(outcome.statistics)
        self.cpu_s += outcome.cpu_s
        self.done = merged([*self.done, (outcome.seed, outcome.seed + 1)])

    def left(self) -> list[tuple[int, int]]:
        """Return the seeds that are left, in parts for one process each."""
        starts = [self.first, *(end for _, end in self.done)]
        ends = [*(first for first, _ in self.done), self.end]
        return [
            (first, min(SEEDS_PER_JOB, end - first))
            for start, end in zip(starts, ends, strict=True)
            for first in range(start, end, SEEDS_PER_JOB)
        ]

    def line(self) -> str:
        """Return what a person wants to know now and then."""
        count = self.count
        took_s = self.cpu_s / max(count, 1)
        left_h = (self.end - self.first - count) * self.elapsed_s / max(count, 1) / 3600
        return (
            f"{count} of {self.end - self.first} seeds, {len(self.failed)} failed; "
            f"{self.elapsed_s / 60:.0f} min, {took_s:.2f} s of a processor each, "
            f"{left_h:.1f} h to go"
        )


def merged(parts: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return ranges in order, those that touch as one."""
    found: list[tuple[int, int]] = []
    for first, end in sorted(parts):
        if found and found[-1][1] == first:
            found[-1] = (found[-1][0], end)
        else:
            found.append((first, end))
    return found


def load(path: Path | None, first: int, count: int) -> Progress:
    """Return the progress that a file holds, or none; seeds that have failed are run again."""
    if path is None or not path.exists():
        return Progress(first, first + count)
    progress = msgspec.json.decode(path.read_bytes(), type=Progress)
    if progress.first != first or progress.end > first + count:
        raise SystemExit(f"{path} is of the seeds {progress.first} to {progress.end - 1}")
    progress.end = first + count
    for seed in progress.failed:
        progress.done = [part for one in progress.done for part in without(one, seed)]
    progress.failed.clear()
    return progress


def without(part: tuple[int, int], seed: int) -> list[tuple[int, int]]:
    """Return what is left of a range when one seed is taken out."""
    first, end = part
    if not first <= seed < end:
        return [part]
    return [(a, b) for a, b in ((first, seed), (seed + 1, end)) if a < b]


def save(path: Path, progress: Progress) -> None:
    """Write the progress down, whole or not at all."""
    new = path.with_name(path.name + ".new")
    new.write_bytes(msgspec.json.format(msgspec.json.encode(progress)) + b"\n")
    new.replace(path)


class Campaign:
    """Runs what is left of a campaign."""

    def __init__(
        self, progress: Progress, run: Run, *, jobs: int, keep_going: bool, path: Path | None,
        say: Print = print,
    ) -> None:  # fmt: skip
        self.progress = progress
        self._run, self._say, self._path = run, say, path
        self._keep_going = keep_going
        self._parts = progress.left()[::-1]
        self._outcomes: queue.Queue[Outcome | None] = queue.Queue()
        self._stopping = threading.Event()
        self._jobs = [threading.Thread(target=self._work, daemon=True) for _ in range(jobs)]

    def run(self) -> bool:
        """Run until the end, or until the first failure; tell whether all seeds have held."""
        for job in self._jobs:
            job.start()
        try:
            self._listen()
        finally:
            self._stopping.set()
            self._note()
        for job in self._jobs:
            job.join()
        return not self.progress.failed

    def _listen(self) -> None:
        """Hear the jobs until all have ended."""
        working, began_s = len(self._jobs), time.monotonic()
        before_s, line_at_s = self.progress.elapsed_s, began_s + LINE_EVERY_S
        while working:
            try:
                outcome = self._outcomes.get(timeout=max(0.0, line_at_s - time.monotonic()))
            except queue.Empty:
                line_at_s += LINE_EVERY_S
                self._note()
                continue
            self.progress.elapsed_s = before_s + time.monotonic() - began_s
            if outcome is None:
                working -= 1
                continue
            self.progress.take(outcome)
            if outcome.failure:
                self._say(f"seed {outcome.seed} FAILED {outcome.failure}")
                self._say(f"    .venv/bin/python -m tests.sim {outcome.seed} --verbose")
                if not self._keep_going:
                    return

    def _note(self) -> None:
        self._say(self.progress.line())
        if self._path is not None:
            save(self._path, self.progress)

    def _work(self) -> None:
        """Run one part after the other."""
        while self._parts and not self._stopping.is_set():
            try:
                first, count = self._parts.pop()
            except IndexError:
                break  # Another job has taken the last one.
            for outcome in self._run(first, count):
                self._outcomes.put(outcome)
                if self._stopping.is_set():
                    return
        self._outcomes.put(None)
