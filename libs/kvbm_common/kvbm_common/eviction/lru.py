"""`lru`: the least recently used block leaves first. Its order serves the other policies, too."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import chain, islice

from kvbm_common.identity import SequenceHash
from kvbm_common.tier.blocks import BlockColumns


class FreeOrder:
    """An ordered set: those of a former life first, then as blocks become free.

    A million names of a former life come as a list and a set, in a quarter of the time that an
    OrderedDict takes for them; each leaves them once, for good.
    """

    def __init__(self) -> None:
        self._former: list[SequenceHash] = []
        """Newest first: the end of a list is cheap to cut off. The last of them is here."""
        self._left: set[SequenceHash] = set()
        """The blocks of a former life that are still here."""
        self._later: OrderedDict[SequenceHash, None] = OrderedDict()

    def fill(self, former: BlockColumns) -> None:
        """Free blocks, leaves first; only into an empty order."""
        assert not len(self), f"{len(self)} blocks are free already"
        self._former = former.leaves_first()[::-1]
        self._left = set(former.slot_of)  # Twice as fast as from a list: hashes and size are known.
        assert len(self._left) == len(self._former), "a block of the former life is in two slots"

    def free(self, block: SequenceHash) -> None:
        """Add a block that is free now."""
        assert block not in self._later, f"{block.hex()} is freed twice"
        assert block not in self._left, f"{block.hex()} is free since the former life"
        self._later[block] = None

    def hold(self, block: SequenceHash) -> None:
        """Remove a block that is no longer free; raises KeyError when it was not."""
        if block in self._later:
            del self._later[block]
            return
        self._left.remove(block)
        while self._former and self._former[-1] not in self._left:
            self._former.pop()
        assert bool(self._former) == bool(self._left), (
            f"{block.hex()} was held: {len(self._left)} of {len(self._former)} former ones are left"
        )

    def free_all(self, blocks: Sequence[SequenceHash]) -> None:
        """Add blocks that are free now, in their order."""
        later, count = self._later, len(self._later)
        assert not self._left or self._left.isdisjoint(blocks), "some are free since a former life"
        for block in blocks:
            later[block] = None
        assert len(later) == count + len(blocks), f"of {len(blocks)} blocks some are freed twice"

    def hold_all(self, blocks: Sequence[SequenceHash]) -> None:
        """Remove blocks that are no longer free; raises KeyError when one was not."""
        if self._left:
            for block in blocks:
                self.hold(block)
            return
        later, count = self._later, len(self._later)
        for block in blocks:
            del later[block]
        assert len(later) == count - len(blocks), f"{count} blocks became {len(later)}"

    def renew_all(self, blocks: Sequence[SequenceHash]) -> None:
        """Move free blocks to where they would be if they were freed now."""
        if self._left:
            self.hold_all(blocks)
            self.free_all(blocks)
            return
        for block in blocks:
            self._later.move_to_end(block)

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

    def touch(self, block: SequenceHash) -> None:
        pass  # `free` follows, and moves it.

    def touch_all(self, blocks: Sequence[SequenceHash]) -> None:
        pass

    def forget(self, block: SequenceHash) -> None:
        super().hold(block)

    def victims(self, count: int) -> list[SequenceHash]:
        return list(islice(self, count))
