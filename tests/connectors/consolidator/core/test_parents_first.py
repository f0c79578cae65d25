"""Parents first: every key once, each behind its parent."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from kvbm_connectors.consolidator.core.parents_first import parents_first

FORESTS = st.permutations(range(8)).flatmap(
    lambda order: st.fixed_dictionaries({number: st.integers(-1, number - 1) for number in order})
)
"""Number → its parent, which is smaller; -1 and others that are left out are not held."""


@given(FORESTS, st.sets(st.integers(0, 7)))
def test_every_key_comes_once_behind_its_parent(parents: dict[int, int], gone: set[int]) -> None:
    held = {number: parent for number, parent in parents.items() if number not in gone}
    order = list(parents_first(held, held.__getitem__))
    assert sorted(order) == sorted(held)
    for number, parent in held.items():
        assert parent not in held or order.index(parent) < order.index(number)


def test_what_is_in_order_stays_so() -> None:
    assert list(parents_first({3: None, 1: 3, 2: None}, {1: 3}.get)) == [3, 1, 2]


def test_a_circle_ends() -> None:
    """No block is its own ancestor; hashes that lie are no reason to hang."""
    assert sorted(parents_first({1: 2, 2: 1}, {1: 2, 2: 1}.get)) == [1, 2]
