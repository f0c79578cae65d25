"""Chains in the order in which they leave: nothing can reach a block whose parent has left."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvbm_common.eviction import make_policy
from kvbm_common.tier.slots import RENEWED_PER_BLOCK, SlotTable

from tests.libs.helpers import block, make_room, name, plain_table


def commit(table: SlotTable, *numbers: int) -> None:
    """Commit a run of a chain of numbers."""
    slots = table.stage_all([name(number) for number in numbers])
    table.register_all([*zip(slots, map(block, numbers), strict=True)])


@pytest.mark.parametrize("policy", ["lru", "adaptive"])
def test_a_chain_that_grows_is_evicted_from_its_end(policy: str) -> None:
    """1, 2 came first, were used and freed; 3 came after them, then 10, a chain of its own.

    Without 2 nothing reaches 3: it leaves before it.
    """
    table = plain_table(4, partial(make_policy, policy))
    commit(table, 1, 2)
    table.unpin(table.pin_prefix([name(1), name(2)]))
    commit(table, 3)
    commit(table, 10)
    assert [one.hash for one in make_room(table, 4)] == [name(3), name(2), name(1), name(10)]


def test_a_long_chain_stays_where_it_is_for_few_blocks() -> None:
    """The walk costs as much as the chain is long."""
    table = plain_table(RENEWED_PER_BLOCK + 2)
    commit(table, *range(1, RENEWED_PER_BLOCK + 2))
    commit(table, RENEWED_PER_BLOCK + 2)
    assert make_room(table, 1) == [block(RENEWED_PER_BLOCK + 1)]


def test_chains_of_a_batch_share_the_walk() -> None:
    """Two blocks come after two chains, one of them longer than half of the walk: that one stays.

    Without this a batch after many long chains would stop the tier for as long as they are.
    """
    table = plain_table(2 * RENEWED_PER_BLOCK)
    short, long = range(1, 11), range(100, 100 + RENEWED_PER_BLOCK + 1)
    commit(table, *long)
    commit(table, *short)
    slots = table.stage_all([name(11), name(long[-1] + 1)])
    table.register_all([*zip(slots, [block(11), block(long[-1] + 1)], strict=True)])
    order = [*table.victims(2 * RENEWED_PER_BLOCK).names]
    assert order[0] == name(long[-1])
    assert order[-1] == name(1)
    assert order.index(name(long[-1] + 1)) > order.index(name(long[0]))


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 50), st.integers(1, 3)), max_size=25))
def test_no_block_leaves_before_those_behind_it(steps: list[tuple[bool, int, int]]) -> None:
    """Chains fork, grow by one to three blocks, and are used as far as one of their blocks."""
    table = plain_table(100)
    parents = {0: 0}
    for grows, place, count in steps:
        at = sorted(parents)[place % len(parents)]
        if grows:
            new = range(len(parents), len(parents) + count)
            blocks = []
            for number in new:
                parents[number], at = at, number
                blocks.append(block(number, parent=parents[number]))
            slots = table.stage_all([one.hash for one in blocks])
            table.register_all([*zip(slots, blocks, strict=True)])
        elif at:
            chain = [at]
            while parents[chain[0]]:
                chain.insert(0, parents[chain[0]])
            table.unpin(table.pin_prefix([name(number) for number in chain]))
    order = [*table.victims(100).names]
    place_of = {one: place for place, one in enumerate(order)}
    for number, parent in parents.items():
        if parent:
            assert place_of[name(number)] < place_of[name(parent)]
