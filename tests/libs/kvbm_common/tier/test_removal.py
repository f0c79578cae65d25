"""What an operator's `evict` or `reset` selects, step by step, against brute force."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from hypothesis import given, settings
from hypothesis import strategies as st
from kvbm_common.eviction import make_policy
from kvbm_common.identity import SequenceHash
from kvbm_common.tier.layout import UNIT_BYTES, Layout
from kvbm_common.tier.removal import LOOKED_MAX, PART, REMOVED_MAX, Removal
from kvbm_common.tier.slots import Block, SlotTable

from tests.libs.helpers import NAMESPACE, name

OTHER = bytes(32)
ROOT = 9_999


def table_of(parents: Mapping[int, int], slots: int = 0, *, other: int = 0) -> SlotTable:
    """A table with a block for each number and its parent; of `other` every so many is OTHER's."""
    layout = Layout.of(UNIT_BYTES, slots or len(parents))
    table = SlotTable(layout, partial(make_policy, "lru"))
    for number, parent in parents.items():
        store(table, number, parent, OTHER if other and number % other == 0 else NAMESPACE)
    return table


def store(table: SlotTable, number: int, parent: int, namespace: bytes = NAMESPACE) -> None:
    slot = table.stage(name(number), UNIT_BYTES)
    assert slot is not None, f"no room for {number}"
    table.register(slot, Block(name(number), name(parent), namespace, 1, UNIT_BYTES))


def chain(count: int, *, first: int = 1) -> dict[int, int]:
    """Blocks after each other, the first after ROOT."""
    return {n: n - 1 if n > first else ROOT for n in range(first, first + count)}


def run(removal: Removal) -> list[SequenceHash]:
    """Everything that a removal selects, removed step by step."""
    removed: list[SequenceHash] = []
    more = True
    while more:
        names, more = removal.step()
        for one in names:
            assert removal.table.discard(one) is not None
        removed += names
    return removed


def behind(parents: Mapping[int, int], root: int, held: set[int]) -> set[int]:
    """Brute force: each held block whose chain of held parents ends at the root."""
    found = set()
    for number in held:
        at = number
        while at in held and at != root:
            at = parents[at]
        if at == root:
            found.add(number)
    return found


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=40),
    st.sets(st.integers(1, 40)),
    st.sets(st.integers(1, 40)),
    st.integers(0, 40),
    st.permutations(range(1, 41)),
)
@settings(max_examples=300)
def test_what_is_behind_a_prefix_goes_leaves_first(
    drawn: list[int], absent: set[int], pinned: set[int], root: int, order: list[int]
) -> None:
    """Trees with holes in any order of slots: as brute force says, and never a parent before its
    child. Pinned blocks stay, and are counted."""
    parents = {n: drawn[n - 1] % n for n in order if n <= len(drawn)}
    table = table_of({n: parent for n, parent in parents.items() if n not in absent}, slots=40)
    held = set(parents) - absent
    for number in held & pinned:
        slot = table.find(name(number))
        assert slot is not None
        table.pin(slot)
    removal = Removal(table, prefix=name(root))
    removed = run(removal)
    expected = behind(parents, root, held)
    assert set(removed) == {name(n) for n in expected - pinned}
    assert removal.kept == len(expected & pinned)
    at = {one: number for number, one in enumerate(removed)}
    for number in expected - pinned:
        parent = at.get(name(parents[number]), len(at))
        assert at[name(number)] < parent or number == root


def test_no_step_looks_at_a_whole_tier() -> None:
    """A chain of many blocks, whose first slot is looked at in a step long before the last one."""
    count = 3 * LOOKED_MAX
    table = table_of(chain(count))
    removal = Removal(table, prefix=name(count - 1))
    steps = []
    more = True
    while more:
        names, more = removal.step()
        assert [table.discard(one) is not None for one in names] == [True] * len(names)
        steps.append(names)
    assert [one for names in steps for one in names] == [name(count), name(count - 1)]
    assert steps[:2] == [[], []], "two steps cannot have seen three steps' slots"
    assert len(steps) >= 2 * 3, "it looks twice"


def test_steps_are_bounded_and_lose_nothing() -> None:
    """Of two namespaces in turns one goes, so many blocks in a step; a pinned one stays."""
    count = 2 * LOOKED_MAX + PART
    table = table_of(chain(count), other=2)
    slot = table.find(name(4))
    assert slot is not None
    table.pin(slot)
    removal = Removal(table, namespace=OTHER)
    first, more = removal.step()
    assert (len(first), more) == (REMOVED_MAX, True)
    rest = run_after(removal, first)
    assert len(first) + len(rest) == count // 2 - 1
    assert removal.kept == 1
    assert {table.block(s).namespace for s in range(count) if table.committed(s)} == {
        NAMESPACE, OTHER,
    }  # fmt: skip
    assert len(table) == count - count // 2 + 1


def run_after(removal: Removal, first: list[SequenceHash]) -> list[SequenceHash]:
    """Remove what a first step has named, then the rest."""
    for one in first:
        removal.table.discard(one)
    return run(removal)


def test_blocks_that_come_to_slots_that_were_passed_go_too() -> None:
    """The first slot is empty when it is looked at, and full before the removal ends."""
    count = 2 * LOOKED_MAX
    table = table_of(chain(count))
    assert table.discard(name(1)) is not None
    removal = Removal(table)
    first, more = removal.step()
    assert more
    store(table, ROOT + 1, ROOT)
    run_after(removal, first)
    assert len(table) == 0


def test_what_comes_after_a_prefix_meanwhile_goes_too() -> None:
    """A block after the last one comes to a slot that was passed, and another one after it. Their
    parents have left when they are seen."""
    count = 2 * LOOKED_MAX
    table = table_of({ROOT + 3: ROOT + 4, ROOT + 5: ROOT + 6, **chain(count)})
    removal = Removal(table, prefix=name(ROOT))
    first, more = removal.step()
    assert (first, more) == ([], True)
    for left in (ROOT + 3, ROOT + 5):
        assert table.discard(name(left)) is not None
    store(table, ROOT + 1, count)
    store(table, ROOT + 2, ROOT + 1)
    run(removal)
    assert len(table) == 0


def test_a_block_is_not_taken_for_another_that_had_its_parents_slot() -> None:
    """The parent of 2 leaves when 2 was looked at, and a block after the prefix takes its slot."""
    count = LOOKED_MAX
    table = table_of({2: 1, **{n: n for n in range(20_000, 20_000 + count)}, 1: ROOT + 1})
    removal = Removal(table, prefix=name(ROOT))
    assert removal.step() == ([], True)
    assert table.discard(name(1)) is not None
    store(table, 3, ROOT)
    assert run(removal) == [name(3)]
    assert table.find(name(2)) is not None


def test_pinned_blocks_are_kept_and_counted_in_large_tiers() -> None:
    """Every hundredth of a chain is pinned; those between them leave."""
    count = 2 * LOOKED_MAX
    table = table_of(chain(count))
    pinned = range(100, count + 1, 100)
    for number in pinned:
        slot = table.find(name(number))
        assert slot is not None
        table.pin(slot)
    removal = Removal(table, prefix=name(ROOT))
    assert len(run(removal)) == count - len(pinned)
    assert removal.kept == len(pinned) == len(table)


def test_pinned_blocks_go_where_they_are_to() -> None:
    table = table_of(chain(3))
    for number in (1, 2, 3):
        slot = table.find(name(number))
        assert slot is not None
        table.pin(slot)
    assert run(Removal(table)) == []
    removal = Removal(table, prefix=name(ROOT), even_pinned=True)
    assert run(removal) == [name(3), name(2), name(1)]


def test_slots_that_hold_other_blocks_by_now_are_left() -> None:
    """A block that has left its slot between two steps; another one came there."""
    count = LOOKED_MAX + PART
    table = table_of(chain(count))
    removal = Removal(table, prefix=name(ROOT))
    names, more = removal.step()
    assert (names, more) == ([], True)
    assert table.discard(name(count)) is not None
    store(table, ROOT + 1, ROOT + 2)
    removed = run(removal)
    assert len(removed) == count - 1
    assert table.find(name(ROOT + 1)) is not None


def test_parents_in_a_circle_end() -> None:
    """A wrong name of a parent is the caller's mistake, and no reason to stand still."""
    table = table_of({1: 2, 2: 3, 3: 1, 4: ROOT})
    assert run(Removal(table, prefix=name(ROOT))) == [name(4)]
