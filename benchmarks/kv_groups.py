"""KV groups: what the host tier's rule costs a lookup, and what a window saves of a hit's bytes."""

from __future__ import annotations

import time

from kvbm_common.identity import SequenceHash
from kvbm_common.tier.kv_groups import GroupRun, longest, needed
from kvbm_host_tier.core.group_plan import GroupPlan

from benchmarks.harness import Row, time_row

ROUNDS = 3_000
GROUPS = (GroupRun(16, 171), GroupRun(16, 171, window=32), GroupRun(16, 170, window=1))
"""Full attention, a window of 512 tokens, a recurrent state: 512 blocks."""
TARGET_US = 50.0
LONG_TOKENS, WINDOW_TOKENS = 131_072, 1_024
TARGET_PART = 0.55


def run() -> list[Row]:
    """The shortest of many rounds: other processes only make one longer."""
    names = [
        SequenceHash(bytes([group]) + place.to_bytes(15, "big"))
        for group, run in enumerate(GROUPS)
        for place in range(run.blocks)
    ]
    held = dict.fromkeys(names)
    seconds = min(_plan_s(names, held) for _ in range(ROUNDS))
    logic = "512 blocks in three groups: the longest hit, and the blocks that it needs"
    bytes_ = "128k tokens, every second layer with a window of 1,024: bytes that a hit moves"
    return [
        time_row(logic, seconds * 1e6, unit="µs", target=TARGET_US),
        time_row(bytes_, _part_of_bytes(), unit="of all", target=TARGET_PART),
    ]


def _plan_s(names: list[SequenceHash], held: dict[SequenceHash, None]) -> float:
    started = time.perf_counter()
    plan = GroupPlan.of(GROUPS, names)
    plan.choose(held.__contains__, held.__contains__)
    assert plan.needed(), "everything is there"
    return time.perf_counter() - started


def _part_of_bytes() -> float:
    """Return which part of the bytes of all blocks a hit needs; blocks of both groups are equal."""
    blocks = LONG_TOKENS // 16
    groups = [GroupRun(16, blocks), GroupRun(16, blocks, WINDOW_TOKENS // 16)]
    return sum(map(len, needed(groups, longest(groups)))) / (2 * blocks)
