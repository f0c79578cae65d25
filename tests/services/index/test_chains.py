"""The blocks of one holder against a naive set: whatever comes in whatever order."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvbm_common.identity import SequenceHash
from kvbm_index.chains import Chains

ROOT = 99
"""The parent of 0 and 20."""
PARENTS = {number: number - 1 for number in range(1, 12)} | {0: ROOT, 20: ROOT}
PARENTS |= {12: 3, 13: 12, 14: 13, 15: 3, 16: 15, 17: 7, 18: 17, 21: 20, 22: 21}
"""A tree: 0 … 11 in a line, branches at 3 (twice) and 7; and another one, 20 … 22."""


def block(number: int) -> SequenceHash:
    """A block's name."""
    return SequenceHash(number.to_bytes(16, "big"))


def chain_to(number: int) -> list[int]:
    """From the root on, without it."""
    chain = []
    while number != ROOT:
        chain.append(number)
        number = PARENTS[number]
    return chain[::-1]


class Pair:
    """The chains, and what is true."""

    def __init__(self, *, rooted: bool = True) -> None:
        self.chains = Chains()
        self.held: set[int] = set()
        if rooted:
            self.chains.add_root(block(ROOT))

    def add(self, numbers: list[int]) -> None:
        """A run of the tree."""
        self.chains.add([block(PARENTS[numbers[0]]), *map(block, numbers)])
        self.held.update(numbers)
        self.compare()

    def discard(self, numbers: list[int]) -> None:
        """Any blocks."""
        self.chains.discard([block(number) for number in numbers])
        self.held.difference_update(numbers)
        self.compare()

    def compare(self) -> None:
        """Equal blocks, and equal runs from every start to every end."""
        self.chains.check()
        assert set(self.chains) == {block(number) for number in self.held}
        for end in PARENTS:
            asked = chain_to(end)
            for start in range(len(asked)):
                part = asked[start:]
                truth = next((i for i, one in enumerate(part) if one not in self.held), len(part))
                assert self.chains.run_length([block(one) for one in part]) == truth, part


RUNS = st.sampled_from(sorted(PARENTS)).flatmap(
    lambda end: st.integers(0, len(chain_to(end)) - 1).map(lambda at: chain_to(end)[at:])
)
STEPS = st.lists(
    st.tuples(st.just("add"), RUNS)
    | st.tuples(st.just("discard"), RUNS)
    | st.tuples(st.just("discard"), RUNS.map(lambda run: run[::-1]))
    | st.tuples(st.just("discard"), st.lists(st.sampled_from(sorted(PARENTS)), max_size=6)),
    max_size=25,
)


@settings(max_examples=150, deadline=None)
@given(STEPS, st.booleans())
def test_chains_equal_the_oracle(steps: list[tuple[str, list[int]]], rooted: bool) -> None:
    """Goal: exact under removals anywhere, children before parents, repetition.

    After each step every run from every start is compared with a walk over a plain set.
    """
    pair = Pair(rooted=rooted)
    for verb, numbers in steps:
        getattr(pair, verb)(numbers)


def test_a_removal_in_the_middle_leaves_a_hole_until_it_heals() -> None:
    pair = Pair()
    pair.add(chain_to(11))
    assert pair.chains.hole_count == 0
    pair.discard([5])
    assert pair.chains.hole_count == 1
    pair.add([5])
    assert pair.chains.hole_count == 0


def test_a_hole_ends_with_its_last_child() -> None:
    pair = Pair()
    pair.add(chain_to(16))
    pair.add([12, 13])
    pair.discard([3])
    pair.discard([16, 15])
    assert pair.chains.hole_count == 1
    pair.discard([12, 13])
    assert pair.chains.hole_count == 0


def test_children_may_come_first() -> None:
    pair = Pair()
    pair.add([9, 10, 11])
    pair.add([5, 6])
    pair.add([0, 1, 2, 3, 4])
    assert pair.chains.hole_count == 1
    pair.add([7, 8])
    assert pair.chains.hole_count == 0


@pytest.mark.parametrize("numbers", [[4, 4], [4, 5, 4], [3, 3, 3]])
def test_a_run_that_names_a_block_twice_does_not_upset_the_count(numbers: list[int]) -> None:
    """No chain has one; a broken source may."""
    pair = Pair()
    pair.chains.add([block(3), *map(block, numbers)])
    pair.chains.check()
    pair.chains.discard([block(number) for number in numbers])
    pair.chains.check()
    assert not pair.chains
