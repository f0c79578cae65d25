"""Storms: threads that call several storages at once while services fail, on drawn programs.

`python -m tests.connectors.sglang.storm --seeds 0:20` runs programs, `--calm` without failures,
`--plant NAME` with a mistake planted. Engines of several models, layouts and ranks share a host
tier that is smaller than the traffic, and a disk tier. A page's bytes follow from its key and its
engine's weights, so that each page that is said to be loaded can be compared.
"""

from __future__ import annotations

import argparse
import faulthandler
import random
import signal
import sys
import threading
import time
from collections import Counter

from tests.connectors.sglang.pool import keys_of
from tests.connectors.sglang.storm_caller import Caller
from tests.connectors.sglang.storm_engines import THREADS, Kind, Storm
from tests.connectors.sglang.storm_weather import Weather
from tests.sglang.plants import PLANTS
from tests.vllm.harness import LiveStack, live_stack

STORMY = {"cpu_cache_gb": 0.004, "disk_cache_gb": 0.05, "disable_disk_offload_filter": True}
"""Host memory for some hundred pages: a program evicts."""
CALM = {"cpu_cache_gb": 0.2}
SERVICES = ("consolidator", "index", "host-tier", "disk-tier")
KINDS = (
    Kind("one"), Kind("one"), Kind("odd", "layer_first", 37),
    Kind("heads", "page_first_direct", 5, ranks=2),
    Kind("latent", "layer_first", 96, ranks=2, mla=True),
    Kind("latent", "layer_first", 96, ranks=2, mla=True),
    Kind("hybrid", page_size=33, has_states=True), Kind("hybrid", page_size=33, has_states=True),
)  # fmt: skip
PROGRAM_S, RECOVERY_S = 240.0, 20.0


def run(stack: LiveStack, seed: int, *, calm: bool = False) -> Storm:
    """Run the program of a seed; its `errors` say what was wrong."""
    storm = Storm(stack, seed, calm)
    rng = random.Random(f"kinds {seed}")
    try:
        for kind in rng.sample(KINDS, rng.randint(2, 4)):
            storm.add(kind)
        storm.wait_attached()
        call_all(storm)
        if not storm.errors:
            recover(storm)
    finally:
        storm.close()
    return storm


def call_all(storm: Storm) -> None:
    """Let all threads call, and wait until they have ended."""
    callers = [
        Caller(storm, engine, rank, number)
        for engine in storm.engines
        for rank in engine.ranks
        for number in range(THREADS)
    ]
    threads = [threading.Thread(target=caller.run, name=caller.name) for caller in callers]
    if not storm.is_calm:
        threads.append(threading.Thread(target=Weather(storm).run, name="weather"))
    for thread in threads:
        thread.start()
    until_s = time.monotonic() + PROGRAM_S
    for thread in threads:
        thread.join(max(0.0, until_s - time.monotonic()))
        if thread.is_alive():
            faulthandler.dump_traceback()
            storm.wrong(f"{thread.name} does not end")


def recover(storm: Storm) -> None:
    """Require that each rank stores again, and that all that share its pages load them."""
    storm.over.clear()
    storm.wait_attached()
    for engine in storm.engines:
        for rank in filter(engine.stores, engine.ranks):
            caller = Caller(storm, engine, rank, 0)
            for name in rank.pools:
                give_up_s, number = time.monotonic() + RECOVERY_S, 0
                while not caller.is_shared(name, keys_of(f"{caller.name} again {number}", 4)):
                    number += 1  # A page whose load has failed is not asked for again for a while.
                    if storm.errors or time.monotonic() > give_up_s:
                        storm.wrong(f"{caller.name} does not share {name} again")
                        return


def main() -> int:
    """Run programs until one is wrong, and say what they met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0:5", help="A:B")
    parser.add_argument("--calm", action="store_true")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--plant", default="", choices=["", *PLANTS])
    arguments = parser.parse_args()
    faulthandler.register(signal.SIGUSR1)
    if arguments.plant:
        PLANTS[arguments.plant]()
    low, _, high = arguments.seeds.partition(":")
    until_s = time.monotonic() + 60 * arguments.minutes
    counts: Counter[str] = Counter()
    longest_s: dict[str, float] = {}
    with live_stack(CALM if arguments.calm else STORMY, SERVICES) as stack:
        for seed in range(int(low), int(high)):
            storm = run(stack, seed, calm=arguments.calm)
            counts.update(storm.counts, programs=1)
            longest_s = {
                what: max(storm.longest_s.get(what, 0.0), longest_s.get(what, 0.0))
                for what in storm.longest_s | longest_s
            }
            if storm.errors:
                print(f"seed {seed}:", *storm.errors, sep="\n    ")
                return 1
            if time.monotonic() > until_s:
                break
    print(f"0 errors; {dict(sorted(counts.items()))}")
    print("longest:", ", ".join(f"{what} {s:.2f} s" for what, s in sorted(longest_s.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
