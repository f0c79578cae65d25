"""Offered names: blocks that the host tier was offered, or gave, in its present life."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from kvbm_common.identity import SequenceHash

NAMES_MAX = 65_536
"""6 MB. A block that is forgotten is offered again when a prompt meets it on the device, and the
host tier skips it."""


class OfferedNames:
    """At most NAMES_MAX names; the oldest make room."""

    def __init__(self) -> None:
        self._epoch = 0
        # Ordered: of a plain dict whose front was deleted, the first entry is not found at once.
        self._names: OrderedDict[SequenceHash, None] = OrderedDict()

    def __contains__(self, name: SequenceHash) -> bool:
        return name in self._names

    def serve(self, epoch: int) -> None:
        """Forget all names when another life of the host tier serves."""
        if epoch != self._epoch:
            self._epoch = epoch
            self._names.clear()

    def add(self, names: Iterable[SequenceHash]) -> None:
        """Note that the host tier has these blocks, or will."""
        for name in names:
            self._names.pop(name, None)
            self._names[name] = None
        while len(self._names) > NAMES_MAX:
            self._names.popitem(last=False)

    def discard(self, names: Iterable[SequenceHash]) -> None:
        """Forget blocks that the host tier may not have: the next request with them offers them."""
        for name in names:
            self._names.pop(name, None)
