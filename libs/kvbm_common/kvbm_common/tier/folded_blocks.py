"""Committed blocks of a former life, kept in columns until each is made a `Block`."""

from __future__ import annotations

from kvbm_common.identity import SequenceHash
from kvbm_common.tier.blocks import Block, BlockColumns

FOLDED = Block(SequenceHash(b""), SequenceHash(b""), b"", 0, 0)
"""Stands for a block of a former life that is kept in columns only."""


class FoldedBlocks:
    """Columns of blocks, unfolded from the oldest on; the columns go when nothing is left."""

    def __init__(self, columns: BlockColumns) -> None:
        self._columns = columns
        self._taken = 0
        """So many of the blocks, or their slots, are like all others."""

    def __len__(self) -> int:
        """Return how many blocks are still to be unfolded."""
        return len(self._columns) - self._taken

    def __getitem__(self, slot: int) -> Block:
        """Return the block that a slot had."""
        return self._columns[slot]

    def slots(self) -> set[int]:
        """Return the slots whose blocks are still to be unfolded; for `check`."""
        return set(self._columns.slots[self._taken :].tolist())

    def take(self, count: int) -> list[tuple[int, Block]]:
        """Unfold the next `count` blocks; returns each with the slot that it had."""
        end = self._taken + count
        blocks = self._columns.blocks(self._taken, end)
        slots = self._columns.slots[self._taken : end].tolist()
        self._taken += len(blocks)
        if len(self) == 0:
            self._columns, self._taken = BlockColumns.of({}), 0
        return list(zip(slots, blocks, strict=True))
