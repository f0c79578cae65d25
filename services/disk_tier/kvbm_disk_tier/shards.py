"""Shards: which of a host's disk tiers writes a block.

Rendezvous hashing: every instance gives every block a weight, and the heaviest writes it. When an
instance comes or goes, only the blocks that it wins or held change hands. A block that is on disk
already stays readable where it is, whoever would write it today.
"""

from __future__ import annotations

from collections.abc import Iterable

import xxhash
from kvbm_common.identity import SequenceHash


class Shards:
    """The instances that write now, as one of them sees them."""

    def __init__(self, own: str) -> None:
        self._own = own
        self._seeds: dict[str, int] = {own: _seed(own)}

    @property
    def instances(self) -> frozenset[str]:
        """Who writes."""
        return frozenset(self._seeds)

    def set(self, instances: Iterable[str]) -> None:
        """Who writes from now on. Whoever is not among them writes nothing."""
        self._seeds = {instance: _seed(instance) for instance in sorted(instances)}

    def owner(self, block: SequenceHash) -> str | None:
        """Who writes this block; None when nobody writes."""
        if not self._seeds:
            return None
        return max(self._seeds, key=lambda instance: _weight(block, self._seeds[instance]))

    def owned(self, blocks: list[SequenceHash]) -> list[SequenceHash]:
        """Those that we write, in the given order."""
        if self._own not in self._seeds:
            return []
        if len(self._seeds) == 1:
            return blocks
        return [block for block in blocks if self.owner(block) == self._own]


def _seed(instance: str) -> int:
    return xxhash.xxh3_64_intdigest(instance.encode())


def _weight(block: SequenceHash, seed: int) -> int:
    return xxhash.xxh3_64_intdigest(block, seed=seed)
