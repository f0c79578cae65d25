"""Failed blocks: those that did not come lately, and are not asked for again for a while."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from kvbm_common.identity import SequenceHash


class FailedBlocks:
    """Names with an end each, `block_count_max` of them: the oldest make room."""

    def __init__(self, block_count_max: int) -> None:
        assert block_count_max >= 0, f"{block_count_max} failed blocks at most"
        self._block_count_max = block_count_max
        # Ordered: of a plain dict whose front was deleted, the first entry is not found at once.
        self._until_ms: OrderedDict[SequenceHash, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._until_ms)

    def __contains__(self, name: SequenceHash) -> bool:
        return name in self._until_ms

    def add(self, name: SequenceHash, until_ms: int) -> None:
        """Add a block that has failed; the oldest blocks make room."""
        assert until_ms >= 0, f"{name.hex()} counts as failed until {until_ms} ms"
        self._until_ms.pop(name, None)
        self._until_ms[name] = until_ms
        while len(self._until_ms) > self._block_count_max:
            self._until_ms.popitem(last=False)

    def discard(self, name: SequenceHash) -> None:
        """Remove a block: it is announced again, and may be asked for."""
        self._until_ms.pop(name, None)

    def clear(self) -> None:
        """Forget all blocks: what failed was in another arena."""
        self._until_ms.clear()

    def is_failed(self, name: SequenceHash, now_ms: int) -> bool:
        """Tell whether a block has failed lately, and is not to be asked for now."""
        return bool(self._until_ms) and now_ms < self._until_ms.get(name, now_ms)

    def run_before(self, names: Sequence[SequenceHash], now_ms: int) -> int:
        """Return how many names come before the first that has failed lately."""
        if not self._until_ms:
            return len(names)
        known = (i for i, name in enumerate(names) if self.is_failed(name, now_ms))
        return next(known, len(names))

    def tick(self, now_ms: int) -> None:
        """Forget those whose time is over, where all have the same time."""
        while self._until_ms:
            oldest = next(iter(self._until_ms))
            if self._until_ms[oldest] > now_ms:
                return
            del self._until_ms[oldest]
