"""What an onlooker costs the data path: rounds with and without one, in pairs.

Neighbouring rounds are alike, so each round is compared with its neighbour; which of the two is
watched is drawn, and the mean of many pairs has an interval that says how sure it is. What a round
computes for a gigabyte says whether a loss is one: where all cores are busy, more work is less
throughput.
"""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from kvbm_cli.stack import Stack

from benchmarks.harness import Row, bound_row, info_row, interval, processor_s
from benchmarks.probe import Probe

SERVICES = ("consolidator", "index", "host-tier", "metrics")
MIB = 1 << 20
BLOCKS = 256
ROUND_S = 2.0
"""The onlooker asks twice in each, as often as a page and a scrape do."""
PAIRS = 60
TRIMMED = 0.1
"""Of the pairs at either end: a round in which something else took the machine."""
COST_PERCENT = 1.0


@dataclass(frozen=True, slots=True)
class Round:
    """What went through in a round, and what that took."""

    gb_per_s: float
    processor_s_per_gb: float


class Onlooker:
    """The process `benchmarks.onlooker`: looks while it is told to."""

    def __init__(self, stack: Stack) -> None:
        url = stack.services["metrics"].description
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.onlooker", url],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def tell(self, *, looks: bool) -> None:
        """Returns when it has begun, or ended."""
        said = "look" if looks else "rest"
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(said, file=self._process.stdin, flush=True)
        heard = self._process.stdout.readline().strip()
        assert heard == said, f"the onlooker says {heard!r}"


class Load:
    """Blocks go to host memory and back, as fast as they do."""

    def __init__(self, probe: Probe, pids: Iterable[int]) -> None:
        """`pids`: the services, whose processor time counts beside this process's."""
        self._probe, self._pids = probe, tuple(pids)
        self._number = 0

    def round(self) -> Round:
        """A while of it."""
        before_s, started_s, moved = self._computed_s(), time.perf_counter(), 0
        while time.perf_counter() - started_s < ROUND_S:
            moved += self._once()
        gigabytes = moved * MIB / 1e9
        took_s = time.perf_counter() - started_s
        return Round(gigabytes / took_s, (self._computed_s() - before_s) / gigabytes)

    def _computed_s(self) -> float:
        return time.process_time() + sum(map(processor_s, self._pids))

    def _once(self) -> int:
        self._number += 1
        names = self._probe.chain(self._number, BLOCKS)
        assert self._probe.offload(names) == BLOCKS
        request = str(self._number)
        assert self._probe.lookup(request, names).blocks == BLOCKS
        self._probe.start_load(request, range(BLOCKS))
        results = self._probe.wait_loads(1)
        assert all(all(result.intact) for result in results), [r.reason for r in results]
        return 2 * BLOCKS


def cost_rows(stack: Stack) -> list[Row]:
    """Of a stack with SERVICES, in percent of what goes through alone."""
    pairs = in_pairs(stack)
    alone = statistics.median(one.gb_per_s for _, one in pairs)
    computed = statistics.median(one.processor_s_per_gb for _, one in pairs)
    slower = [(1 - w.gb_per_s / a.gb_per_s) * 100 for w, a in pairs]
    dearer = [(w.processor_s_per_gb / a.processor_s_per_gb - 1) * 100 for w, a in pairs]
    watched = "with a page open and a scrape each second"
    return [
        info_row("offload and onboard, nobody looks", alone, unit="GB/s"),
        cost_row(f"throughput lost {watched}", slower),
        info_row("engine and services, nobody looks", computed * 1e3, unit="ms/GB"),
        cost_row(f"processor time more for a GB {watched}", dearer),
    ]


def cost_row(name: str, percents: Sequence[float]) -> Row:
    """The mean over pairs, and where it is with a probability of 95 %."""
    low, mean, high = interval(percents, _trimmed_mean)
    name = f"{name} (95 %: {low:.1f} to {high:.1f})"
    return bound_row(name, mean, low=low, high=high, unit="%", target=COST_PERCENT)


def in_pairs(stack: Stack) -> list[tuple[Round, Round]]:
    """Rounds that were watched, each with its neighbour that was not."""
    source = Probe(stack.settings, "source", block_bytes=MIB, block_count=BLOCKS)
    drawn = random.Random(0)
    pairs: list[tuple[Round, Round]] = []
    try:
        source.start()
        load = Load(source, stack.pids.values())
        load.round()
        with Onlooker(stack) as onlooker:
            for _ in range(PAIRS):
                rounds: dict[bool, Round] = {}
                for looks in drawn.sample((True, False), 2):
                    onlooker.tell(looks=looks)
                    rounds[looks] = load.round()
                pairs.append((rounds[True], rounds[False]))
    finally:
        source.close()
    return pairs


def _trimmed_mean(values: Sequence[float]) -> float:
    cut = int(len(values) * TRIMMED)
    return statistics.fmean(sorted(values)[cut : len(values) - cut])
