"""What versions of vLLM do differently, without vLLM; the suite of vLLM has the rest."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from kvbm_connectors.vllm.versions import tables_in, tables_of

from tests.connectors.vllm.requests import BlockSnapshot, BlockState


@pytest.mark.parametrize("state", [
    BlockState({"r": [3, 4, 5]}), BlockSnapshot({"r": ([3, 4, 5],)}),
])  # fmt: skip
def test_both_shapes_of_a_steps_blocks_are_read(state: object) -> None:
    """Goal: vLLM 0.29 hands out block tables, later versions resolve them."""
    assert tables_of(state, "r") == ([3, 4, 5],)
    assert tables_of(state, "another") == ()


def test_a_step_without_block_state() -> None:
    assert tables_of(None, "r") == ()


@dataclass
class Block:
    """vllm.v1.core.kv_cache_utils.KVCacheBlock."""

    block_id: int


@dataclass
class Manager:
    """KVCacheManager, and the KVCacheBlocks that it returns; also a step's block state."""

    blocks: tuple[list[Block], ...]
    req_ids: frozenset[str] = frozenset("r")

    def get_blocks(self, _request: str) -> Manager:
        return self


def test_tables_are_read_out_of_the_manager() -> None:
    """Goal: no block is looked at but those that are asked for."""
    manager = Manager(([Block(3), Block(4)], [Block(7)]))
    first, second = tables_in(manager)(manager, "r")
    assert (len(first), first[1], second[0]) == (2, 4, 7)
    assert tables_in(manager)(manager, "left out") == ()
    assert tables_in(manager)(None, "r") == ()
