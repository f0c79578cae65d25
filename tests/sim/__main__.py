"""`python -m tests.sim SEED [--count N] [--verbose] [--statistics]`: run seeds, one by one."""

from __future__ import annotations

import argparse
import sys
import time
import traceback

from tests.sim.simulation import Simulation
from tests.sim.statistics import Statistics


def main() -> int:
    """Run one seed, or many from it on; the exit status says whether all held."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("seed", type=int)
    parser.add_argument("--count", type=int, default=1, help="how many seeds, from this one on")
    parser.add_argument("--verbose", action="store_true", help="print what led to a failure")
    parser.add_argument("--quiet", action="store_true", help="print only seeds that fail")
    parser.add_argument(
        "--statistics", action="store_true", help="print how many seeds met what, and how often"
    )
    arguments = parser.parse_args()
    seeds, statistics = range(arguments.seed, arguments.seed + arguments.count), Statistics()
    failed = [
        seed
        for seed in seeds
        if not run(seed, statistics, verbose=arguments.verbose, quiet=arguments.quiet)
    ]
    if arguments.statistics:
        print(*statistics.lines(), sep="\n")
    print(f"{len(seeds) - len(failed)} of {len(seeds)} seeds held; failed: {failed or 'none'}")
    return int(bool(failed))


def run(seed: int, statistics: Statistics, *, verbose: bool, quiet: bool) -> bool:
    """Run one seed and print how it went; with `verbose` every message, and checks at each step."""
    started_s = time.perf_counter()
    simulation = Simulation(seed, traced=verbose, check_every=1 if verbose else 16)
    world, held, outcome = simulation.world, True, "held"
    try:
        simulation.run()
    except Exception as error:
        held, outcome = False, f"FAILED at {world.now:.1f} ms: {type(error).__name__}: {error}"
        if verbose:
            print(*world.log, sep="\n")
            traceback.print_exc()
    statistics.add(world)
    took_s = time.perf_counter() - started_s
    if not (quiet and held):
        print(f"seed {seed}: {outcome} ({world.steps} steps, {took_s:.2f} s)", flush=True)
    if verbose:
        print(world.plan, dict(sorted(world.marks.items())), f"digest {world.digest:08x}")
    return held


if __name__ == "__main__":
    sys.exit(main())
