"""The paged cache's bookkeeping: references, names and LRU eviction, as engines do it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from kvbm_common.identity import SequenceHash


class BlockPool:
    """Device blocks. A block with references is in use; one without can be found until reused.

    The same name may be in two blocks: two requests computed it side by side.
    """

    def __init__(self, block_count: int) -> None:
        self.block_count = block_count
        self._references = [0] * block_count
        self._name: list[SequenceHash | None] = [None] * block_count
        self._blocks: dict[SequenceHash, OrderedDict[int, None]] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(block_count))

    @property
    def free_count(self) -> int:
        """Return the number of blocks without references."""
        return len(self._free)

    def find(self, name: SequenceHash) -> int | None:
        """Return a block that holds the content of this name, or None."""
        blocks = self._blocks.get(name)
        return next(iter(blocks)) if blocks else None

    def names(self) -> list[SequenceHash]:
        """Return the names of everything that can be found."""
        return list(self._blocks)

    def hold(self, blocks: Iterable[int]) -> None:
        """Add a reference to each block."""
        for block in blocks:
            if self._references[block] == 0:
                del self._free[block]
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Take a reference off each; the last of a chain is reused first."""
        for block in reversed(blocks):
            assert self._references[block] > 0
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free[block] = None

    def allocate(self, count: int) -> tuple[list[int], list[SequenceHash]] | None:
        """Allocate blocks with one reference each; returns them and the names that were evicted, or
        None if there are not enough."""
        if count > len(self._free):
            return None
        blocks: list[int] = []
        evicted: list[SequenceHash] = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            name = self._name[block]
            if name is not None:
                self._forget(block, name)
                evicted.append(name)
            self._references[block] = 1
            blocks.append(block)
        return blocks, evicted

    def give_name(self, block: int, name: SequenceHash) -> None:
        """Name a block that is full and computed: it can be found from now on."""
        assert self._references[block] > 0
        assert self._name[block] is None
        self._name[block] = name
        self._blocks.setdefault(name, OrderedDict())[block] = None

    def evict(self, name: SequenceHash) -> int:
        """Let no block be found by this name any more, in use or not; returns how many were."""
        blocks = list(self._blocks.get(name, ()))
        for block in blocks:
            self._forget(block, name)
        return len(blocks)

    def reset(self) -> bool:
        """Forget every name; False while a block is in use."""
        if len(self._free) < self.block_count:
            return False
        self._name = [None] * self.block_count
        self._blocks.clear()
        return True

    def _forget(self, block: int, name: SequenceHash) -> None:
        self._name[block] = None
        blocks = self._blocks[name]
        del blocks[block]
        if not blocks:
            del self._blocks[name]

    def check(self) -> None:
        """Assert every invariant of the pool."""
        assert len(self._free) == sum(count == 0 for count in self._references)
        named = {block for blocks in self._blocks.values() for block in blocks}
        assert named == {block for block, name in enumerate(self._name) if name is not None}
