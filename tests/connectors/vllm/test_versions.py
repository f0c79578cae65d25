"""What versions of vLLM do differently, without vLLM; the suite of vLLM has the rest."""

from __future__ import annotations

import pytest
from kvbm_connectors.vllm.versions import tables_of

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
