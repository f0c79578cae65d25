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
from kvbm_common.wire.events import Tier
from kvbm_common.wire.scores import PlaceScore

from kvbm_index.chains import Chains
from kvbm_index.holdings import Holdings

SHARED_SOURCES = ("host-tier-", "disk-tier-")
"""How the sources begin that every engine of a host can read from."""

Held = list[tuple[Tier, Chains]]


def scores(
    holdings: Holdings, asked: Sequence[SequenceHash], weights: Mapping[Tier, float]
) -> list[PlaceScore]:
    """Every place with at least one block, the highest score first."""
    hosts = {holder.host for holder in holdings.holders_of(asked[0])} if asked else set()
    found: list[PlaceScore] = []
    for host in sorted(hosts):
        shared: Held = []
        engines: dict[tuple[str, int], Held] = defaultdict(list)
        for holder, chains in holdings.on(host):
            if holder.source.startswith(SHARED_SOURCES):
                shared.append((holder.tier, chains))
            else:
                engines[holder.source, holder.rank].append((holder.tier, chains))
        for (source, rank), own in {("", 0): [], **engines}.items():
            blocks = _run_length([chains for _, chains in own + shared], asked)
            run = set(asked[:blocks])
            if run and (not source or any(chains.among(run) for _, chains in own)):
                score = _score(own + shared, run, weights)
                found.append(
                    PlaceScore(host=host, source=source, rank=rank, blocks=blocks, score=score)
                )
    return sorted(found, key=lambda one: (-one.score, one.host, one.source, one.rank))


def _run_length(places: Sequence[Chains], asked: Sequence[SequenceHash]) -> int:
    """The longest run that some of them have together."""
    length = 0
    while length < len(asked):
        step = max((chains.run_length(asked[length:]) for chains in places), default=0)
        if step == 0:
            break
        length += step
    return length


def _score(held: Held, rest: set[SequenceHash], weights: Mapping[Tier, float]) -> float:
    total = 0.0
    for tier, chains in sorted(held, key=lambda one: -weights.get(one[0], 0.0)):
        found = chains.among(rest)
        total += weights.get(tier, 0.0) * len(found)
        rest = rest - found
    assert not rest, "somebody holds every block of the run"
    return total
