"""vLLM's block pool: references that keep offered blocks from reuse, and its prefix cache.

With one KV group a finished request keeps its blocks while an offer is out. With several, vLLM
frees blocks of a running request that have left their window, so an offer holds each block itself.
Where ids of requests repeat, none may be kept: there an offer does so with one group, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

NULL_BLOCK = 0
"""vLLM's placeholder for blocks that have left a window."""


class BlockHolds:
    """References that the connector has taken. Called by the scheduler's thread alone."""

    def __init__(self) -> None:
        self._pool: Any = None
        self._count = 0

    def __len__(self) -> int:
        """Return how many references are held."""
        return self._count

    @property
    def ready(self) -> bool:
        """Return whether vLLM has shown its pool: nothing can be held before."""
        return self._pool is not None

    def bind(self, pool: Any) -> None:
        """Hold blocks of this pool (vllm.v1.core.block_pool.BlockPool) from now on."""
        assert not self._count, f"{self._count} blocks of another pool are held"
        if all(hasattr(pool, name) for name in ("blocks", "touch", "free_blocks")):
            self._pool = pool

    def hold(self, blocks: Sequence[int]) -> None:
        """Take a reference to each block."""
        assert NULL_BLOCK not in blocks, f"vLLM's null block is no block to hold: {blocks}"
        self._pool.touch([self._pool.blocks[block] for block in blocks])
        self._count += len(blocks)

    def release(self, blocks: Sequence[int]) -> None:
        """Give the references back; the first block of a run is the last to be reused."""
        assert len(blocks) <= self._count, f"{len(blocks)} of {self._count} held blocks"
        self._pool.free_blocks([self._pool.blocks[block] for block in reversed(blocks)])
        self._count -= len(blocks)


def evict_from(pool: Any, group_count: int, request: Any, written: int) -> None:
    """Take the blocks of a request that hold tokens from `written` on out of vLLM's prefix cache.

    vLLM hashes `hash_block_size` tokens at a time: a block is called by the last hash in it.
    """
    for block_hash in request.block_hashes[written // pool.hash_block_size :]:
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


def is_empty(pool: Any) -> bool:
    """Return whether the pool has no block in use and its prefix cache none at all; False where
    that is not known."""
    cached: Any = getattr(pool, "cached_block_hash_to_block", None)
    return bool(is_cleared(pool)) and hasattr(cached, "__len__") and len(cached) == 0
