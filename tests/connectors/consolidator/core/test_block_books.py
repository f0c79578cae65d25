"""Books of blocks: in what order they are announced, and how their memory is given back."""

from __future__ import annotations

from itertools import pairwise

import pytest
from kvbm_common.identity import SequenceHash
from kvbm_common.tier.block_lookup import BlockLookup
from kvbm_connectors.consolidator.core.block_books import (
    DISCARDED_MAX,
    LOOKS_PER_BLOCK,
    Discarded,
    parents_before_children,
)

from tests.libs.helpers import name


def test_a_long_chain_is_walked_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain of 60,000 blocks was one step of 0.9 s: no answer comes after more than some looks.

    The last block is in the first part of the book: it is looked at first.
    """
    book: BlockLookup[SequenceHash] = BlockLookup()
    numbers = range(1_000, 0, -1)
    book.set_each([name(number) for number in numbers], [name(number - 1) for number in numbers])
    looks, get = 0, BlockLookup.get

    def counted(lookup: BlockLookup[object], block: bytes) -> object:
        nonlocal looks
        looks += 1
        return get(lookup, block)

    monkeypatch.setattr(BlockLookup, "get", counted)
    given, before = [], 0
    for one in parents_before_children([book]):
        assert looks - before <= LOOKS_PER_BLOCK
        before = looks
        given.append(one)
    assert [one for one in given if one is not None] == [name(at) for at in range(1, 1_001)]


def test_the_memory_of_a_large_book_is_given_back_in_parts() -> None:
    """At once it took 90 ms for a million blocks; a small one goes at once."""
    discarded, small, large = Discarded(), BlockLookup[int](), BlockLookup[int](0)
    names = [name(number) for number in range(2_000)]
    small.set(names, 1)
    discarded.add(small)
    assert not discarded
    large.set(names, 1)
    discarded.add(large)
    left = [len(large)]
    while discarded:
        discarded.shed(100)
        left.append(len(large))
    assert left[-1] == 0
    assert max(before - after for before, after in pairwise(left)) < 150


def test_books_of_lives_that_have_ended_do_not_gather() -> None:
    discarded = Discarded()
    books = [BlockLookup[int](0) for _ in range(DISCARDED_MAX + 2)]
    for book in books:
        book.set([name(1)], 1)
        discarded.add(book)
    discarded.shed(1_000_000)
    assert not discarded
    assert [len(book) for book in books] == [1, 1, *[0] * DISCARDED_MAX]
