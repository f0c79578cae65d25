"""`lru`: the least recently used block leaves first. Its order serves the other policies, too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, islice

from kvbm_common.identity import SequenceHash
from kvbm_common.tier.block_columns import BlockColumns
from kvbm_common.tier.block_order import BlockOrder

TOGETHER_LEAST = 8
"""Blocks that are freed as a batch of their own: a batch takes as much memory as a block."""


class FreeOrder:
    """An ordered set: those of a former life first, then as blocks become free.

    A million names of a former life come as a list and a set, in a quarter of the time that an
    BlockOrder takes for them; each leaves them once, for good.
    """

    def __init__(self) -> None:
        self._former: list[SequenceHash] = []
        """Newest first: the end of a list is cheap to cut off. The last of them is here."""
        self._left: set[SequenceHash] = set()
        """The blocks of a former life that are still here."""
        self._later: BlockOrder[None] = BlockOrder()

    def fill(self, former: BlockColumns) -> None:
        """Free blocks, leaves first; only into an empty order."""
        assert not len(self), f"{len(self)} blocks are free already"
        self._former = former.leaves_first()[::-1]
        self._left = set(former.names)
        assert len(self._left) == len(self._former), "a block of the former life is in two slots"

    def free(self, block: SequenceHash) -> None:
        """Add a block that is free now."""
        assert block not in self._later, f"{block.hex()} is freed twice"
        assert block not in self._left, f"{block.hex()} is free since the former life"
        self._later.add(block, None)

    def hold(self, block: SequenceHash) -> None:
        """Remove a block that is no longer free; raises KeyError when it was not."""
        if self._later.pop(block):
            return
        self._left.remove(block)
        while self._former and self._former[-1] not in self._left:
            self._former.pop()
        assert bool(self._former) == bool(self._left), (
            f"{block.hex()} was held: {len(self._left)} of {len(self._former)} former ones are left"
        )

    def free_all(self, blocks: Sequence[SequenceHash]) -> None:
        """Add blocks that are free now, in their order."""
        assert not self._left or self._left.isdisjoint(blocks), "some are free since a former life"
        count = len(self._later)
        self._later.add_all(blocks, None)
        assert len(self._later) == count + len(blocks), f"{count} blocks, then {len(self._later)}"

    def free_some(self, blocks: Sequence[SequenceHash]) -> None:
        """Add blocks that are free now, in their order; a few are no batch of their own."""
        if len(blocks) >= TOGETHER_LEAST:
            self.free_all(blocks)
        else:
            for block in blocks:
                self.free(block)

    def hold_all(self, blocks: Sequence[SequenceHash]) -> None:
        """Remove blocks that are no longer free; raises KeyError when one was not."""
        if self._left:
            for block in blocks:
                self.hold(block)
            return
        count = len(self._later)
        self._later.drop(blocks)
        assert len(self._later) == count - len(blocks), f"{count} blocks became {len(self._later)}"

    def renew_all(self, blocks: Sequence[SequenceHash]) -> None:
        """Move free blocks to where they would be if they were freed now."""
        count = len(self)
        self.hold_all(blocks)
        self.free_all(blocks)
        assert len(self) == count, f"{count} free blocks became {len(self)}"

    def __contains__(self, block: SequenceHash) -> bool:
        return block in self._later or block in self._left

    def __iter__(self) -> Iterator[SequenceHash]:
        if not self._left:
            return iter(self._later)
        return chain(filter(self._left.__contains__, reversed(self._former)), self._later)

    def __len__(self) -> int:
        return len(self._later) + len(self._left)


class Lru(FreeOrder):
    """Least recently used: the victim is the block that became free the longest ago.

    Because chains are freed leaves first, a leaf goes before its parent.
    """

    def admit(self, block: SequenceHash, parent: SequenceHash) -> None:
        super().free(block)

    def admit_all(self, blocks: Sequence[SequenceHash], parents: Sequence[SequenceHash]) -> None:
        assert len(parents) == len(blocks), f"{len(blocks)} blocks, {len(parents)} parents"
        super().free_all(blocks[::-1])

    def touch(self, block: SequenceHash) -> None:
        pass  # `free` follows, and moves it.

    def touch_all(self, blocks: Sequence[SequenceHash]) -> None:
        pass

    def forget(self, block: SequenceHash) -> None:
        super().hold(block)

    def victims(self, count: int) -> list[SequenceHash]:
        return list(islice(self, count))
