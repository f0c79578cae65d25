"""A store that is made smaller: which blocks stay, and where."""

from __future__ import annotations

from dataclasses import replace

import msgspec
from hypothesis import example, given
from hypothesis import strategies as st
from kvbm_common.tier.block_columns import BlockColumns
from kvbm_common.tier.blocks import Block
from kvbm_common.tier.layout import UNIT_BYTES, Layout
from kvbm_disk_tier.core.journal import Operation, Record, encode_records, replay
from kvbm_disk_tier.core.resizing import Move, resized

from tests.services.disk_tier.helpers import NAMESPACE, name

SLAB_SLOTS = 4
FIRST = 3 * UNIT_BYTES
"""The length of the slots that the store was cut for; others have one or two units."""
NO_BOUND = 1_000_000


def layout(slot_count: int) -> Layout:
    """A store of so many slots of the first size."""
    return Layout(FIRST, slot_count, SLAB_SLOTS)


def block(number: int, units: int) -> Block:
    """A block that fills its slot."""
    return Block(name(number), name(number - 1), NAMESPACE, number, units * UNIT_BYTES)


def some_of(places: range) -> st.SearchStrategy[list[int]]:
    """All places of a slab, one, or some."""
    assert places, "a slab takes a block of any size"
    place = st.sampled_from(places)
    return st.just(list(places)) | place.map(lambda one: [one]) | st.lists(place, unique=True)


@st.composite
def stores(draw: st.DrawFn) -> tuple[int, dict[int, Block]]:
    """A number of slots, and blocks by place, oldest first: each slab has blocks of one size."""
    slot_count = draw(st.integers(1, 20))
    end, step = slot_count * 3, SLAB_SLOTS * 3
    places: list[tuple[int, int]] = []
    for begin in range(0, end, step):
        units = draw(st.integers(1, 3))
        inside = range(begin, min(begin + step, end) - units + 1, units)
        places += [(place, units) for place in draw(some_of(inside))]
    shuffled = draw(st.permutations(places))
    return slot_count, {place: block(n, units) for n, (place, units) in enumerate(shuffled, 1)}


@given(stores(), st.integers(1, 20))
def test_what_fits_is_kept(store: tuple[int, dict[int, Block]], wanted: int) -> None:
    """Blocks before the end stay, or make room for others; the journal is what was returned."""
    slot_count, blocks = store
    wanted = min(wanted, slot_count)
    kept, moves, replaced = resized(
        BlockColumns.of(blocks), layout(wanted), moved_units_max=NO_BOUND
    )
    units_of = {place: one.bytes // UNIT_BYTES for place, one in blocks.items()}
    stay = {p: one for p, one in blocks.items() if p + units_of[p] <= 3 * wanted}
    moved = {move.target: blocks[move.source] for move in moves}
    assert dict(replaced).items() <= stay.items()
    assert dict(kept) == stay | moved
    assert stay.keys() & moved.keys() == set(replaced)
    assert [one.hash for one in kept.values()] == [
        one.hash for one in blocks.values() if one.hash in kept.slot_of
    ], "the order of their age stays"
    records = [
        Record(Operation.COMMITTED, order, place, one)
        for order, (place, one) in enumerate(kept.items(), 1)
    ]
    again = replay(encode_records(records), layout(wanted))
    assert (dict(again.blocks), again.damaged) == (dict(kept), 0)


ONE_OVER_THE_END = (8, {8: block(1, 2)} | {12 + n: block(2 + n, 1) for n in range(9)})
"""A block lies over an end at 9; nine blocks of one unit after it are newer."""


@example(ONE_OVER_THE_END, 3)
@given(stores(), st.integers(1, 20))
def test_what_the_journal_lists_is_not_overwritten(
    store: tuple[int, dict[int, Block]], wanted: int
) -> None:
    """No target overlaps where a block was, but that of one which leaves by the journal first."""
    slot_count, blocks = store
    wanted = min(wanted, slot_count)
    found = resized(BlockColumns.of(blocks), layout(wanted), moved_units_max=NO_BOUND)
    listed = {
        unit
        for place, one in blocks.items()
        if place not in found.replaced
        for unit in range(place, place + one.bytes // UNIT_BYTES)
    }
    for move in found.moves:
        assert not listed.intersection(range(move.target, move.target + move.units)), move


def test_a_slab_of_a_block_that_lies_over_the_end_keeps_its_class() -> None:
    """Of 9 units, a block of two has the last and one after it. It moves; one of one leaves."""
    blocks = {8: block(1, 2), 12: block(2, 1)}
    kept, moves, _ = resized(BlockColumns.of(blocks), layout(3), moved_units_max=NO_BOUND)
    assert (dict(kept), moves) == ({0: blocks[8]}, [Move(8, 0, 2)])


@given(st.integers(1, 20).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1)))))
def test_of_blocks_of_one_size_as_many_stay_as_there_are_slots(case: tuple[int, set[int]]) -> None:
    """Half of the slots, wherever the blocks were."""
    slot_count, taken = case
    wanted = max(1, slot_count // 2)
    blocks = {3 * slot: block(slot + 1, 3) for slot in sorted(taken)}
    kept, _, _ = resized(BlockColumns.of(blocks), layout(wanted), moved_units_max=NO_BOUND)
    assert len(kept) == min(len(blocks), wanted)


def test_ancestors_move_first_and_no_more_than_is_allowed() -> None:
    """Of a chain of blocks 1 to 3 after the end, two may move: 1 and 2, into the lowest slots."""
    blocks = {3 * slot: block(slot - 3, 3) for slot in (4, 5, 6)}
    kept, moves, _ = resized(BlockColumns.of(blocks), layout(4), moved_units_max=7)
    assert [(move.source, move.target) for move in moves] == [(12, 0), (15, 3)]
    assert dict(kept) == {0: blocks[12], 3: blocks[15]}


def test_of_a_full_store_the_newest_chains_stay_whole() -> None:
    """An old chain lies before the end, and the one that was used last over both parts.

    1. Its first two blocks are the oldest of all, and stay. 2. Its others move into the old one's
    places, the last of the old one first. 3. Without a move nothing is replaced.
    """
    numbers = (11, 12, 1, 2, 3, 4, 13, 14)
    blocks = {3 * slot: block(number, 3) for slot, number in enumerate(numbers)}
    found = resized(BlockColumns.of(blocks), layout(5), moved_units_max=NO_BOUND)
    assert {one.hash for one in found.blocks.values()} == {name(n) for n in (11, 12, 13, 14, 1)}
    assert [(move.source, move.target) for move in found.moves] == [(18, 12), (21, 9)]
    assert list(found.replaced) == [9, 12]
    still = resized(BlockColumns.of(blocks), layout(5), moved_units_max=2)
    assert (dict(still.replaced), still.moves) == ({}, [])


@given(stores(), st.integers(1, 20))
def test_what_is_replaced_is_worth_less(store: tuple[int, dict[int, Block]], wanted: int) -> None:
    """Of one size, no block that left for want of a place came after one that stays and is older.

    The blocks have no parents here: so the newest are worth most.
    """
    slot_count, chained = store
    blocks = {place: replace_parent(one) for place, one in chained.items()}
    wanted = min(wanted, slot_count)
    found = resized(BlockColumns.of(blocks), layout(wanted), moved_units_max=NO_BOUND)
    age = {one.hash: number for number, one in enumerate(blocks.values())}
    for one in found.replaced.values():
        moved = [blocks[move.source] for move in found.moves]
        assert any(age[other.hash] > age[one.hash] for other in moved), one


def replace_parent(one: Block) -> Block:
    """Return a block of a chain of its own."""
    return msgspec.structs.replace(one, parent=name(1_000 + one.checksum))


def test_blocks_whose_move_failed_leave() -> None:
    """Of two that move, one cannot be read; the other and the one that stays are kept."""
    blocks = {3 * slot: block(slot, 3) for slot in (1, 5, 6)}
    found = resized(BlockColumns.of(blocks), layout(4), moved_units_max=NO_BOUND)
    lost, moved = found.moves
    kept, moves, _ = found.without([lost])
    assert moves == [moved]
    assert dict(kept) == {3: blocks[3], moved.target: blocks[moved.source]}


def test_a_sealed_slot_is_longer_than_its_block() -> None:
    """A block of two units takes three: one that would end after the last slot leaves."""
    sealed = replace(layout(1), extra_bytes=UNIT_BYTES)
    blocks = {0: block(1, 2), 3: block(2, 2)}
    kept, moves, _ = resized(BlockColumns.of(blocks), sealed, moved_units_max=NO_BOUND)
    assert (dict(kept), moves) == ({0: blocks[0]}, [])
