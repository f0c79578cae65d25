"""KV groups: what the host tier's rule costs a lookup, and what a window saves of a hit's bytes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median

from kvbm_common.identity import SequenceHash, pack_hashes
from kvbm_common.tier.kv_groups import GroupRun, has_each, largest_boundary, needed
from kvbm_common.wire.local import Found, Lookup, Release
from kvbm_host_tier.core.group_plan import GroupPlan
from kvbm_host_tier.core.messages import FromEngine, ToEngine
from kvbm_host_tier.core.presence import Available

from benchmarks.harness import Row, info_row, time_row
from tests.services.host_tier.helpers import NAMESPACE, Host, incarnation, name

ROUNDS, LONG_ROUNDS = 2_000, 40
BLOCKS, LONG_BLOCKS = 171, 8_192
"""Of each group: 512 in all, and those of 128k tokens."""
TARGET_US = 50.0
LONG_TOKENS, WINDOW_TOKENS = 131_072, 1_024
TARGET_PART = 0.55
ONE_GROUP_BLOCKS = 512


def run() -> list[Row]:
    """Return the median times of plans, and what a window saves."""
    bytes_ = "128k tokens, every second layer with a window of 1,024: bytes that a hit moves"
    short = _plans_us(BLOCKS, 32, ROUNDS)
    long = _plans_us(LONG_BLOCKS, 64, LONG_ROUNDS)
    return [
        *(time_row(f"512 blocks in three groups, {case}", found, unit="µs", target=TARGET_US)
          for case, found in short.items()),
        *(info_row(f"128k tokens in three groups, {case}", found, unit="µs")
          for case, found in long.items()),
        time_row(bytes_, _part_of_bytes(), unit="of all", target=TARGET_PART),
        _one_group(),
    ]  # fmt: skip


def _plans_us(blocks: int, window: int, rounds: int) -> dict[str, float]:
    """Return how long plans take: full attention, a window, a recurrent state."""
    groups = (
        GroupRun(16, blocks),
        GroupRun(16, blocks, window_blocks=window),
        GroupRun(16, blocks, window_blocks=1),
    )
    full, windows, states = (
        [SequenceHash(bytes([group]) + place.to_bytes(15, "big")) for place in range(blocks)]
        for group in range(len(groups))
    )
    cases = {
        "all here": [*full, *windows, *states],
        "nothing here": [],
        "no window or state here": full,
        "one state, far back": [*full, *windows, states[3]],
        "the windows of every second hit": [
            *full, *(name for at, name in enumerate(windows) if at // window % 2), *states
        ],
    }  # fmt: skip
    names = [*full, *windows, *states]
    return {case: _plan_us(groups, names, here, rounds) for case, here in cases.items()}


def _plan_us(
    groups: Sequence[GroupRun], names: list[SequenceHash], here: list[SequenceHash], rounds: int
) -> float:
    held = dict.fromkeys(here)
    find = has_each(held.__contains__)

    def has(asked: Sequence[SequenceHash]) -> bytes:  # As the host tier looks.
        return bytes(len(asked)) if held.keys().isdisjoint(asked) else find(asked)

    took_s = []
    for _ in range(rounds):
        started_s = time.perf_counter()
        plan = GroupPlan.of(groups, names)
        plan.choose(Available(has, has, has))
        plan.needed()
        took_s.append(time.perf_counter() - started_s)
    return median(took_s) * 1e6


def _one_group() -> Row:
    """Compare a lookup of an engine with one KV group, which names no group, with the same one by
    the rule: the host tier's core, all blocks here."""
    host = Host(slots=ONE_GROUP_BLOCKS)
    for first in range(1, ONE_GROUP_BLOCKS, 64):
        host.store(*range(first, first + 64))
    plain, ruled = list[float](), list[float]()
    for _ in range(ROUNDS):
        plain.append(_lookup_s(host, []))
        ruled.append(_lookup_s(host, [GroupRun(NAMESPACE.block_tokens, ONE_GROUP_BLOCKS)]))
    text = "a lookup of 512 blocks of one group, which skips the rule (reference: by the rule)"
    return time_row(text, median(plain) * 1e6, unit="µs", reference=median(ruled) * 1e6, target=1.0)


def _lookup_s(host: Host, groups: list[GroupRun]) -> float:
    """Return how long the core takes for a lookup; its lease ends after it."""
    engine, life, connection = "ada", incarnation(1), b"ada:1/scheduler"
    names = pack_hashes(name(number) for number in range(1, ONE_GROUP_BLOCKS + 1))
    lookup = Lookup(
        engine=engine, incarnation=life, lookup=1, namespace=NAMESPACE.digest, hashes=names,
        lease_ms=1_000, deadline_ms=100, groups=groups,
    )  # fmt: skip
    asked = FromEngine(connection, lookup)
    started_s = time.perf_counter()
    effects = [*host.core.step(asked, host.now_ms), *host.core.settle()]
    took_s = time.perf_counter() - started_s
    told = [one.message for one in effects if isinstance(one, ToEngine)]
    [found] = [one for one in told if isinstance(one, Found)]
    assert len(found.slots) == ONE_GROUP_BLOCKS, found.reason
    release = Release(engine=engine, incarnation=life, lease=found.lease)
    host.core.step(FromEngine(connection, release), host.now_ms)
    host.core.settle()
    return took_s


def _part_of_bytes() -> float:
    """Return which part of the bytes of all blocks a hit needs; blocks of both groups are equal."""
    blocks = LONG_TOKENS // 16
    groups = [GroupRun(16, blocks), GroupRun(16, blocks, WINDOW_TOKENS // 16)]
    return sum(map(len, needed(groups, largest_boundary(groups)))) / (2 * blocks)
