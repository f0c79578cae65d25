"""`lru`: the least recently used block leaves first."""

from __future__ import annotations

from itertools import islice

from kvbm_common.eviction.order import FreeOrder
from kvbm_common.identity import SequenceHash
from kvbm_common.tier.blocks import BlockColumns


class Lru:
    """Least recently used: the victim is the block that became free the longest ago.

    Because chains are freed leaves first, a leaf goes before its parent.
    """

    def __init__(self) -> None:
        self._free = FreeOrder()

    def fill(self, former: BlockColumns) -> None:
        self._free.fill(former)

    def admit(self, block: SequenceHash, parent: SequenceHash) -> None:
        assert block not in self._free
        self._free.add(block)

    def hold(self, block: SequenceHash) -> None:
        self._free.remove(block)

    def free(self, block: SequenceHash) -> None:
        assert block not in self._free
        self._free.add(block)

    def touch(self, block: SequenceHash) -> None:
        pass  # `free` follows, and moves it.

    def forget(self, block: SequenceHash) -> None:
        self._free.remove(block)

    def victims(self, count: int) -> list[SequenceHash]:
        return list(islice(self._free, count))

    def __len__(self) -> int:
        return len(self._free)
