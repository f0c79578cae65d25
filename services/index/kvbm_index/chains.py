"""The blocks of one holder, kept so that a match is a binary search and not a walk.

Every block names its parent, and what is false of the parents is written down as a *hole*:

    the parent of a block that is held is held, too, or it is in `holes`

So if `asked[i]` is held and none of `asked[:i]` is a hole, all of `asked[:i]` are held: eleven
lookups find the end of a run of 1,024 blocks, and a set operation sees that it has no hole. A hole
is a block that was removed before its children, or never announced. It is gone as soon as it is
stored, or its last child is removed. To know that, we keep who has no child (`leaves`) and who has
several (`branches`); everybody else has one.

Children are not listed, and a block's ancestors never walked. That costs a dict instead of a set:
bulk operations in C on both, about 100 bytes a block. What was tried: one dict from block to a mask
of all holders takes half as long again per event, since it outgrows the processor's caches where
each holder's own dict does not; plain sets match in 90 µs what takes 10 µs here.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise, repeat

from kvbm_common.identity import SequenceHash


class Chains:
    """What one holder has. Truthy as long as that is something."""

    __slots__ = ("_branches", "_holes", "_leaves", "_parents", "_roots")

    def __init__(self) -> None:
        self._parents: dict[SequenceHash, SequenceHash] = {}
        self._leaves: set[SequenceHash] = set()
        self._branches: dict[SequenceHash, int] = {}
        self._holes: set[SequenceHash] = set()
        self._roots: set[SequenceHash] = set()

    def __len__(self) -> int:
        return len(self._parents)

    def __contains__(self, block: SequenceHash) -> bool:
        return block in self._parents

    def __iter__(self) -> Iterator[SequenceHash]:
        return iter(self._parents)

    @property
    def hole_count(self) -> int:
        """Parents that are not held, without the roots of namespaces."""
        return len(self._holes)

    @property
    def roots(self) -> frozenset[SequenceHash]:
        """Parents of first blocks."""
        return frozenset(self._roots)

    def items(self) -> tuple[list[SequenceHash], list[SequenceHash]]:
        """All blocks, and the parent of each."""
        return list(self._parents), list(self._parents.values())

    def add(self, run: list[SequenceHash]) -> None:
        """A run of blocks behind its parent, `run[0]`: each one's parent is the one before it."""
        parents = self._parents
        if len(run) < 2:
            return
        first, last = run[1], run[-1]
        if first in parents or last in parents or not self._holes.isdisjoint(run[1:]):
            # Announced again, or before its parent: one by one.
            for parent, block in pairwise(run):
                self._add_one(block, parent)
            return
        count = len(parents) + len(run) - 1
        if first is last:
            parents[first] = run[0]
        else:
            parents.update(zip(run[1:], run, strict=False))
        if len(parents) == count:
            self._leaves.add(last)
            self._gain_child(run[0])
        else:
            # Some of the inner ones were held, or one is there twice.
            self._count_children()

    def add_root(self, root: SequenceHash) -> None:
        """The parent of first blocks, for which nobody asks: it is no hole."""
        if root not in self._roots:
            self._roots.add(root)
            self._count_children()

    def load(
        self,
        hashes: Sequence[SequenceHash],
        parents: Sequence[SequenceHash],
        roots: frozenset[SequenceHash],
    ) -> None:
        """Many blocks at once, the parent of each, and which parents are roots."""
        self._roots |= roots
        self._parents.update(zip(hashes, parents, strict=True))
        self._count_children()

    def discard(self, hashes: list[SequenceHash]) -> None:
        """These are gone; what is not held is passed over."""
        if (
            len(hashes) < 2
            or (hashes[-1] not in self._leaves and hashes[0] not in self._leaves)
            or (self._branches and not self._branches.keys().isdisjoint(hashes))
        ):
            for block in hashes:
                self._discard_one(block)
            return
        parents = list(map(self._parents.pop, hashes, repeat(None)))
        above, below = parents[0], parents[-1]
        if above is not None and parents[1:] == hashes[:-1] and hashes[-1] in self._leaves:
            self._lose_end(hashes[-1], above)
        elif below is not None and parents[:-1] == hashes[1:] and hashes[0] in self._leaves:
            self._lose_end(hashes[0], below)
        else:
            # Not one end of a chain: put them back, and take them out one by one.
            self._parents.update(
                (block, parent)
                for block, parent in zip(hashes, parents, strict=True)
                if parent is not None
            )
            for block in hashes:
                self._discard_one(block)

    def run_length(self, asked: Sequence[SequenceHash]) -> int:
        """How many of `asked`, from the first on, are held without a hole.

        `asked` is a chain: each one's parent is the one before it.
        """
        parents = self._parents
        if not asked or asked[0] not in parents:
            return 0
        if asked[-1] in parents:
            length = len(asked)
        else:
            # From the end, so that what is sorted goes up: not held, then held.
            length = len(asked) - bisect_left(asked[::-1], True, key=parents.__contains__)
        if not self._holes or self._holes.isdisjoint(
            asked if length == len(asked) else asked[:length]
        ):
            return length
        return next(at for at, block in enumerate(asked) if block not in parents)

    def among(self, blocks: set[SequenceHash]) -> set[SequenceHash]:
        """Those of some blocks that are held."""
        return blocks & self._parents.keys()

    def check(self) -> None:
        """Every invariant, O(n)."""
        children = Counter(self._parents.values())
        for root in self._roots:
            children.pop(root, None)
        assert self._holes == children.keys() - self._parents.keys(), "holes are missing parents"
        assert self._leaves == self._parents.keys() - children.keys(), "leaves have no children"
        several = {block: count for block, count in children.items() if count > 1}
        assert self._branches == several, "branches have several children"

    # ---- inside ------------------------------------------------------------------------------

    def _add_one(self, block: SequenceHash, parent: SequenceHash) -> None:
        if block in self._parents:
            return
        self._parents[block] = parent
        if block in self._holes:
            self._holes.remove(block)
        else:
            self._leaves.add(block)
        self._gain_child(parent)

    def _discard_one(self, block: SequenceHash) -> None:
        parent = self._parents.pop(block, None)
        if parent is None:
            return
        if block in self._leaves:
            self._leaves.remove(block)
        else:
            self._holes.add(block)
        self._lose_child(parent)

    def _lose_end(self, leaf: SequenceHash, parent: SequenceHash) -> None:
        self._leaves.remove(leaf)
        self._lose_child(parent)

    def _gain_child(self, parent: SequenceHash) -> None:
        if parent in self._leaves:
            self._leaves.remove(parent)
        elif parent in self._parents or parent in self._holes:
            self._branches[parent] = self._branches.get(parent, 1) + 1
        elif parent not in self._roots:
            self._holes.add(parent)

    def _lose_child(self, parent: SequenceHash) -> None:
        count = self._branches.get(parent)
        if count is not None:
            if count == 2:
                del self._branches[parent]
            else:
                self._branches[parent] = count - 1
        elif parent in self._parents:
            self._leaves.add(parent)
        elif parent not in self._roots:
            self._holes.remove(parent)

    def _count_children(self) -> None:
        """Everything but the parents anew."""
        children = Counter(self._parents.values())
        for root in self._roots:
            children.pop(root, None)
        self._holes = children.keys() - self._parents.keys()
        self._leaves = self._parents.keys() - children.keys()
        self._branches = (
            {block: count for block, count in children.items() if count > 1}
            if len(children) < len(self._parents)
            else {}
        )
