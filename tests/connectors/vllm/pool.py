"""vLLM's block pool without vLLM: references are counted, and a free block is handed out again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass
class Block:
    """vllm.v1.core.kv_cache_utils.KVCacheBlock."""

    block_id: int
    ref_cnt: int = 0


class Pool:
    """vllm.v1.core.block_pool.BlockPool: block 0 is the null block."""

    def __init__(self, count: int = 32) -> None:
        self.blocks = [Block(number) for number in range(count)]
        self.freed: list[int] = []

    def touch(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            assert block.ref_cnt > 0, f"block {block.block_id} is freed twice"
            block.ref_cnt -= 1
            self.freed.append(block.block_id)

    def held(self) -> list[int]:
        """The blocks with a reference."""
        return [block.block_id for block in self.blocks if block.ref_cnt]
