"""Blocks in the order in which they came: against a plain ordered dict, and how much is moved."""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvbm_common.eviction.adaptive import Adaptive
from kvbm_common.eviction.lfu import Lfu
from kvbm_common.eviction.lru import Lru
from kvbm_common.eviction.prefix import PrefixPolicy
from kvbm_common.tier.block_lookup import WHOLE_MAX, BlockLookup
from kvbm_common.tier.block_order import BATCH_MAX, BlockOrder
from kvbm_common.tier.departures import Departures

from tests.libs.helpers import largest_table, name


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["add", "add all", "pop", "pop oldest", "drop", "discard"]),
            st.lists(st.integers(0, 30), min_size=1, max_size=12, unique=True),
        ),
        max_size=60,
    )
)
def test_an_order_does_as_an_ordered_dict(work: list[tuple[str, list[int]]]) -> None:
    order: BlockOrder[int] = BlockOrder()
    model: OrderedDict[bytes, int] = OrderedDict()
    for value, (what, numbers) in enumerate(work):
        names = [name(number) for number in numbers]
        new = [one for one in names if one not in model]
        here = [one for one in names if one in model]
        match what:
            case "add":
                for one in new:
                    order.add(one, 0)
                    model[one] = 0
            case "add all":
                order.add_all(new, value)
                model.update(dict.fromkeys(new, value))
            case "pop":
                assert [order.pop(one) for one in names] == [one in here for one in names]
                for one in here:
                    del model[one]
            case "pop oldest" if model:
                assert order.pop_oldest() == model.popitem(last=False)
            case "drop":
                order.drop(here)
                for one in here:
                    del model[one]
            case "discard":
                assert order.discard(names) == len(here)
                for one in here:
                    del model[one]
        order.check()
        assert [*order] == [*model]
        assert [*order.items()] == [*model.items()]
        assert [order.get(one) for one in names] == [model.get(one) for one in names]
        assert order.has_none_of(names) == model.keys().isdisjoint(names)


def test_a_block_that_is_not_here_cannot_be_dropped() -> None:
    order: BlockOrder[None] = BlockOrder()
    order.add(name(1), None)
    with pytest.raises(KeyError):
        order.drop([name(2)])


def test_a_block_that_leaves_and_comes_again_without_end_costs_no_memory() -> None:
    """An old block stays in front: what is behind it is not passed, and has to be swept."""
    order: BlockOrder[None] = BlockOrder()
    order.add(name(1), None)
    for _ in range(1_000):
        order.add(name(2), None)
        order.drop([name(2)])
        order.add(name(3), None)
        order.add(name(2), None)
        order.drop([name(3), name(2)])
    assert order.batch_count < 10
    assert [*order] == [name(1)]


def test_blocks_that_come_leave_and_come_again_one_by_one_are_few_batches() -> None:
    """Each is stored, held and freed: a batch for each took 100 bytes, and a microsecond."""
    order: BlockOrder[None] = BlockOrder()
    for number in range(2 * BATCH_MAX):
        order.add(name(number), None)
        assert order.pop(name(number))
        order.add(name(number), None)
        order.check()
    assert order.batch_count <= 4
    assert [*order] == [name(number) for number in range(2 * BATCH_MAX)]


def test_the_oldest_is_found_without_a_look_at_those_that_have_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A victim at a time: each one cost a look at all blocks of its batch."""
    order: BlockOrder[None] = BlockOrder()
    order.add_all([name(number) for number in range(BATCH_MAX)], None)
    looks, get = 0, BlockLookup.get

    def counted(lookup: BlockLookup[object], block: bytes) -> object:
        nonlocal looks
        looks += 1
        return get(lookup, block)

    monkeypatch.setattr(BlockLookup, "get", counted)
    for number in range(BATCH_MAX):
        oldest = next(iter(order))
        assert oldest == name(number)
        assert order.pop(oldest)
    assert looks < 4 * BATCH_MAX


def test_a_batch_of_many_is_cut() -> None:
    """Whatever leaves, no more than one batch is looked through."""
    order: BlockOrder[None] = BlockOrder()
    names = [name(number) for number in range(3 * BATCH_MAX)]
    order.add_all(names, None)
    assert order.batch_count == 3
    order.drop(names[1::2])
    assert [*order] == names[::2]


@pytest.mark.parametrize(
    "make", [Lru, Lfu, Adaptive, partial(PrefixPolicy, 1_000_000), BlockOrder, Departures]
)
def test_no_table_holds_more_than_a_part_of_the_blocks(make: Callable[[], object]) -> None:
    """Python's tables move all of their entries when they grow: 0.2 s for a million blocks."""
    order, count = make(), 2 * WHOLE_MAX
    for first in range(0, count, BATCH_MAX):
        names = [name(number) for number in range(first, first + BATCH_MAX)]
        match order:
            case Lru() | Lfu() | Adaptive() | PrefixPolicy():
                for one in names:
                    order.admit(one, name(0))
            case Departures():
                order.note(names, "evicted", first)
            case BlockOrder():
                order.add_all(names, None)
    assert largest_table(order) < count // 100


def test_the_garbage_collector_has_nothing_to_look_at() -> None:
    """It would look at a million blocks at once."""
    order: BlockOrder[None] = BlockOrder()
    gc.collect()
    before = len(gc.get_objects())
    for number in range(4 * WHOLE_MAX):
        order.add(name(number), None)
        if number % 2:
            order.drop([name(number)])
    assert order.batch_count >= WHOLE_MAX
    gc.collect()
    assert len(gc.get_objects()) - before < WHOLE_MAX // 10
