"""Shards: which of a host's disk tiers writes a block.

Rendezvous hashing: every instance gives every block a weight, and the heaviest writes it. When an
instance comes or goes, only the blocks that it wins or held change hands. A block that is on disk
already stays readable where it is, whichever instance would write it today.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kvbm_common.identity import SequenceHash
from kvbm_common.tier.rendezvous import owner_of


def writers_of(accepting: Mapping[str, bool]) -> frozenset[str]:
    """Choose the writers, skipping instances that take no blocks now. If none does, each keeps its
    own until it can."""
    return frozenset(name for name, accepts in accepting.items() if accepts) or frozenset(accepting)


class Shards:
    """The instances that write now, as one of them sees them."""

    def __init__(self, own: str) -> None:
        assert own, "an instance has a name"
        self.is_alone = True
        """No other instance writes: every block is ours."""
        self._own = own
        self._names: dict[str, bytes] = {own: own.encode()}

    @property
    def instances(self) -> frozenset[str]:
        """Return the instances that write."""
        return frozenset(self._names)

    def set(self, instances: Iterable[str]) -> None:
        """Set the writers from now on. An instance that is not among them writes nothing."""
        self._names = {instance: instance.encode() for instance in sorted(instances)}
        assert "" not in self._names, "an instance has a name"
        self.is_alone = self._names.keys() == {self._own}

    def owner(self, block: SequenceHash) -> str | None:
        """Return the writer of this block; None when no instance writes."""
        return owner_of(block, self._names)

    def owned(self, blocks: Sequence[SequenceHash]) -> Sequence[SequenceHash]:
        """Return those that this instance writes, in the given order."""
        if self._own not in self._names:
            return []
        if self.is_alone:
            return blocks
        return [block for block in blocks if self.owner(block) == self._own]
