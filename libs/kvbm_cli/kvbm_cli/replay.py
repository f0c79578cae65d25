"""Replay: a trace of requests through an eviction policy, and the most that any could have hit.

A request is a chain of blocks. Its hits are the leading blocks that the tier has (a block counts
only if all before it hit). The tier then takes the rest, as far as there is room beside the blocks
in use, and frees the chain, leaf first, as the services do.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from kvbm_common.eviction import EvictionPolicy
from kvbm_common.identity import HASH_BYTES, SequenceHash

ROOT = SequenceHash(bytes(HASH_BYTES))
Chain = tuple[SequenceHash, ...]


@dataclass(frozen=True, slots=True)
class Requests:
    """The requests to replay: chains of named blocks, in order."""

    chains: tuple[Chain, ...]
    block_count: int
    """Distinct blocks."""

    @property
    def references(self) -> int:
        """Blocks asked for, over all requests."""
        return sum(map(len, self.chains))


def requests_of(requests: Iterable[Iterable[int | str]]) -> Requests:
    """Name the blocks of each request by all ids up to theirs, as tiers do.

    So equal ids after different prefixes are different blocks.
    """
    names: dict[tuple[SequenceHash, int | str], SequenceHash] = {}
    chains: list[Chain] = []
    for ids in requests:
        parent, chain = ROOT, []
        for block in ids:
            name = names.get((parent, block))
            if name is None:
                name = names[parent, block] = _name(parent, block)
            chain.append(name)
            parent = name
        chains.append(tuple(chain))
    return Requests(tuple(chains), len(names))


def _name(parent: SequenceHash, block: int | str) -> SequenceHash:
    text = parent + repr(block).encode()
    return SequenceHash(hashlib.blake2b(text, digest_size=HASH_BYTES).digest())


def hits_of(requests: Requests, policy: EvictionPolicy, slot_count: int) -> int:
    """Return how many blocks hit in a tier of so many slots under this policy."""
    here: set[SequenceHash] = set()
    return sum(_serve(chain, policy, here, slot_count) for chain in requests.chains)


def _serve(chain: Chain, policy: EvictionPolicy, here: set[SequenceHash], slot_count: int) -> int:
    """Serve one request from the tier and return its hits."""
    hits = 0
    for name in chain:
        if name not in here:
            break
        policy.touch(name)
        policy.hold(name)
        hits += 1
    new = [place for place in range(hits, len(chain)) if chain[place] not in here]
    short = len(new) + len(here) - slot_count
    if short > 0:
        for name in policy.victims(short):
            policy.forget(name)
            here.remove(name)
    del new[slot_count - len(here) :]
    for place in new:
        name = chain[place]
        policy.admit(name, chain[place - 1] if place else ROOT)
        policy.hold(name)
        here.add(name)
    for place in reversed(new):
        policy.free(chain[place])
    for place in range(hits - 1, -1, -1):
        policy.free(chain[place])
    return hits


def bound_of(requests: Requests, slot_count: int) -> int:
    """Return the most blocks that any policy can hit, even one that knows the future.

    Between two uses a block is kept or not; if kept, it takes a slot from one request to the other.
    Choose as many such spans as possible with at most `slot_count` at any time: whenever there are
    too many, give up the one that ends last (Belady's rule; of equal ends the deeper block). That
    is optimal for spans (Carlisle and Lloyd 1995). A block's next use is never before its
    parent's, so no block is kept without its parent: the hits are prefix hits.

    No tier reaches it, because it also needs no slot for a block that does not come back.
    """
    upcoming = _next_uses(requests.chains)
    kept: dict[SequenceHash, int] = {}
    order: list[tuple[int, int, SequenceHash]] = []
    hits = 0
    for chain, following in zip(requests.chains, upcoming, strict=True):
        for name in chain:
            hits += kept.pop(name, None) is not None
        for depth, (name, use) in enumerate(zip(chain, following, strict=True)):
            if use is not None:
                kept[name] = use
                heappush(order, (-use, -depth, name))
        while len(kept) > slot_count:
            use, _, name = heappop(order)
            if kept.get(name) == -use:
                del kept[name]
    return hits


def _next_uses(chains: Sequence[Chain]) -> list[list[int | None]]:
    """Return, for each block of each request, the number of the next request that has it."""
    seen: dict[SequenceHash, int] = {}
    uses: list[list[int | None]] = []
    for number in range(len(chains) - 1, -1, -1):
        uses.append([seen.get(name) for name in chains[number]])
        seen.update(dict.fromkeys(chains[number], number))
    uses.reverse()
    return uses
