"""How far a hit reaches over several KV groups, compared with a search that tries every boundary.

A name is a small number. Blocks are counted from the first one that is asked for.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvbm_common.identity import SequenceHash
from kvbm_common.tier.kv_groups import (
    GroupRun,
    Names,
    Reach,
    longest,
    needed,
    needed_names,
    reach,
    step_tokens,
)

FULL, WINDOW = GroupRun(4, 6), GroupRun(4, 6, 2)


def name(group: int, place: int) -> SequenceHash:
    return SequenceHash(bytes([group, place]) + bytes(14))


def names_of(groups: list[GroupRun]) -> Names:
    return [[name(at, place) for place in range(one.blocks)] for at, one in enumerate(groups)]


def reached(groups: list[GroupRun], *missing: tuple[int, int]) -> Reach:
    gone = {name(*one) for one in missing}
    return reach(groups, names_of(groups), lambda one: one not in gone)


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


def test_a_boundary_ends_blocks_of_every_group() -> None:
    groups = [GroupRun(4, 6), GroupRun(6, 4, 1)]
    assert step_tokens(groups) == longest([GroupRun(4, 3), GroupRun(6, 2)]) == 12
    assert reached(groups, (0, 5)).tokens == 12


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[GroupRun], set[SequenceHash], int]:
    groups = draw(
        st.lists(
            st.builds(
                GroupRun,
                st.sampled_from([2, 4, 6]),
                st.integers(0, 12),
                st.sampled_from([0, 0, 1, 2, 3, 20]),
            ),
            min_size=1,
            max_size=4,
        )
    )
    everything = [one for names in names_of(groups) for one in names]
    has = {one for one in everything if draw(st.integers(0, 4))}
    return groups, has, draw(st.integers(0, 80))


def by_search(groups: list[GroupRun], has: set[SequenceHash], most: int) -> int:
    """Try every number of tokens, and every block before it, by the rule as it is written."""
    best = 0
    for tokens in range(1, most + 1):
        if all(
            tokens % one.block_tokens == 0
            and tokens <= one.blocks * one.block_tokens
            and all(
                name(at, place) in has
                for place in range(tokens // one.block_tokens)
                if not one.window or place >= tokens // one.block_tokens - one.window
            )
            for at, one in enumerate(groups)
        ):
            best = tokens
    return best


@given(cases())
def test_the_reach_is_that_of_a_search_over_all_boundaries(
    case: tuple[list[GroupRun], set[SequenceHash], int],
) -> None:
    groups, has, most = case
    looked: Counter[SequenceHash] = Counter()

    def ask(one: SequenceHash) -> bool:
        looked[one] += 1
        return one in has

    most -= most % step_tokens(groups)
    found = reach(groups, names_of(groups), ask, most=most)
    assert found.tokens == by_search(groups, has, most)
    full = [one for one in groups if not one.window]
    only_full = [
        GroupRun(one.block_tokens, one.blocks if not one.window else 40, one.window)
        for one in groups
    ]
    assert found.tokens <= found.shared <= min(most, longest(groups))
    if full:
        everything = has | {
            name(at, place) for at, one in enumerate(groups) if one.window for place in range(40)
        }
        assert found.shared == min(by_search(only_full, everything, most), longest(groups))
    assert all(count == 1 for count in looked.values()), "a block is looked at twice"


@given(cases())
def test_what_is_needed_reaches_as_far_by_itself(
    case: tuple[list[GroupRun], set[SequenceHash], int],
) -> None:
    """Goal: the blocks that are leased for a boundary are enough for it."""
    groups, has, _ = case
    names = names_of(groups)
    tokens = reach(groups, names, has.__contains__).tokens
    leased = set(needed_names(groups, names, tokens))
    assert leased <= has
    assert reach(groups, names, leased.__contains__).tokens == tokens
