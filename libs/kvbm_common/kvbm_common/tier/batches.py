"""Batches: how many blocks move together into an arena or out of it."""

from __future__ import annotations

BATCH_UNIT_BYTES = 1024 * 1024
BATCH_BLOCKS_MOST = 256


def batch_blocks(blocks_max: int, bytes_max: int, slot_bytes: int) -> int:
    """Return the blocks in a batch: `blocks_max`, and of small ones as many as have `bytes_max`.

    Question, lease, record and synchronisation cost the same for any batch: with 16 blocks of
    256 KiB in each the disk waited for us, and pulls of 16 blocks of 64 KiB took twice as long.
    """
    return max(blocks_max, min(bytes_max // max(1, slot_bytes), BATCH_BLOCKS_MOST))
