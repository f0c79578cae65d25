"""Waste: what blocks of several sizes leave unused of one medium, and what that costs a block.

A slot table as tiers have it takes offloads of 8 MiB, of one size at random each, until the medium
has been filled four times. Waste is the part of all slabs that no block fills at the end.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from functools import partial

from kvbm_common.eviction import make_policy
from kvbm_common.identity import SequenceHash
from kvbm_common.tier.layout import Layout, rounded_up
from kvbm_common.tier.size_figures import waste_percent
from kvbm_common.tier.slots import Block, SlotTable

from benchmarks.harness import Row, info_row, time_row

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
MEDIA = (1 * GIB, 4 * GIB, 16 * GIB)
WASTE_MAX_PERCENT = 15.0
ROUNDS = 4
BATCH_BYTES = 8 * MIB
NAMESPACE = b"n" * 32
SEED = 1
MIXES: dict[str, Sequence[int]] = {
    "64 KiB alone": (64 * KIB,),
    "64 KiB and 4 MiB": (64 * KIB, 4 * MIB),
    "4 MiB and 64 KiB": (4 * MIB, 64 * KIB),
    "64 KiB to 4 MiB, seven sizes": tuple(64 * KIB << step for step in range(7)),
    "seven odd sizes in between": tuple(1000 * kb for kb in (65, 130, 333, 777, 1450, 2700, 4190)),
}
"""The size that comes first has the medium cut."""


def run() -> list[Row]:
    """Return the waste of each mix on each medium, and what a block costs in the largest."""
    rows: list[Row] = []
    for medium in MEDIA:
        for mix, sizes in MIXES.items():
            percent, cost_us = _filled(medium, sizes)
            what = f"{medium // GIB} GiB, {mix}"
            rows.append(time_row(f"{what}: waste", percent, unit="%", target=WASTE_MAX_PERCENT))
            if medium == MEDIA[-1]:
                rows.append(info_row(f"{what}: the table, per block", cost_us, unit="µs"))
    return rows


def _filled(medium: int, sizes: Sequence[int]) -> tuple[float, float]:
    """Return the waste in percent after the last round, and µs of CPU time per block."""
    rng = random.Random(SEED)
    first = rounded_up(sizes[0])
    table = SlotTable(Layout.of(first, medium // first), partial(make_policy, "lru"))
    number, started = 0, time.process_time()
    for _ in range(ROUNDS * medium // BATCH_BYTES):
        size = rng.choice(sizes)
        count = BATCH_BYTES // rounded_up(size)
        names = [SequenceHash((number + n).to_bytes(16, "big")) for n in range(count)]
        number += count
        if table.room_for(count, size) < count:
            for name in table.victims(count, size).names:
                table.evict(name)
        slots = table.stage_all(names[: table.room_for(count, size)], size)
        blocks = [Block(name, name, NAMESPACE, 0, size) for name in names]
        table.register_all(list(zip(slots, blocks, strict=False)))
    cost_us = (time.process_time() - started) / number * 1e6
    unused = 100 * (1 - table.block_bytes / table.pool.layout.total_bytes)
    assert waste_percent(table) <= unused + 1e-6, "free slabs are not wasted, and count here"
    return unused, cost_us
