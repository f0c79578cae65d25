"""One seed, run by itself, and a process that runs many and reports each."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import msgspec

from tests.sim.simulation import Simulation
from tests.sim.statistics import Statistics

SEED_CPU_S = 120.0
"""A seed takes less than a second; one that takes so much has met a loop without an end."""
ROOT = Path(__file__).parents[2]


class NeverEnds(Exception):
    """A seed that goes on and on, while its clock may stand still."""


class Outcome(msgspec.Struct, frozen=True):
    """How a seed went."""

    seed: int
    failure: str = ""
    """What a checker says of it; empty: it has held."""
    cpu_s: float = 0.0
    statistics: Statistics = msgspec.field(default_factory=Statistics)


def run_seed(seed: int, *, cpu_s: float = SEED_CPU_S) -> Outcome:
    """Run one seed; whatever it raises is its failure."""
    started_s, failure = time.process_time(), ""
    simulation = Simulation(seed)
    try:
        with cpu_limit(cpu_s):
            simulation.run()
    except Exception as error:
        failure = f"at {simulation.world.now:.1f} ms: {type(error).__name__}: {error}"
    took_s = time.process_time() - started_s
    return Outcome(seed, failure, took_s, Statistics.of(simulation.world))


@contextmanager
def cpu_limit(limit_s: float) -> Iterator[None]:
    """Raise NeverEnds in the block when it has used so much of a processor."""

    def late(_signal: int, _frame: FrameType | None) -> None:
        raise NeverEnds(f"it has taken {limit_s} s of a processor")

    before = signal.signal(signal.SIGVTALRM, late)
    signal.setitimer(signal.ITIMER_VIRTUAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def report(first: int, count: int) -> None:
    """Run seeds; print a line of JSON for each, as soon as it has ended."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # The campaign has ended: end without a word.
    for seed in range(first, first + count):
        sys.stdout.buffer.write(msgspec.json.encode(run_seed(seed)) + b"\n")
        sys.stdout.buffer.flush()


def run_elsewhere(first: int, count: int) -> Iterator[Outcome]:
    """Run seeds in a process of their own; yield how they went, one by one.

    A process that dies is the failure of the seed that it ran; the others go on in another one.
    """
    end = first + count
    while first < end:
        command = [sys.executable, "-m", "tests.sim", str(first), "--count", str(end - first)]
        with subprocess.Popen([*command, "--report"], stdout=subprocess.PIPE, cwd=ROOT) as process:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    yield msgspec.json.decode(line, type=Outcome)
                    first += 1
            finally:
                process.kill()
        if first < end:
            yield Outcome(first, f"its process ended with {process.returncode}")
            first += 1
