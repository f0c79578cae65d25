"""Eviction: least recently used, and the registry of policies."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvbm_common.eviction import POLICIES, Lru, UnknownPolicy, make_policy

from tests.libs.helpers import name, names


def test_the_victim_is_what_became_free_the_longest_ago() -> None:
    """1, 2, 3 are admitted; 1 is used once more: 2 goes first."""
    lru = Lru()
    for number in (1, 2, 3):
        lru.admit(name(number), name(0))
    lru.hold(name(1))
    lru.free(name(1))
    assert lru.victims(3) == names(2, 3, 1)
    assert lru.victims(1) == names(2)


def test_asking_for_victims_changes_nothing() -> None:
    """`victims` answers a question; only `forget` takes a block out."""
    lru = Lru()
    lru.admit(name(1), name(0))
    assert lru.victims(5) == lru.victims(5) == names(1)
    lru.forget(name(1))
    assert lru.victims(5) == []


@given(st.lists(st.tuples(st.integers(1, 5), st.sampled_from(["toggle", "forget"])), max_size=60))
@settings(max_examples=60, deadline=None)
def test_lru_is_a_queue_of_the_free_blocks(moves: list[tuple[int, str]]) -> None:
    """Against a plain list: admitted and freed go to its end, held and forgotten leave it."""
    lru, free, held = Lru(), list[int](), set[int]()
    for number, move in moves:
        if number in held:
            lru.free(name(number))
            held.remove(number)
            free.append(number)
        elif number not in free:
            lru.admit(name(number), name(0))
            free.append(number)
        elif move == "forget":
            lru.forget(name(number))
            free.remove(number)
        else:
            lru.hold(name(number))
            free.remove(number)
            held.add(number)
        assert lru.victims(99) == names(*free)
        assert len(lru) == len(free)


def test_policies_are_made_by_name() -> None:
    """Each call makes a fresh one: two tiers never share a policy."""
    for known in POLICIES:
        assert make_policy(known) is not make_policy(known)
        assert len(make_policy(known)) == 0


def test_an_unknown_policy_lists_the_known_ones() -> None:
    """The operator reads what may be written instead."""
    with pytest.raises(UnknownPolicy, match="lru") as caught:
        make_policy("best")
    assert caught.value.code == "unknown_policy"
