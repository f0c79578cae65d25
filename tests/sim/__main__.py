"""`python -m tests.sim SEED`: run one seed, or with `--count` many, in `--jobs` processes.

Many seeds stop at the first one that fails. With `--file` they go on later where they were, after
an interruption, a failure that was mended, or with a larger `--count`.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
import traceback
from pathlib import Path

from tests.sim.campaign import Campaign, load
from tests.sim.one_seed import report, run_elsewhere
from tests.sim.simulation import Simulation
from tests.sim.statistics import Statistics


def main() -> int:
    """Run what was asked for; the exit status says whether all held."""
    arguments = parse()
    if arguments.report:
        report(arguments.seed, arguments.count)
        return 0
    if arguments.count == 1:
        return run_one(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    progress = load(arguments.file, arguments.seed, arguments.count)
    campaign = Campaign(
        progress, run_elsewhere, jobs=arguments.jobs, keep_going=arguments.keep_going,
        path=arguments.file, say=lambda line: print(line, flush=True),
    )  # fmt: skip
    try:
        held = campaign.run()
    except KeyboardInterrupt:
        return 130
    if arguments.statistics:
        print(*progress.statistics.lines(), sep="\n")
    print(f"failed: {sorted(progress.failed) or 'none'}")
    return int(not held)


def parse() -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("seed", type=int, help="the first seed, or the only one")
    parser.add_argument("--count", type=int, default=1, help="how many seeds, from this one on")
    parser.add_argument("--jobs", type=int, default=1, help="processes that run seeds")
    parser.add_argument("--file", type=Path, help="where the progress is kept")
    parser.add_argument("--keep-going", action="store_true", help="run on after a failure")
    parser.add_argument(
        "--statistics", action="store_true", help="print how many seeds met what, and how often"
    )
    parser.add_argument(
        "--verbose", action="store_true", help="of one seed: every message, checks at each step"
    )
    parser.add_argument("--report", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def run_one(arguments: argparse.Namespace) -> int:
    """Run one seed and print how it went; with `verbose` every message, and checks at each step."""
    started_s, verbose = time.perf_counter(), arguments.verbose
    checks = {"check_every": 1} if verbose else {}
    simulation = Simulation(arguments.seed, traced=verbose, **checks)
    world, outcome = simulation.world, "held"
    try:
        simulation.run()
    except Exception as error:
        outcome = f"FAILED at {world.now:.1f} ms: {type(error).__name__}: {error}"
        if verbose:
            print(*world.log, sep="\n")
            traceback.print_exc()
    if arguments.statistics:
        print(*Statistics.of(world).lines(), sep="\n")
    took_s = time.perf_counter() - started_s
    print(f"seed {arguments.seed}: {outcome} ({world.steps} steps, {took_s:.2f} s)")
    if verbose:
        print(world.plan, dict(sorted(world.marks.items())), f"digest {world.digest:08x}")
    return int(outcome != "held")


if __name__ == "__main__":
    sys.exit(main())
