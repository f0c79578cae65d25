"""The order in which names became free: those of a former life first, then as they come."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain

from kvbm_common.identity import SequenceHash
from kvbm_common.tier.blocks import BlockColumns


class FreeOrder:
    """An ordered set of names.

    A million names of a former life come as a list and a set, in a quarter of the time that an
    OrderedDict takes for them; each leaves them once, for good.
    """

    def __init__(self) -> None:
        self._former: list[SequenceHash] = []
        """Newest first: the end of a list is cheap to cut off. The last of them is here."""
        self._left: set[SequenceHash] = set()
        """Of the former ones those that are still here."""
        self._later: OrderedDict[SequenceHash, None] = OrderedDict()

    def fill(self, former: BlockColumns) -> None:
        """Free blocks, leaves first; only into an empty order."""
        assert not len(self)
        self._former = former.leaves_first()[::-1]
        self._left = set(former.slot_of)  # Twice as fast as from a list: hashes and size are known.
        assert len(self._left) == len(self._former)

    def add(self, name: SequenceHash) -> None:
        """Add a name that is free now."""
        self._later[name] = None

    def remove(self, name: SequenceHash) -> None:
        """Remove a name that is no longer free; raises KeyError when it was not."""
        if name in self._later:
            del self._later[name]
            return
        self._left.remove(name)
        while self._former and self._former[-1] not in self._left:
            self._former.pop()

    def __contains__(self, name: SequenceHash) -> bool:
        return name in self._later or name in self._left

    def __iter__(self) -> Iterator[SequenceHash]:
        if not self._left:
            return iter(self._later)
        return chain(filter(self._left.__contains__, reversed(self._former)), self._later)

    def __len__(self) -> int:
        return len(self._later) + len(self._left)
