"""What has become of a block that a host tier misses, as this tier knows it."""

from __future__ import annotations

from collections.abc import Sequence

from kvbm_common.breaker import BreakerState
from kvbm_common.identity import SequenceHash
from kvbm_common.wire.explain import FateEntry

from kvbm_disk_tier.tier import Tier
from kvbm_disk_tier.writes import Writes


def fates_of(
    tier: Tier, writes: Writes, names: Sequence[SequenceHash], now_ms: int
) -> list[FateEntry]:
    """One for each block. What another instance of this kind writes is not ours to explain."""
    owned = set(writes.shards.owned(names))
    return [_fate_of(tier, writes, name, now_ms, owned=name in owned) for name in names]


def _fate_of(
    tier: Tier, writes: Writes, name: SequenceHash, now_ms: int, *, owned: bool
) -> FateEntry:
    if tier.table.find(name) is not None:
        return FateEntry(why="held")
    if writes.is_waiting(name):
        return FateEntry(why="waiting", detail=_why_it_waits(tier, writes))
    fate = tier.fates.get(name)
    if fate is not None:
        return FateEntry(why=fate.why, ago_ms=max(0, now_ms - fate.at_ms), detail=fate.detail)
    if owned and writes.filter.enabled and not tier.staging:
        return FateEntry(why="filtered", detail=_count(writes, name))
    return FateEntry(why="")


def _why_it_waits(tier: Tier, writes: Writes) -> str:
    if tier.problem:
        return f"the store: {tier.problem}"
    if tier.breaker.state is not BreakerState.CLOSED:
        return "bypassed: it fails or is too slow"
    if writes.budget.bytes_per_day and writes.budget.level <= 0:
        return "the write budget is used up"
    return "its write had not begun or ended"


def _count(writes: Writes, name: SequenceHash) -> str:
    count = writes.filter.count(name)
    if not count:
        return "was wanted too long ago to count"
    return f"count {count} of {writes.filter.pass_count}"
