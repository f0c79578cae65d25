"""Former names leave once each, and say what a list and a dict of them would say."""

from __future__ import annotations

import tracemalloc
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvbm_common.eviction.former_names import FormerNames
from kvbm_common.identity import SequenceHash
from kvbm_common.tier.name_history import FACTORS_BYTES, set_factors

from tests.libs.helpers import name, names

NAMES_MAX = 40


@given(st.integers(0, NAMES_MAX), st.lists(st.integers(1, NAMES_MAX + 3)))
def test_names_leave_as_they_leave_a_dict(count: int, leaving: list[int]) -> None:
    """Each of them has the place that it came with, until it leaves."""
    places = {name(number): number - 1 for number in range(1, count + 1)}
    former = FormerNames(places)
    for number in leaving:
        if name(number) in places:
            assert former.place(name(number)) == places.pop(name(number))
            former.remove(name(number))
        else:
            with pytest.raises(KeyError):
                former.remove(name(number))
        assert [*former] == [*places][::-1]
        assert len(former) == len(places)
        for one in range(1, NAMES_MAX + 4):
            assert former.place(name(one)) == places.get(name(one), -1)
            assert (name(one) in former) is (name(one) in places)


def test_many_names_are_all_found_and_no_others() -> None:
    """Some are searched from the last entries of the table, and stand in its first ones."""
    rng = Random(1)
    for count in (1, 2, 3, 1_000, 21_845, 30_000):
        all_names = [SequenceHash(rng.randbytes(16)) for _ in range(count)]
        former = FormerNames(all_names)
        assert [former.place(one) for one in all_names] == [*range(count)]
        assert not any(SequenceHash(rng.randbytes(16)) in former for _ in range(1_000))


@pytest.mark.parametrize("step", [1, 2**32, 2**64, 2**96, 0x6000000000, 2**64 + 1])
def test_names_chosen_on_purpose_are_found_fast(step: int) -> None:
    """Names in equal steps, as of one half only: a search looks at a few entries.

    The factors are drawn, once: for one in some hundred, such names stand closer.
    """
    set_factors(Random(5).randbytes(FACTORS_BYTES))
    chosen = [SequenceHash((number * step % 2**128).to_bytes(16, "little")) for number in
              range(1, 20_001)]  # fmt: skip
    former = FormerNames(chosen)
    looks = 0

    class Counted(bytes):
        """A name that counts what it is compared with."""

        def __eq__(self, other: object) -> bool:
            nonlocal looks
            looks += 1
            return bytes.__eq__(self, other)

        __hash__ = bytes.__hash__

    for one in chosen:
        assert former.place(SequenceHash(Counted(one))) >= 0
    assert looks < 4 * len(chosen), f"{looks / len(chosen)} entries for a name"


def test_what_left_from_the_end_takes_no_memory() -> None:
    """The table alone stays; with the last name all of it goes."""
    former = FormerNames(names(*range(1, 10_001)))
    for number in range(10_000, 1, -1):
        former.remove(name(number))
    assert [*former] == [name(1)]
    former.remove(name(1))
    assert (len(former), [*former], name(1) in former) == (0, [], False)


def test_a_name_takes_less_than_in_a_set() -> None:
    """Its place in the list, and at most three entries of four bytes."""
    all_names = names(*range(1, 10_001))
    tracemalloc.start()
    former = FormerNames(all_names)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(former) == 10_000
    assert held < 21 * 10_000, f"{held / 10_000} bytes a name"
