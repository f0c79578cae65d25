"""Content: the bytes that a block must hold, as a function of its sequence hash.

Word i of a block is `(i + first_word) · a + b` modulo 2**64, with `a` (odd) and `b` from the hash:
every byte depends on the block's name and on its place in the block, so that a swapped, shifted,
torn or stale block cannot look right.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from kvbm_common.identity import SequenceHash

Words = npt.NDArray[np.uint64]
WORD_BYTES = 8


class Content:
    """Fills and checks blocks of one size. `first_word` is where this rank's part begins."""

    def __init__(self, part_bytes: int, *, rank: int = 0) -> None:
        assert part_bytes % WORD_BYTES == 0
        count = part_bytes // WORD_BYTES
        self._index = np.arange(rank * count, (rank + 1) * count, dtype=np.uint64)
        self._expected = np.empty(count, dtype=np.uint64)

    def fill(self, block: Words, name: SequenceHash) -> None:
        """Write what the block of this name holds."""
        factor = np.uint64(int.from_bytes(name[:8], "little") | 1)
        offset = np.uint64(int.from_bytes(name[8:], "little"))
        np.multiply(self._index, factor, out=block)
        np.add(block, offset, out=block)

    def holds(self, block: Words, name: SequenceHash) -> bool:
        """Return whether the block holds exactly what its name demands."""
        self.fill(self._expected, name)
        return bool(np.array_equal(block, self._expected))
