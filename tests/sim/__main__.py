"""`python -m tests.sim SEED [--verbose]`: run one seed of the simulation."""

from __future__ import annotations

import argparse
import sys
import time
import traceback

from tests.sim.simulation import make


def main() -> int:
    """Run one seed, or many from it on; the exit status says whether all held."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("seed", type=int)
    parser.add_argument("--count", type=int, default=1, help="how many seeds, from this one on")
    parser.add_argument("--verbose", action="store_true", help="print what led to a failure")
    arguments = parser.parse_args()
    failed = 0
    for seed in range(arguments.seed, arguments.seed + arguments.count):
        started = time.perf_counter()
        simulation = make(seed, traced=arguments.verbose, check_every=1 if arguments.verbose else 8)
        world = simulation.world
        try:
            simulation.run()
            outcome = "good"
        except Exception as error:
            failed += 1
            outcome = f"FAILED at {world.now:.1f} ms: {type(error).__name__}: {error}"
            if arguments.verbose:
                print(*world.log, sep="\n")
                traceback.print_exc()
        seconds = time.perf_counter() - started
        print(f"seed {seed}: {outcome} ({world.steps} steps, {seconds:.2f} s)")
        if arguments.verbose:
            print(world.plan, dict(sorted(world.marks.items())), f"digest {world.digest:08x}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
