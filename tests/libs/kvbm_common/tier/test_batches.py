"""Batches: so many blocks, and more of small ones."""

from __future__ import annotations

import pytest
from kvbm_common.tier.batches import BATCH_BLOCKS_MOST, batch_blocks

MIB = 1 << 20


@pytest.mark.parametrize(
    ("slot_bytes", "blocks"),
    [(4 * MIB, 16), (MIB, 16), (MIB // 4, 64), (4096, BATCH_BLOCKS_MOST), (0, 256)],
)
def test_small_blocks_fill_a_batch_by_their_bytes(slot_bytes: int, blocks: int) -> None:
    assert batch_blocks(16, 16 * MIB, slot_bytes) == blocks


def test_without_a_measure_in_bytes_a_batch_is_counted_in_blocks() -> None:
    assert batch_blocks(2, 0, 4096) == 2
