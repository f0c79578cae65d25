"""`lru`: the least recently used block leaves first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice

from kvbm_common.identity import SequenceHash


class Lru:
    """Least recently used: the victim is the block that became free the longest ago.

    Because chains are freed leaves first, a leaf goes before its parent.
    """

    def __init__(self) -> None:
        self._free: OrderedDict[SequenceHash, None] = OrderedDict()

    def fill(self, blocks: Iterable[SequenceHash]) -> None:
        """Free blocks, oldest first; only into an empty policy."""
        assert not self._free
        self._free = OrderedDict.fromkeys(blocks)

    def admit(self, block: SequenceHash, parent: SequenceHash) -> None:
        assert block not in self._free
        self._free[block] = None

    def hold(self, block: SequenceHash) -> None:
        del self._free[block]

    def free(self, block: SequenceHash) -> None:
        assert block not in self._free
        self._free[block] = None

    def touch(self, block: SequenceHash) -> None:
        pass  # `free` follows, and moves it.

    def forget(self, block: SequenceHash) -> None:
        del self._free[block]

    def victims(self, count: int) -> list[SequenceHash]:
        return list(islice(self._free, count))

    def __len__(self) -> int:
        return len(self._free)
