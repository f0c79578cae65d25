"""Avoided blocks: those that failed to load lately, and are not asked for again for a while."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from kvbm_common.identity import SequenceHash


class FailedBlocks:
    """Names with an end each, `block_count_max` of them: the oldest make room."""

    def __init__(self, *, avoid_ms: int, block_count_max: int) -> None:
        self._avoid_ms = avoid_ms
        self._block_count_max = block_count_max
        # Ordered: of a plain dict whose front was deleted, the first entry is not found at once.
        self._until_ms: OrderedDict[SequenceHash, int] = OrderedDict()
        """In the order of their ends, as all last equally long."""

    def __len__(self) -> int:
        return len(self._until_ms)

    def add(self, name: SequenceHash, now_ms: int) -> None:
        """Add a block that has failed, so that it is avoided; the oldest blocks make room."""
        self._until_ms.pop(name, None)
        while len(self._until_ms) >= self._block_count_max:
            self._until_ms.popitem(last=False)
        self._until_ms[name] = now_ms + self._avoid_ms
        assert len(self._until_ms) <= max(1, self._block_count_max), len(self._until_ms)

    def clear(self) -> None:
        """Forget all blocks: what failed was in another arena."""
        self._until_ms.clear()

    def run_before(self, names: Sequence[SequenceHash], now_ms: int) -> int:
        """Return how many names come before the first that is avoided."""
        if not self._until_ms:
            return len(names)
        known = (i for i, name in enumerate(names) if self._until_ms.get(name, now_ms) > now_ms)
        return next(known, len(names))

    def tick(self, now_ms: int) -> None:
        """Forget those whose time is over."""
        while self._until_ms:
            oldest = next(iter(self._until_ms))
            if self._until_ms[oldest] > now_ms:
                return
            del self._until_ms[oldest]
