"""Batches: how many blocks move together between an arena and a disk."""

from __future__ import annotations

BATCH_UNIT_BYTES = 1024 * 1024
BATCH_BLOCKS_MOST = 256


def batch_blocks(blocks_max: int, bytes_max: int, slot_bytes: int) -> int:
    """Blocks of one batch: as many as have `bytes_max`; where that is 0, `blocks_max`.

    Question, lease, record and synchronisation cost the same for any batch: with 16 blocks of
    256 KiB in each the disk waited for us. With 16 of 4 MiB two batches were all that was in
    flight, ended together, and then the disk waited for us as well.
    """
    if not bytes_max:
        return blocks_max
    return max(1, min(bytes_max // max(1, slot_bytes), BATCH_BLOCKS_MOST))
