"""Folded blocks: taken in their order, once, with the slots that they had."""

from __future__ import annotations

import weakref

from kvbm_common.tier.blocks import BlockColumns
from kvbm_common.tier.folded_blocks import FoldedBlocks

from tests.libs.helpers import block


def folded(*numbers: int) -> FoldedBlocks:
    """Blocks in slots of ten times their numbers."""
    return FoldedBlocks(BlockColumns.of({10 * number: block(number) for number in numbers}))


def test_blocks_are_taken_in_their_order_and_once() -> None:
    blocks = folded(3, 1, 2)
    assert (len(blocks), blocks.slots()) == (3, {10, 20, 30})
    assert blocks.take(2) == [(30, block(3)), (10, block(1))]
    assert (len(blocks), blocks.slots()) == (1, {20})
    assert blocks.take(9) == [(20, block(2))]
    assert (len(blocks), blocks.slots()) == (0, set())
    assert blocks.take(1) == []


def test_a_block_can_be_read_without_being_taken() -> None:
    blocks = folded(3, 1)
    assert blocks[10] == block(1)
    assert len(blocks) == 2


def test_columns_are_given_up_with_their_last_block() -> None:
    """Columns of millions of blocks do not stay in memory for nothing."""
    columns = BlockColumns.of({10: block(1), 20: block(2)})
    alive, blocks = weakref.ref(columns.slots), FoldedBlocks(columns)
    del columns
    blocks.take(1)
    assert alive() is not None
    blocks.take(1)
    assert alive() is None
