"""The blocks of one holder against a naive set: whatever comes in whatever order."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvbm_common.identity import SequenceHash
from kvbm_index.core.chains import Chains

ROOT = 99
"""The parent of 0 and 20."""
PARENTS = {number: number - 1 for number in range(1, 12)} | {0: ROOT, 20: ROOT}
PARENTS |= {12: 3, 13: 12, 14: 13, 15: 3, 16: 15, 17: 7, 18: 17, 21: 20, 22: 21}
"""A tree: 0 … 11 in a line, branches at 3 (twice) and 7; and another one, 20 … 22."""


def block(number: int) -> SequenceHash:
    """A block's name."""
    return SequenceHash(number.to_bytes(16, "big"))


def packed(numbers: list[int]) -> bytes:
    """Names back to back."""
    return b"".join(map(block, numbers))


def chain_to(number: int) -> list[int]:
    """From the root on, without it."""
    chain = []
    while number != ROOT:
        chain.append(number)
        number = PARENTS[number]
    return chain[::-1]


class Pair:
    """The chains, and what is true."""

    def __init__(self, *, rooted: bool = True, anywhere: bool = True) -> None:
        self.chains = Chains()
        self.held: set[int] = set()
        self.rooted = rooted
        self.anywhere = anywhere
        """Ask from every start: then every block must be listed."""

    def add(self, numbers: list[int]) -> None:
        """A run of the tree."""
        parent = PARENTS[numbers[0]]
        rooted = self.rooted and parent == ROOT
        self.chains.add(block(parent), packed(numbers), rooted=rooted)
        self.held.update(numbers)
        self.compare()

    def discard(self, numbers: list[int]) -> None:
        """Any blocks."""
        self.chains.discard(packed(numbers))
        self.held.difference_update(numbers)
        self.compare()

    def list(self, numbers: Sequence[int]) -> None:
        """Bring the list up to date by as many blocks."""
        room = len(numbers)
        assert 0 <= self.chains.index_some(room) <= room
        self.chains.check()

    def compare(self) -> None:
        """Equal blocks, and equal parts of chains from every start to every end."""
        self.chains.check()
        assert set(self.chains) == {block(number) for number in self.held}
        everything = {block(number) for number in PARENTS}
        assert self.chains.among(everything) == set(self.chains)
        for end in PARENTS:
            asked = chain_to(end)
            for start in range(len(asked) if self.anywhere else 1):
                part = asked[start:]
                truth = next((i for i, one in enumerate(part) if one not in self.held), len(part))
                names = [block(one) for one in part]
                assert self.chains.run_length(names) == truth, part
                found = {at for one in self.chains.ranges(names) for at in range(*one)}
                assert found == {at for at, one in enumerate(part) if one in self.held}, part


RUNS = st.sampled_from(sorted(PARENTS)).flatmap(
    lambda end: st.integers(0, len(chain_to(end)) - 1).map(lambda at: chain_to(end)[at:])
)
STEPS = st.lists(
    st.tuples(st.just("add"), RUNS)
    | st.tuples(st.just("discard"), RUNS)
    | st.tuples(st.just("discard"), RUNS.map(lambda run: run[::-1]))
    | st.tuples(st.just("discard"), st.lists(st.sampled_from(sorted(PARENTS)), max_size=6))
    | st.tuples(st.just("list"), RUNS),
    max_size=25,
)


@settings(max_examples=300, deadline=None)
@given(STEPS, st.booleans(), st.booleans())
def test_chains_equal_the_oracle(
    steps: list[tuple[str, list[int]]], rooted: bool, anywhere: bool
) -> None:
    """Goal: exact under removals anywhere, children before parents, repetition.

    After each step every run from every start is compared with a walk over a plain set.
    """
    pair = Pair(rooted=rooted, anywhere=anywhere)
    for verb, numbers in steps:
        getattr(pair, verb)(numbers)


def test_a_list_is_brought_up_to_date_piece_by_piece() -> None:
    chains = Chains()
    chains.add(block(ROOT), packed(chain_to(11)), rooted=True)
    left = [chains.index_some(room) for room in (5, 5, 5, 5)]
    assert left == [0, 0, 3, 5]
    chains.check()


@pytest.mark.parametrize("gone", [[8, 9, 10, 11, 4, 5, 6, 7], [11, 10, 0, 1, 9, 2], [0, 1, 11]])
def test_ends_are_cut_without_a_look_into_the_middle(gone: list[int]) -> None:
    """Events of an engine that are taken together: in no order, but at the ends of a chain."""
    chains = Chains()
    chains.add(block(ROOT), packed(chain_to(11)), rooted=True)
    chains.discard(packed(gone))
    chains.check()
    left = 12 - len(gone)
    assert (len(chains), chains.index_some(100)) == (left, 100 - left)


def test_what_nobody_asks_any_more_is_shed() -> None:
    chains = Chains()
    chains.add(block(ROOT), packed(chain_to(11)), rooted=True)
    chains.index_some(6)
    assert chains.shed() == 7
    assert chains
    assert chains.shed() == 2
    assert not chains


def test_what_continues_a_chain_is_one_segment() -> None:
    pair = Pair()
    pair.add([0, 1, 2, 3])
    pair.add([4, 5])
    assert len(pair.chains.images()) == 1
    pair.add([12, 13])
    assert len(pair.chains.images()) == 2


@pytest.mark.parametrize("numbers", [[0], [5], [11], [4, 5, 6], [6, 5, 4], [0, 1, 2], [9, 3, 6]])
def test_a_removal_in_the_middle_is_a_hole_until_it_heals(numbers: list[int]) -> None:
    pair = Pair()
    pair.add(chain_to(11))
    pair.discard(numbers)
    for number in numbers:
        pair.add([number])
    assert len(pair.chains.images()) == 1


def test_children_may_come_first() -> None:
    pair = Pair()
    pair.add([9, 10, 11])
    pair.add([5, 6])
    pair.add([0, 1, 2, 3, 4])
    pair.add([7, 8])
    assert len(pair.chains.images()) == 1


def test_what_was_announced_again_is_held_once() -> None:
    """At an end, in the middle, across the end of a segment, and over a hole."""
    pair = Pair()
    pair.add(chain_to(8))
    for numbers in ([8], [3, 4, 5], [7, 8, 9, 10], chain_to(11), chain_to(14)):
        pair.add(numbers)
    pair.discard([5])
    pair.add([3, 4, 5, 6])
    assert len(pair.chains.images()) == 2


BLOCKS = st.integers(0, 4)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(BLOCKS, st.lists(BLOCKS, max_size=5), st.sampled_from("srq"))))
def test_a_broken_source_breaks_nothing(steps: list[tuple[int, list[int], str]]) -> None:
    """Goal: blocks named twice, with two parents, their own ancestors: nothing is raised."""
    chains = Chains()
    for parent, numbers, verb in steps:
        if verb == "s":
            chains.add(block(parent), packed(numbers), rooted=parent == 0)
        elif verb == "r":
            chains.discard(packed(numbers))
        else:
            chains.ranges([block(number) for number in numbers])
            assert len(list(chains)) <= len(chains)
