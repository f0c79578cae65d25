"""Eviction: hit rates of `prefix` beside LRU's and the bound, and what a block costs.

Two capacities for each load of `eviction_loads`, in parts of its distinct blocks.
"""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Iterator

from kvbm_cli.replay import ROOT, Requests, bound_of, hits_of, requests_of
from kvbm_common.eviction import POLICIES, make_policy
from kvbm_common.identity import SequenceHash

from benchmarks.eviction_loads import LOADS
from benchmarks.harness import Row, info_row

REQUESTS = 4000
SEED = 1
SHARES = (0.01, 0.1)
BAR_POINTS = 0.5
COST_LOAD, COST_SHARE = "chat", 0.05
HELD_BLOCKS = 100_000


def run() -> list[Row]:
    """Every load; then CPU time and memory."""
    loads = {name: requests_of(make(REQUESTS, SEED)) for name, make in LOADS.items()}
    rows = [_rate(name, load, share) for name, load in loads.items() for share in SHARES]
    return [*rows, *_costs(loads[COST_LOAD])]


def _rate(name: str, load: Requests, share: float) -> Row:
    slot_count = max(1, int(share * load.block_count))
    part = 100 / load.references
    lru = part * hits_of(load, make_policy("lru"), slot_count)
    ours = part * hits_of(load, make_policy("prefix", slot_count), slot_count)
    bound = part * bound_of(load, slot_count)
    return Row(
        name=f"{name}, room for {share:.0%}: `prefix` (reference: `lru`; bound {bound:.1f} %)",
        unit="%", value=round(ours, 1), reference=round(lru, 1),
        ratio=round(ours / lru, 2) if lru >= 1 else None,
        target=round(1 - BAR_POINTS / lru, 3) if lru >= 1 else None,
        met=ours >= lru - BAR_POINTS,
    )  # fmt: skip


def _costs(load: Requests) -> Iterator[Row]:
    slot_count = int(COST_SHARE * load.block_count)
    for policy in POLICIES:
        started = time.process_time()
        hits_of(load, make_policy(policy, slot_count), slot_count)
        cost_us = (time.process_time() - started) / load.references * 1e6
        yield info_row(f"`{policy}`: all calls for a block asked for", cost_us, unit="µs")
    for policy in POLICIES:
        yield info_row(f"`{policy}`: memory for a block", _bytes_per_block(policy), unit="B")


def _bytes_per_block(policy_name: str) -> float:
    names = [SequenceHash(number.to_bytes(16, "big")) for number in range(1, HELD_BLOCKS + 1)]
    tracemalloc.start()
    policy = make_policy(policy_name, HELD_BLOCKS)
    for place, name in enumerate(names):
        policy.admit(name, names[place - 1] if place % 20 else ROOT)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return held / len(policy)
