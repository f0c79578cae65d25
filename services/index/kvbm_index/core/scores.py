"""Scores: the value of the blocks of a prompt that each place has, in all tiers that it can reach.

A *place* is one rank of an engine, with its own blocks and those of the host and disk tiers of its
host; the place without a source is what any other engine of that host finds. Its run may change
tiers on the way: ten blocks in the device, the next ten on disk. Each block of it counts with the
weight of the best tier that has it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from kvbm_common.identity import SequenceHash
from kvbm_common.wire.events import TIER_SOURCES, Tier
from kvbm_common.wire.scores import PlaceScore

from kvbm_index.core.holdings import Holdings

Range = tuple[int, int]
"""Blocks of the question: the position of the first one, and the one after the last."""
Held = tuple[Tier, list[Range]]
"""A holder's tier, and the ranges of the question that it has."""


class Overlap(NamedTuple):
    """The longest run of a question that a place has, by the best tier of each block."""

    host: str
    source: str
    rank: int
    blocks: int
    by_tier: Mapping[Tier, int]


def scores(
    holdings: Holdings, asked: Sequence[SequenceHash], weights: Mapping[Tier, float]
) -> list[PlaceScore]:
    """Score every place with at least one block, the highest score first."""
    found = [
        PlaceScore(
            host=one.host, source=one.source, rank=one.rank, blocks=one.blocks,
            score=sum(weights.get(tier, 0.0) * count for tier, count in one.by_tier.items()),
        )
        for one in overlaps(holdings, asked, weights)
    ]  # fmt: skip
    return sorted(found, key=lambda one: (-one.score, one.host, one.source, one.rank))


def overlaps(
    holdings: Holdings, asked: Sequence[SequenceHash], weights: Mapping[Tier, float]
) -> Iterator[Overlap]:
    """Yield what every place with at least one block has; a heavier tier is the better one."""
    hosts = {holder.host for holder in holdings.holders_of(asked[0])} if asked else set()
    by_host = holdings.by_host(hosts)
    for host in sorted(hosts):
        shared: list[Held] = []
        engines: dict[tuple[str, int], list[Held]] = defaultdict(list)
        for holder, chains in by_host[host]:
            held = (holder.tier, chains.ranges(asked))
            if holder.source.startswith(TIER_SOURCES):
                shared.append(held)
            else:
                engines[holder.source, holder.rank].append(held)
        for (source, rank), own in {("", 0): [], **engines}.items():
            blocks = _run_length(own + shared)
            assert 0 <= blocks <= len(asked), f"{blocks} of {len(asked)} blocks on {host}"
            if blocks and (not source or _begins_below(own, blocks)):
                yield Overlap(
                    host, source, rank, blocks, blocks_by_tier(own + shared, blocks, weights)
                )


def _run_length(held: Sequence[Held]) -> int:
    """Return the length of the longest run that some holders have together."""
    length = 0
    for start, end in sorted(one for _, ranges in held for one in ranges):
        if start > length:
            break
        length = max(length, end)
    return length


def _begins_below(own: Sequence[Held], blocks: int) -> bool:
    """Tell whether an engine itself has a block of a run: else the host's own place says it all."""
    return any(start < blocks for _, ranges in own for start, _ in ranges)


def blocks_by_tier(
    held: Sequence[Held], blocks: int, weights: Mapping[Tier, float]
) -> dict[Tier, int]:
    """Count the blocks of the run by the best tier that has each."""
    assert blocks > 0, "nothing is counted"
    counts: dict[Tier, int] = {}
    rest = [(0, blocks)]
    for tier, ranges in sorted(held, key=lambda one: -weights.get(one[0], 0.0)):
        left = _without(rest, sorted(ranges))
        assert _length(left) <= _length(rest), f"{ranges} add to {rest}"
        found = _length(rest) - _length(left)
        if found:
            counts[tier] = counts.get(tier, 0) + found
        rest = left
        if not rest:
            break
    assert not rest, "every block of the run has a holder"
    return counts


def _length(ranges: Sequence[Range]) -> int:
    """Count the blocks of ranges that do not overlap."""
    return sum(end - start for start, end in ranges)


def _without(rest: Sequence[Range], taken: Sequence[Range]) -> list[Range]:
    """Return what is left of sorted ranges without others, which are sorted by their starts."""
    left: list[Range] = []
    place = 0
    for first, end in rest:
        at = first
        while place < len(taken) and taken[place][1] <= at:
            place += 1
        for start, stop in islice(taken, place, None):
            if start >= end or at >= end:
                break
            if start > at:
                left.append((at, start))
            at = max(at, stop)
        if at < end:
            left.append((at, end))
    return left
