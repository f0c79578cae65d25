"""`lru`: the least recently used block leaves first. Its order serves the other policies, too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, islice

from kvbm_common.eviction.former_names import FormerNames
from kvbm_common.identity import SequenceHash
from kvbm_common.tier.block_columns import BlockColumns
from kvbm_common.tier.block_order import BlockOrder

TOGETHER_LEAST = 8
"""Blocks that are freed as a batch of their own: a batch takes as much memory as a block."""


class FreeOrder:
    """An ordered set: those of a former life first, then as blocks become free.

    A million names of a former life come at once, into half the memory that a BlockOrder takes for
    them and in a quarter of the time; each leaves them once, for good.
    """

    def __init__(self) -> None:
        self._former: FormerNames | None = None
        """The blocks of a former life that are still here, newest first; None: none is."""
        self._later: BlockOrder[None] = BlockOrder()

    def fill(self, former: BlockColumns) -> None:
        """Free blocks, leaves first; only into an empty order."""
        assert not len(self), f"{len(self)} blocks are free already"
        if len(former):
            self._former = FormerNames(reversed(former.leaves_first()))
        assert len(self) == len(former), f"{len(self)} of {former} are free"

    def free(self, block: SequenceHash) -> None:
        """Add a block that is free now."""
        assert block not in self._later, f"{block.hex()} is freed twice"
        former = self._former
        assert former is None or block not in former, f"{block.hex()} is free since a former life"
        self._later.add(block, None)

    def hold(self, block: SequenceHash) -> None:
        """Remove a block that is no longer free; raises KeyError when it was not."""
        if self._later.pop(block):
            return
        if self._former is None:
            raise KeyError(block)
        self._former.remove(block)
        if not self._former:
            self._former = None

    def free_all(self, blocks: Sequence[SequenceHash]) -> None:
        """Add blocks that are free now, in their order."""
        former = self._former
        assert former is None or not blocks or blocks[0] not in former, (
            f"{blocks[0].hex()} is free since a former life"
        )
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
        if self._former is not None:
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
        return block in self._later or (self._former is not None and block in self._former)

    def __iter__(self) -> Iterator[SequenceHash]:
        return iter(self._later) if self._former is None else chain(self._former, self._later)

    def __len__(self) -> int:
        return len(self._later) + (0 if self._former is None else len(self._former))


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
