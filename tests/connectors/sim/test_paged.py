"""The paged cache: prefix hits, references, LRU eviction; a Hypothesis machine compares a model."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from kvbm_connectors.sim.paged import BlockPool

from tests.connectors.helpers import name, numbers


def cached(pool: BlockPool, *content: int) -> list[int]:
    """Compute a chain, and leave it in the cache; returns its blocks."""
    allocated = pool.allocate(len(content))
    assert allocated is not None
    for block, number in zip(allocated[0], content, strict=True):
        pool.give_name(block, name(number))
    pool.release(allocated[0])
    pool.check()
    return allocated[0]


def test_what_was_computed_is_found_until_its_block_is_reused() -> None:
    pool = BlockPool(2)
    [block] = cached(pool, 7)
    assert pool.find(name(7)) == block
    allocated = pool.allocate(2)
    assert allocated is not None
    assert numbers(allocated[1]) == [7]
    assert pool.find(name(7)) is None


def test_the_last_of_a_chain_is_reused_first() -> None:
    """A prefix without its end is worth something, an end without its prefix nothing."""
    pool = BlockPool(3)
    cached(pool, 1, 2, 3)
    evicted = [pool.allocate(1) for _ in range(3)]
    assert [numbers(e[1]) for e in evicted if e is not None] == [[3], [2], [1]]


def test_the_least_recently_used_chain_goes_first() -> None:
    pool = BlockPool(2)
    [first] = cached(pool, 1)
    cached(pool, 2)
    pool.hold([first])
    pool.release([first])
    allocated = pool.allocate(1)
    assert allocated is not None
    assert numbers(allocated[1]) == [2]


def test_a_block_in_use_is_not_reused() -> None:
    """Two hold it: it is free when both have let go."""
    pool = BlockPool(2)
    [block] = cached(pool, 1)
    pool.hold([block])
    pool.hold([block])
    assert pool.allocate(2) is None
    assert pool.find(name(1)) == block
    pool.release([block])
    assert pool.free_count == 1
    pool.release([block])
    assert pool.free_count == 2


def test_too_many_blocks_allocate_none() -> None:
    pool = BlockPool(3)
    cached(pool, 1)
    assert pool.allocate(4) is None
    assert numbers(pool.names()) == [1]


def test_a_name_in_two_blocks_is_lost_with_the_second() -> None:
    """Two requests computed it side by side."""
    pool = BlockPool(2)
    cached(pool, 1)
    cached(pool, 1)
    assert pool.allocate(1) is not None
    assert pool.find(name(1)) is not None
    assert pool.allocate(1) is not None
    assert pool.find(name(1)) is None


def test_a_reset_needs_a_quiet_engine() -> None:
    pool = BlockPool(2)
    [block] = cached(pool, 1)
    pool.hold([block])
    assert not pool.reset()
    pool.release([block])
    assert pool.reset()
    assert pool.names() == []
    pool.check()


def test_an_evicted_name_is_found_in_no_block() -> None:
    """A block in use stays in use: its holder goes on with what it has."""
    pool = BlockPool(3)
    [block, _] = cached(pool, 1, 2)
    cached(pool, 1)
    pool.hold([block])
    assert pool.evict(name(1)) == 2
    assert numbers(pool.names()) == [2]
    assert pool.free_count == 2
    assert pool.evict(name(1)) == 0
    pool.check()


@pytest.mark.parametrize("misuse", ["release", "name"])
def test_what_is_not_held_cannot_be_released_or_named(misuse: str) -> None:
    pool = BlockPool(1)
    with pytest.raises(AssertionError):
        pool.release([0]) if misuse == "release" else pool.give_name(0, name(1))


class Pool(RuleBasedStateMachine):
    """Requests come and go; the model says who holds what."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(6)
        self.requests: list[list[int]] = []
        self.content: dict[int, int] = {}

    @rule(content=st.lists(st.integers(1, 9), min_size=1, max_size=4, unique=True))
    def run(self, content: list[int]) -> None:
        """A prefix from the cache, the rest computed."""
        local: list[int] = []
        for number in content:
            block = self.pool.find(name(number))
            if block is None:
                break
            assert self.content[block] == number
            local.append(block)
        self.pool.hold(local)
        allocated = self.pool.allocate(len(content) - len(local))
        if allocated is None:
            self.pool.release(local)
            return
        held = {block for blocks in self.requests for block in blocks} | set(local)
        assert not held & set(allocated[0]), "a block in use was given away"
        for block, number in zip(allocated[0], content[len(local) :], strict=True):
            self.content[block] = number
            self.pool.give_name(block, name(number))
        self.requests.append(local + allocated[0])

    @rule(number=st.integers(1, 9))
    def evict(self, number: int) -> None:
        """One name is found no more, whoever holds its blocks."""
        self.pool.evict(name(number))
        assert self.pool.find(name(number)) is None

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.requests) - 1))
        self.pool.release(self.requests.pop(index))

    @rule()
    def reset(self) -> None:
        assert self.pool.reset() == (not self.requests)

    @invariant()
    def holds(self) -> None:
        self.pool.check()
        held = {block for blocks in self.requests for block in blocks}
        assert self.pool.free_count == 6 - len(held)


Pool.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPool = Pool.TestCase
