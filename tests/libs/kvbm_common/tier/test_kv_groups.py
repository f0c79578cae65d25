"""How far a hit reaches over several KV groups, compared with a search that tries every boundary.

A name is a small number. Blocks are counted from the first one that is asked for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvbm_common.identity import SequenceHash
from kvbm_common.tier import kv_groups
from kvbm_common.tier.kv_groups import (
    GroupRun,
    Names,
    Reach,
    boundary_tokens,
    has_each,
    indispensable,
    largest_boundary,
    needed,
    needed_names,
    reach,
    split,
)

FULL, WINDOW = GroupRun(4, 6), GroupRun(4, 6, 2)


def name(group: int, place: int) -> SequenceHash:
    return SequenceHash(bytes([group, place]) + bytes(14))


def names_of(groups: list[GroupRun]) -> Names:
    return [[name(at, place) for place in range(one.blocks)] for at, one in enumerate(groups)]


def reached(groups: list[GroupRun], *missing: tuple[int, int]) -> Reach:
    gone = {name(*one) for one in missing}
    return reach(groups, names_of(groups), has_each(lambda one: one not in gone))


def test_a_hit_needs_all_of_a_full_group_and_the_end_of_a_window() -> None:
    assert needed([FULL, WINDOW], 16) == [range(4), range(2, 4)]
    assert needed([FULL, WINDOW], 4) == [range(1), range(1)]
    assert needed([FULL, WINDOW], 0) == [range(0), range(0)]


def test_the_names_that_a_hit_needs_come_group_after_group() -> None:
    groups = [GroupRun(4, 3, 1), GroupRun(4, 3)]
    assert needed_names(groups, names_of(groups), 8) == [name(0, 1), name(1, 0), name(1, 1)]


@pytest.mark.parametrize(
    ("missing", "expected"),
    [
        ((), Reach(24, 24)),
        (((0, 3),), Reach(12, 12)),
        (((1, 0), (1, 1), (1, 2), (1, 3)), Reach(24, 24)),
        (((1, 4),), Reach(16, 24)),
        (((1, 5),), Reach(20, 24)),
        (((1, 5), (1, 3)), Reach(12, 24)),
        (((1, 1), (1, 3), (1, 5)), Reach(4, 24)),
        (((1, 0), (1, 3), (1, 5)), Reach(12, 24)),
        (((1, 0), (1, 2), (1, 4)), Reach(0, 24)),
        (((0, 0),), Reach(0, 0)),
    ],
)
def test_a_full_group_and_a_window_of_two_blocks(
    missing: tuple[tuple[int, int], ...], expected: Reach
) -> None:
    assert reached([FULL, WINDOW], *missing) == expected


def test_windows_that_disagree_ask_each_other_again() -> None:
    """Blocks of one token. The first window has its last blocks before 9 tokens, but not before 6
    and 5; the second one not before 9, 8 and 7: they agree on 4."""
    groups = [GroupRun(1, 10, 2), GroupRun(1, 10, 2)]
    missing = [(0, 9), (0, 4), (1, 8), (1, 7), (1, 6)]
    assert reached(groups, *missing) == Reach(4, 10)
    assert reached(groups[::-1], *((1 - at, place) for at, place in missing)) == Reach(4, 10)


@pytest.mark.parametrize("most", [400, 12])
def test_windows_that_are_absent_are_looked_for_in_growing_turns(most: int) -> None:
    """Only the first two of 400 blocks are there. Each question is for twice as many blocks."""
    looked: list[int] = []

    def has(names: Sequence[SequenceHash]) -> bytes:
        looked.append(len(names))
        return bytes(int.from_bytes(one[:2], "big") < 2 for one in names)

    names = [SequenceHash(place.to_bytes(2, "big") + bytes(14)) for place in range(400)]
    assert reach([GroupRun(1, 400, 2)], [names], has, most=most) == Reach(2, most)
    assert looked == ([2, 64, 128, 206] if most == 400 else [2, 10])


def test_names_are_split_as_the_groups_say() -> None:
    groups = [GroupRun(4, 2), GroupRun(4, 0), GroupRun(8, 1, 1)]
    names = [name(0, 0), name(0, 1), name(2, 0)]
    assert split(groups, names) == [names[:2], [], names[2:]]
    with pytest.raises(AssertionError, match="2 names, and groups have 3"):
        split(groups, names[:2])


def test_what_every_hit_has_is_the_first_block_of_each_prefix() -> None:
    """Windows and groups without blocks have no such name."""
    groups = [GroupRun(4, 2, 1), GroupRun(4, 2), GroupRun(4, 0), GroupRun(8, 1)]
    names = [name(0, 0), name(0, 1), name(1, 0), name(1, 1), name(3, 0)]
    assert indispensable(groups, names) == [name(1, 0), name(3, 0)]
    assert indispensable((), names) == names[:1]


def test_a_boundary_ends_blocks_of_every_group() -> None:
    groups = [GroupRun(4, 6), GroupRun(6, 4, 1)]
    assert boundary_tokens(groups) == largest_boundary([GroupRun(4, 3), GroupRun(6, 2)]) == 12
    assert reached(groups, (0, 5)).tokens == 12


def chunked(chunk: int, offset: int) -> list[GroupRun]:
    return [GroupRun(4, 8, chunk_tokens=chunk, offset=offset)]


@pytest.mark.parametrize(
    ("offset", "tokens", "expected"),
    [
        (0, 4, range(1)),
        (0, 16, range(4, 4)),
        (0, 20, range(4, 5)),
        (0, 28, range(4, 7)),
        (12, 4, range(1, 1)),
        (12, 8, range(1, 2)),
        (12, 16, range(1, 4)),
        (8, 4, range(1)),
    ],
)
def test_a_hit_needs_the_chunk_in_which_it_ends(offset: int, tokens: int, expected: range) -> None:
    """A chunk has 16 tokens from the first token of the sequence on; at its end nothing is needed.

    What the device has (`offset`) may end inside of a chunk.
    """
    assert needed(chunked(16, offset), tokens) == [expected]


def test_a_chunk_need_not_end_with_a_block() -> None:
    """A chunk of ten tokens: the block in which one begins is needed."""
    assert needed(chunked(10, 0), 24) == [range(5, 6)]
    assert needed(chunked(10, 0), 16) == [range(2, 4)]


@pytest.mark.parametrize(
    ("missing", "expected"),
    [
        ((), 24),
        (((1, 5),), 20),
        (((1, 4),), 16),
        (((1, 0), (1, 1), (1, 2), (1, 3)), 24),
        (((1, 5), (1, 4), (1, 3), (1, 2)), 16),
    ],
)
def test_full_attention_beside_chunks(missing: tuple[tuple[int, int], ...], expected: int) -> None:
    """The end of a chunk, 16 tokens, needs no block of the chunked group."""
    groups = [FULL, GroupRun(4, 6, chunk_tokens=16)]
    assert reached(groups, *missing).tokens == expected


def test_a_state_without_its_prefix_is_a_miss() -> None:
    """Full attention beside recurrent states, whose blocks are four times as large."""
    groups = [GroupRun(4, 8), GroupRun(16, 2, 1)]
    assert reached(groups) == Reach(32, 32)
    assert reached(groups, (0, 7)) == Reach(16, 16)
    assert reached(groups, (1, 1)) == Reach(16, 32)
    assert reached(groups, (0, 0)) == Reach(0, 0)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[GroupRun], set[SequenceHash], int]:
    """Groups of every rule, after what a device has, with blocks of several sizes."""
    offset = 12 * draw(st.integers(0, 3))
    rules = st.one_of(
        st.tuples(st.sampled_from([0, 0, 1, 2, 3, 20]), st.just(0)),
        st.tuples(st.just(0), st.sampled_from([5, 8, 12, 24])),
    )
    groups = [
        GroupRun(
            draw(st.sampled_from([1, 2, 4, 6])), draw(st.integers(0, 12)), *draw(rules), offset
        )
        for _ in range(draw(st.integers(1, 4)))
    ]
    everything = [one for names in names_of(groups) for one in names]
    has = {one for one in everything if draw(st.integers(0, 4))}
    return groups, has, draw(st.integers(0, 80))


def needs(group: GroupRun, place: int, tokens: int) -> bool:
    """Tell whether the next token after a boundary looks at a block: the rules as they are said.

    A window of n blocks has the tokens of the last n; a chunk's tokens see each other alone.
    """
    first, size = place * group.block_tokens, group.block_tokens
    if first >= tokens:
        return False
    if group.window_blocks:
        return first >= tokens - group.window_blocks * size
    if group.chunk_tokens:
        chunk_of_next = (group.offset + tokens) // group.chunk_tokens
        return any((group.offset + first + at) // group.chunk_tokens == chunk_of_next
                   for at in range(size))  # fmt: skip
    return True


def by_search(groups: list[GroupRun], has: set[SequenceHash], most: int) -> int:
    """Try every number of tokens, and every block before it."""
    best = 0
    for tokens in range(1, most + 1):
        if all(
            tokens % one.block_tokens == 0
            and tokens <= one.blocks * one.block_tokens
            and all(
                name(at, place) in has or not needs(one, place, tokens)
                for place in range(tokens // one.block_tokens)
            )
            for at, one in enumerate(groups)
        ):
            best = tokens
    return best


@given(cases(), st.sampled_from([1, 2, 3, 64]))
def test_the_reach_is_that_of_a_search_over_all_boundaries(
    case: tuple[list[GroupRun], set[SequenceHash], int], look_blocks: int
) -> None:
    """However many blocks are looked at together: long prompts take several turns."""
    with mock.patch.object(kv_groups, "LOOK_BLOCKS", look_blocks):
        compare_with_a_search(*case)


def compare_with_a_search(groups: list[GroupRun], has: set[SequenceHash], most: int) -> None:
    looked: Counter[SequenceHash] = Counter()

    def ask(one: SequenceHash) -> bool:
        looked[one] += 1
        return one in has

    most -= most % boundary_tokens(groups)
    found = reach(groups, names_of(groups), has_each(ask), most=most)
    assert found.tokens == by_search(groups, has, most)
    everything = has | {
        one
        for names, group in zip(names_of(groups), groups, strict=True)
        for one in names
        if not group.is_prefix
    }
    assert found.shared == by_search(groups, everything, most)
    assert found.tokens <= found.shared
    again = reach(
        groups, names_of(groups), has_each(has.__contains__), most=most, shared=found.shared
    )
    assert again == found
    assert all(count == 1 for count in looked.values()), "a block is looked at twice"


@given(cases())
def test_what_is_needed_reaches_as_far_by_itself(
    case: tuple[list[GroupRun], set[SequenceHash], int],
) -> None:
    """Goal: the blocks that are leased for a boundary are enough for it."""
    groups, has, _ = case
    names = names_of(groups)
    tokens = reach(groups, names, has_each(has.__contains__)).tokens
    leased = set(needed_names(groups, names, tokens))
    assert leased <= has
    assert leased == {
        found
        for one, group_names in zip(groups, names, strict=True)
        for place, found in enumerate(group_names)
        if needs(one, place, tokens)
    }
    assert reach(groups, names, has_each(leased.__contains__)).tokens == tokens
