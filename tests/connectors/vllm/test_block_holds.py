"""References to blocks in vLLM's pool."""

from __future__ import annotations

import pytest
from kvbm_connectors.vllm.block_holds import BlockHolds

from tests.connectors.vllm.pool import Pool


def test_a_block_is_held_until_every_reference_is_back() -> None:
    pool, holds = Pool(), BlockHolds()
    holds.bind(pool)
    holds.hold([3, 4])
    holds.hold([4])
    assert (len(holds), pool.held()) == (3, [3, 4])
    holds.release([3, 4])
    assert (len(holds), pool.held()) == (1, [4])
    holds.release([4])
    assert (len(holds), pool.held()) == (0, [])


def test_the_first_block_of_a_run_is_the_last_to_be_reused() -> None:
    """Goal: a prefix is of use without what is behind it, and not the other way round."""
    pool, holds = Pool(), BlockHolds()
    holds.bind(pool)
    holds.hold([3, 4, 5])
    holds.release([3, 4, 5])
    assert pool.freed == [5, 4, 3]


def test_nothing_can_be_held_before_vllm_shows_its_pool() -> None:
    holds = BlockHolds()
    assert not holds.ready
    holds.bind(object())
    assert not holds.ready
    holds.bind(Pool())
    assert holds.ready


def test_the_null_block_is_never_held_and_nothing_is_given_back_twice() -> None:
    holds = BlockHolds()
    holds.bind(Pool())
    with pytest.raises(AssertionError, match="null block"):
        holds.hold([3, 0])
    with pytest.raises(AssertionError, match="1 of 0 held"):
        holds.release([3])
