"""vLLM's own prefix cache on the device, as far as the connector looks into its block pool."""

from __future__ import annotations

from typing import Any


def evict_from(pool: Any, group_count: int, request: Any, first: int) -> None:
    """Take the blocks of a request from index `first` on out of vLLM's prefix cache."""
    for block_hash in request.block_hashes[first:]:
        for group in range(group_count):
            # Two requests may have computed the same block: each copy is cached.
            while found := pool.get_cached_block(block_hash, [group]):
                pool.evict_blocks({block.block_id for block in found})


def is_cleared(pool: Any) -> bool | None:
    """Return whether a reset that vLLM has just tried has cleared the pool; None: not known.

    vLLM refuses while any block is in use, but for the null block, which always is.
    """
    if not hasattr(pool, "num_gpu_blocks") or not hasattr(pool, "get_num_free_blocks"):
        return None
    return int(pool.num_gpu_blocks) - int(pool.get_num_free_blocks()) == 1
