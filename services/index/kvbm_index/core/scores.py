"""Scores: what a prompt is worth where, with all tiers together that an engine can reach.

A *place* is one rank of an engine, with its own blocks and those of the host and disk tiers of its
host; the place without a source is what any other engine of that host finds. Its run may change
tiers on the way: ten blocks in the device, the next ten on disk. Each block of it counts with the
weight of the best tier that has it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from kvbm_common.identity import SequenceHash
from kvbm_common.wire.events import TIER_SOURCES, Tier
from kvbm_common.wire.scores import PlaceScore

from kvbm_index.core.holdings import Holdings

Held = tuple[Tier, list[tuple[int, int]]]
"""Which parts of the question a holder has: first and behind the last."""


def scores(
    holdings: Holdings, asked: Sequence[SequenceHash], weights: Mapping[Tier, float]
) -> list[PlaceScore]:
    """Score every place with at least one block, the highest score first."""
    hosts = {holder.host for holder in holdings.holders_of(asked[0])} if asked else set()
    found: list[PlaceScore] = []
    for host in sorted(hosts):
        shared: list[Held] = []
        engines: dict[tuple[str, int], list[Held]] = defaultdict(list)
        for holder, chains in holdings.on(host):
            held = (holder.tier, chains.ranges(asked))
            if holder.source.startswith(TIER_SOURCES):
                shared.append(held)
            else:
                engines[holder.source, holder.rank].append(held)
        for (source, rank), own in {("", 0): [], **engines}.items():
            blocks = _run_length(own + shared)
            assert 0 <= blocks <= len(asked), f"{blocks} of {len(asked)} blocks on {host}"
            if blocks and (not source or _begins_below(own, blocks)):
                score = _score(own + shared, blocks, weights)
                found.append(
                    PlaceScore(host=host, source=source, rank=rank, blocks=blocks, score=score)
                )
    return sorted(found, key=lambda one: (-one.score, one.host, one.source, one.rank))


def _run_length(held: Sequence[Held]) -> int:
    """Return the length of the longest run that some holders have together."""
    length = 0
    for start, end in sorted(part for _, parts in held for part in parts):
        if start > length:
            break
        length = max(length, end)
    return length


def _begins_below(own: Sequence[Held], blocks: int) -> bool:
    return any(start < blocks for _, parts in own for start, _ in parts)


def _score(held: Sequence[Held], blocks: int, weights: Mapping[Tier, float]) -> float:
    assert blocks > 0, "nothing is scored"
    total, rest = 0.0, set(range(blocks))
    for tier, parts in sorted(held, key=lambda one: -weights.get(one[0], 0.0)):
        found = rest.intersection(at for part in parts for at in range(*part))
        total += weights.get(tier, 0.0) * len(found)
        rest -= found
    assert not rest, "every block of the run has a holder"
    return total
