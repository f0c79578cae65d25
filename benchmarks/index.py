"""The index's core against Dynamo's RadixTree: stored and removed blocks a second, and matches.

Each side runs in a process of its own on one core, takes bytes, and is measured in CPU seconds of
all its threads, so that other processes do not count; the rounds of both sides take turns.
"""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from benchmarks import index_nats
from benchmarks.harness import Row, info_row, percentile, rate_row, time_row
from benchmarks.index_workload import BATCHES, BLOCKS, MATCH_BLOCKS, SOURCES
from tests.dynamo_env import dynamo_python

ROOT = Path(__file__).parent.parent
ROUNDS = 3
LIMIT_S = 300
BLOCK_BYTES_MAX = 200

Figures = dict[str, Any]


def run() -> list[Row]:
    """All batch sizes, then services; about ten minutes."""
    theirs, ours = str(dynamo_python()), sys.executable
    taken: dict[tuple[str, int], list[Figures]] = defaultdict(list)
    for _ in range(ROUNDS):
        for batch in BATCHES:
            taken["ours", batch].append(_measure(ours, "index_ours", str(batch)))
            taken["theirs", batch].append(_measure(theirs, "index_dynamo", str(batch)))
    shared = _measure(ours, "index_ours", "shared")["match_s"]
    listed = _measure(ours, "index_ours", "listed")
    rates = [
        _rate(verb, batch, taken["ours", batch], taken["theirs", batch])
        for verb in ("stored", "removed")
        for batch in BATCHES
    ]
    return [*rates, *_matches(taken), *_memory(taken),
            info_row(f"match, {MATCH_BLOCKS} blocks that all {SOURCES} sources hold, p50",
                     percentile(shared, 0.5) * 1e6, unit="µs"),
            time_row("memory, when blocks in the middle of chains were sought",
                     listed["bytes"] / BLOCKS, unit="bytes/block", target=BLOCK_BYTES_MAX),
            info_row("the first question for a block that nobody has, after 1 M blocks",
                     listed["first_s"] * 1e3, unit="ms"),
            info_row("the next one", listed["next_s"] * 1e6, unit="µs"),
            *index_nats.run()]  # fmt: skip


def _measure(python: str, module: str, argument: str) -> Figures:
    command = [python, "-m", f"benchmarks.{module}", argument]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr.decode()
    figures: Figures = msgspec.json.decode(done.stdout)
    return figures


def _rate(verb: str, batch: int, ours: list[Figures], theirs: list[Figures]) -> Row:
    return rate_row(
        f"{verb}, {batch} blocks per event",
        BLOCKS / median(one[f"{verb}_s"] for one in ours) / 1e6,
        unit="M blocks/s",
        reference=BLOCKS / median(one[f"{verb}_s"] for one in theirs) / 1e6,
        target=1.0,
    )


def _matches(taken: dict[tuple[str, int], list[Figures]]) -> list[Row]:
    ours, theirs = (
        [second for batch in BATCHES for one in taken[side, batch] for second in one["match_s"]]
        for side in ("ours", "theirs")
    )
    machine = [second for batch in BATCHES for one in taken["ours", batch]
               for second in one["machine_s"]]  # fmt: skip
    value, reference = percentile(ours, 0.5) * 1e6, percentile(theirs, 0.5) * 1e6
    ratio = value / reference
    return [
        Row(name=f"match, {MATCH_BLOCKS} blocks, p50 (less is better)", unit="µs",
            value=round(value, 1), reference=round(reference, 1), ratio=round(ratio, 3),
            target=1.0, met=ratio <= 1.0),
        time_row(f"match, {MATCH_BLOCKS} blocks, p99", percentile(ours, 0.99) * 1e6,
                 unit="µs", target=50.0),
        info_row("RadixTree's p99", percentile(theirs, 0.99) * 1e6, unit="µs"),
        info_row("p99 of a sum without memory, in our process", percentile(machine, 0.99) * 1e6,
                 unit="µs"),
        info_row("its p50", percentile(machine, 0.5) * 1e6, unit="µs"),
    ]  # fmt: skip


def _memory(taken: dict[tuple[str, int], list[Figures]]) -> list[Row]:
    def bytes_per_block(side: str) -> float:
        held = max(one["bytes"] for batch in BATCHES for one in taken[side, batch])
        return float(held / BLOCKS)

    return [
        time_row("memory, at the worst batch size", bytes_per_block("ours"), unit="bytes/block",
                 target=BLOCK_BYTES_MAX),
        info_row("RadixTree's memory", bytes_per_block("theirs"), unit="bytes/block"),
    ]  # fmt: skip
