"""Another eviction policy takes over a table: in no time, and no block loses its place."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvbm_common.eviction import POLICIES, Lru, make_policy
from kvbm_common.eviction.succession import Succession
from kvbm_common.identity import SequenceHash
from kvbm_common.tier.layout import UNIT_BYTES, Layout
from kvbm_common.tier.slots import FORMERS_MAX, JOINED_MAX, Block, SlotTable

from tests.libs.helpers import NAMESPACE, name

SLOTS = 12
LRU = partial(make_policy, "lru")


def store(table: SlotTable, number: int, parent: int = 0) -> None:
    slot = table.stage(name(number), UNIT_BYTES)
    assert slot is not None
    table.register(slot, Block(name(number), name(parent), NAMESPACE, 1, UNIT_BYTES))


def table_of(count: int) -> SlotTable:
    """A chain of so many blocks."""
    table = SlotTable(Layout.of(UNIT_BYTES, max(count, SLOTS)), LRU)
    for number in range(1, count + 1):
        store(table, number, number - 1)
    return table


def order(table: SlotTable) -> list[SequenceHash]:
    """All blocks that may leave, the first to leave first."""
    return table.longest_idle(1 << 20)


def formers(table: SlotTable) -> list[int]:
    """How many free blocks each former policy has."""
    [size] = table.pool.sizes.values()
    policy = size.policy
    return [len(one) for one in policy.formers] if isinstance(policy, Succession) else []


_STEP = st.one_of(
    st.tuples(st.just("use"), st.integers(1, SLOTS)),
    st.tuples(st.just("pin"), st.integers(1, SLOTS)),
    st.tuples(st.just("unpin"), st.integers(1, SLOTS)),
    st.tuples(st.just("discard"), st.integers(1, SLOTS)),
    st.tuples(st.just("store"), st.integers(1, SLOTS)),
    st.tuples(st.just("switch"), st.just(0)),
)


@pytest.mark.slow
@given(st.lists(_STEP, max_size=60))
@settings(max_examples=300)
def test_lru_after_lru_is_lru(steps: list[tuple[str, int]]) -> None:
    """Two tables, one of which switches all the time: their blocks leave in the same order."""
    still, switching = table_of(SLOTS // 2), table_of(SLOTS // 2)
    pinned: dict[int, tuple[int, int]] = {}
    for what, number in steps:
        slots = still.find(name(number)), switching.find(name(number))
        if what == "switch":
            switching.use_policy(LRU)
        elif what == "store" and slots == (None, None) and still.room_for(1, UNIT_BYTES):
            for table in (still, switching):
                for gone in table.victims(1, UNIT_BYTES).names:
                    table.evict(gone)
                store(table, number, number - 1)
        elif what == "unpin" and number in pinned:
            for table, slot in zip((still, switching), pinned.pop(number), strict=True):
                table.unpin([slot])
        elif slots[0] is not None and slots[1] is not None:
            if what == "pin" and number not in pinned:
                pinned[number] = slots[0], slots[1]
                still.pin(slots[0])
                switching.pin(slots[1])
            for table in (still, switching):
                if what == "discard":
                    table.discard(name(number))
                elif what == "use":
                    table.unpin(table.pin_prefix([name(number)]))
        assert order(switching) == order(still)
        assert len(formers(switching)) <= FORMERS_MAX
        switching.check()


def test_a_switch_moves_no_block() -> None:
    """A million take as long as none: each is admitted when it is used again."""

    class Counting(Lru):
        admitted = 0

        def admit(self, block: SequenceHash, parent: SequenceHash) -> None:
            Counting.admitted += 1
            super().admit(block, parent)

    table = table_of(9)
    table.use_policy(lambda _: Counting())
    assert (Counting.admitted, len(order(table))) == (0, 9)
    table.unpin(table.pin_prefix([name(1), name(2)]))
    assert Counting.admitted == 2
    assert order(table)[-2:] == [name(2), name(1)], "leaves first, after all others"
    assert formers(table) == [7]


def test_policies_that_are_too_many_are_joined_in_steps() -> None:
    """A switch moves some blocks, and each commit some more: they leave in the same order."""
    admitted: list[SequenceHash] = []

    class Counting(Lru):
        def admit(self, block: SequenceHash, parent: SequenceHash) -> None:
            admitted.append(block)
            super().admit(block, parent)

    count = 3 * JOINED_MAX
    table = SlotTable(Layout.of(UNIT_BYTES, (FORMERS_MAX + 2) * count), lambda _: Counting())
    for first in range(0, (FORMERS_MAX + 1) * count, count):
        for number in range(first + 1, first + count + 1):
            store(table, number)
        before = [*admitted], order(table)
        table.use_policy(lambda _: Counting())
        assert len(admitted) - len(before[0]) <= JOINED_MAX
        assert order(table) == before[1]
    assert len(formers(table)) == FORMERS_MAX + 1
    steps = 0
    while len(formers(table)) > FORMERS_MAX:
        admitted.clear()
        store(table, 10 * count + steps)
        assert len(admitted) <= 1 + JOINED_MAX
        steps += 1
        table.check()
    assert steps == count // JOINED_MAX - 1
    assert order(table)[: len(before[1])] == before[1]


def test_few_former_policies_are_kept() -> None:
    """Each switch leaves a block behind: the smallest of too many joins the one before it."""
    count = 3 * FORMERS_MAX
    table = table_of(count)
    before = order(table)
    for number in range(1, count + 1):
        table.use_policy(LRU)
        table.unpin(table.pin_prefix([name(number)]))
        assert len(formers(table)) <= FORMERS_MAX
        assert sum(formers(table)) == count - 1
        table.check()
    assert order(table) == sorted(before, key=lambda one: int.from_bytes(one, "big"))
    for one in order(table):
        table.evict(one)
    table.check()


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_what_the_former_policy_has_leaves_first(policy: str) -> None:
    """Of 1 to 4 one is used after the switch, and 5 is new: these two are the last to leave."""
    table = table_of(4)
    table.use_policy(partial(make_policy, policy))
    table.unpin(table.pin_prefix([name(1)]))
    store(table, 5)
    assert order(table)[:3] == [name(4), name(3), name(2)]
    assert set(order(table)[3:]) == {name(1), name(5)}
