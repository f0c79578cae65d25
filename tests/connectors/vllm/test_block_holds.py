"""References to blocks in vLLM's pool."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from kvbm_connectors.vllm.block_holds import BlockHolds, evict_from, is_cleared

from tests.connectors.vllm.pool import Block, Pool


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


class PrefixCache:
    """The prefix cache of vllm.v1.core.block_pool.BlockPool: hash and group → copies of a block."""

    hash_block_size = 4

    def __init__(self) -> None:
        self.copies: dict[tuple[str, int], list[Block]] = {}

    def cache(self, name: str, group: int, *blocks: int) -> None:
        self.copies[name, group] = [Block(number) for number in blocks]

    def get_cached_block(self, name: str, groups: list[int]) -> list[Block] | None:
        found = [self.copies[name, group][0] for group in groups if self.copies.get((name, group))]
        return found if len(found) == len(groups) else None

    def evict_blocks(self, numbers: set[int]) -> None:
        for copies in self.copies.values():
            copies[:] = [block for block in copies if block.block_id not in numbers]

    def left(self) -> dict[tuple[str, int], list[int]]:
        found = {key: [block.block_id for block in copies] for key, copies in self.copies.items()}
        return {key: numbers for key, numbers in found.items() if numbers}


def test_unwritten_blocks_leave_the_prefix_cache_of_every_group() -> None:
    """A request of three hashes, with a copy of the second block that another one has computed.
    Nine of its tokens are written: two blocks, and one token of the third."""
    cache, request = PrefixCache(), SimpleNamespace(block_hashes=["a", "b", "c"])
    for group in (0, 1):
        cache.cache("a", group, 1 + 10 * group)
        cache.cache("b", group, 2 + 10 * group, 5 + 10 * group)
        cache.cache("c", group, 3 + 10 * group)
    evict_from(cache, 2, request, 9)
    assert cache.left() == {("a", 0): [1], ("a", 1): [11], ("b", 0): [2, 5], ("b", 1): [12, 15]}
    evict_from(cache, 2, request, 7)
    assert cache.left() == {("a", 0): [1], ("a", 1): [11]}
    evict_from(cache, 1, request, 0)
    assert cache.left() == {("a", 1): [11]}


@pytest.mark.parametrize(("total", "free", "cleared"), [(8, 7, True), (8, 6, False), (8, 8, False)])
def test_a_pool_is_cleared_when_only_the_null_block_is_in_use(
    total: int, free: int, *, cleared: bool
) -> None:
    pool = SimpleNamespace(num_gpu_blocks=total, get_num_free_blocks=lambda: free)
    assert is_cleared(pool) is cleared


@pytest.mark.parametrize(
    "pool", [SimpleNamespace(num_gpu_blocks=8), SimpleNamespace(get_num_free_blocks=lambda: 7)]
)
def test_a_pool_that_cannot_be_read_may_be_cleared_or_not(pool: SimpleNamespace) -> None:
    assert is_cleared(pool) is None
