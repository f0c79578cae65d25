"""Routes: which engine should take a prompt, by what it has of it and what it has to do.

    cost = compute + load + queue        in blocks: 1 is the time to compute one

    compute  blocks of the prompt that the engine finds nowhere
    load     1 - weight, for each block that it finds: weight 1 is its own device
    queue    blocks of the requests that wait before it, and a little for each that runs

The run that counts is the one of `scores.py`. Where it ends, the host tier of another host may
have the next blocks: the longest run of them that one host has counts as loads from a peer. Equal
costs are ordered by a digest of the prompt's last block and the engine: the same prompt meets the
same order at each replica, and over many prompts each engine comes first equally often.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from kvbm_common.identity import SequenceHash
from kvbm_common.wire.events import Tier
from kvbm_common.wire.routes import EngineLoad, Place, RankedEngine

from kvbm_index.core.candidates import Candidate
from kvbm_index.core.holdings import Holdings
from kvbm_index.core.scores import Overlap, Range, overlaps

COST_DIGITS = 6
"""Costs that differ by less are equal: a sum of floats has an error in its last digits."""
PEER_SOURCES = "host-tier-"
"""Host tiers read from each other's memory; disks and devices of other hosts cannot be reached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """The saving of a block that is found, by its place, and the cost of a running request."""

    weights: Mapping[Tier, float]
    peer_weight: float
    running_blocks: float


def ranked(
    holdings: Holdings,
    asked: Sequence[SequenceHash],
    candidates: Iterable[Candidate],
    prices: Prices,
    tie: bytes,
    peers: Sequence[Range] | None = None,
) -> list[RankedEngine]:
    """Return the candidates with their costs, the least cost first; `tie` orders equals.

    `peers` are ranges that host tiers have, where these holdings are not those of all hosts.
    """
    found = {
        (one.host, one.source, one.rank): one for one in overlaps(holdings, asked, prices.weights)
    }
    if peers is None:
        peers = peer_ranges(holdings, asked) if prices.peer_weight else ()
    runs = _PeerRuns(peers)
    engines = []
    for one in candidates:
        host, source = one.key
        # A rank without blocks of its own finds what its host has.
        overlap = found.get((host, source, one.rank)) or found.get((host, "", 0))
        engines.append(_ranked(one, overlap, runs, len(asked), prices))
    places = {(one.host, one.source, one.rank) for one in engines}
    assert len(places) == len(engines), f"a rank is ranked twice: {engines}"
    return in_order(engines, tie)


def in_order(engines: Iterable[RankedEngine], tie: bytes) -> list[RankedEngine]:
    """Return engines in the order in which they should be given a prompt."""
    return sorted(engines, key=lambda one: (one.cost, _turn(one, tie), one.host, one.source))


def peer_ranges(holdings: Holdings, asked: Sequence[SequenceHash]) -> list[Range]:
    """Return the ranges of a question that host tiers have; none lies within another."""
    found: list[Range] = []
    if asked:
        for _, chains in holdings.of_sources(PEER_SOURCES):
            found += chains.ranges(asked)
    return longest(found)


def longest(ranges: Iterable[Range]) -> list[Range]:
    """Return ranges in their order, without those that are within another.

    >>> longest([(3, 4), (0, 5), (2, 9), (2, 5)])
    [(0, 5), (2, 9)]
    """
    kept: list[Range] = []
    for start, end in sorted(ranges, key=lambda one: (one[0], -one[1])):
        if not kept or end > kept[-1][1]:
            kept.append((start, end))
    return kept


def _ranked(
    one: Candidate, overlap: Overlap | None, peers: _PeerRuns, asked: int, prices: Prices
) -> RankedEngine:
    by_tier: Mapping[Tier, int] = overlap.by_tier if overlap is not None else {}
    blocks = overlap.blocks if overlap is not None else 0
    found: dict[Place, int] = dict(by_tier.items())
    load = sum(_cost_of(prices.weights.get(tier, 0.0)) * n for tier, n in by_tier.items())
    from_peer = peers.following(blocks)
    if from_peer:
        found["peer"] = from_peer
        load += _cost_of(prices.peer_weight) * from_peer
    compute = asked - blocks - from_peer
    assert compute >= 0, f"{one.key} has {blocks} and {from_peer} of {asked} blocks"
    queue = _queue(one.load, asked, prices.running_blocks)
    assert load >= 0, f"{one.key} gains {-load} blocks by loading {found}"
    assert queue >= 0, f"{one.key} has {one.load} to do"
    return RankedEngine(
        host=one.key.host, source=one.key.source, rank=one.rank, compute=compute,
        load=round(load, COST_DIGITS), queue=round(queue, COST_DIGITS),
        cost=round(compute + load + queue, COST_DIGITS), found=found,
    )  # fmt: skip


def _queue(load: EngineLoad, asked: int, running_blocks: float) -> float:
    waiting = load.waiting * asked if load.waiting_blocks is None else load.waiting_blocks
    return waiting + load.running * running_blocks


def _cost_of(weight: float) -> float:
    """Return what remains to be done for a block; a load that gains time is not worth waiting."""
    return max(0.0, 1.0 - weight)


def _turn(one: RankedEngine, tie: bytes) -> bytes:
    name = f"{one.host}/{one.source}/{one.rank}".encode()
    return blake2b(name, key=tie, digest_size=8).digest()


class _PeerRuns:
    """The runs of a question that the memory of other hosts has."""

    def __init__(self, ranges: Sequence[Range]) -> None:
        self._ranges = ranges

    def following(self, blocks: int) -> int:
        """Return how many blocks after the first ones one peer has.

        The ranges are of all hosts. The engine's own host has nothing that begins within the run
        and ends after it, or the run would be longer: every range that counts is of another.
        """
        ends = (end for start, end in self._ranges if start <= blocks < end)
        return max(ends, default=blocks) - blocks
