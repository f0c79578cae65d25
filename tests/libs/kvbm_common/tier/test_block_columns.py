"""Columns of blocks say what a dict of blocks says, and policies filled with them what one by one
they would have learned. Folded blocks are taken in their order, once, with their slots."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvbm_common.eviction import POLICIES, EvictionPolicy, make_policy
from kvbm_common.eviction.lru import FreeOrder
from kvbm_common.eviction.prefix import PrefixPolicy
from kvbm_common.eviction.sketch import mix, mixed
from kvbm_common.identity import SequenceHash
from kvbm_common.tier.block_columns import COLUMNS, BlockColumns, FoldedBlocks
from kvbm_common.tier.blocks import Block
from kvbm_common.tier.parts import Grid
from msgspec.structs import replace

from tests.libs.helpers import block, name, names

SLOTS = 12


@st.composite
def forests(draw: st.DrawFn) -> dict[int, Block]:
    """Blocks by slot; parents are before them, after them, elsewhere, or themselves."""
    numbers = draw(st.permutations(range(1, draw(st.integers(0, SLOTS)) + 1)))
    slots = draw(st.permutations(range(SLOTS)))
    parents = st.one_of(st.none(), st.integers(0, SLOTS + 1))
    return {
        slot: block(number, parent=draw(parents), namespace=bytes([number % 2]) * 32)
        for slot, number in zip(slots, numbers, strict=False)
    }


def runs_turned_round(blocks: Mapping[int, Block]) -> list[SequenceHash]:
    """Every run of children after their parents, leaf first."""
    runs: list[list[SequenceHash]] = []
    for one in blocks.values():
        if runs and runs[-1][0] == one.parent:
            runs[-1].insert(0, one.hash)
        else:
            runs.append([one.hash])
    return [found for run in runs for found in run]


@given(forests())
def test_columns_are_the_dict_that_they_were_made_of(blocks: dict[int, Block]) -> None:
    """In the same order, block by block and all at once."""
    columns = BlockColumns.of(blocks)
    assert columns == blocks
    assert list(columns) == list(blocks)
    assert columns.blocks(0, len(columns)) == list(blocks.values())
    assert columns.blocks(1, 3) == list(blocks.values())[1:3]
    assert [slot in columns for slot in range(-1, SLOTS + 1)] == [
        slot in blocks for slot in range(-1, SLOTS + 1)
    ]
    assert columns.slot_of == {one.hash: slot for slot, one in blocks.items()}
    assert columns.leaves_first() == runs_turned_round(blocks)
    some = np.flatnonzero(np.arange(len(columns)) % 3)
    chosen = {columns.names[row] for row in some.tolist()}
    assert columns.leaves_first_of(some) == [
        found for found in columns.leaves_first() if found in chosen
    ]
    assert columns.total_bytes == sum(one.bytes for one in blocks.values())
    assert columns.without_older() is columns


@given(forests(), st.integers(1, SLOTS), st.randoms(use_true_random=False))
def test_columns_are_the_same_from_pieces_in_any_order(
    blocks: dict[int, Block], size: int, order: Random
) -> None:
    """A journal is read in pieces, whose records may be of any rows."""
    records = np.zeros(len(blocks), np.dtype(list(COLUMNS.items())))
    for row, (slot, one) in enumerate(blocks.items()):
        records[row] = (
            slot, one.bytes, one.hash, one.parent, one.namespace, one.checksum, one.code
        )  # fmt: skip
    rows = [*range(len(blocks))]
    order.shuffle(rows)
    parts = [np.array(rows[at : at + size], np.intp) for at in range(0, len(rows), size)]
    columns = BlockColumns(
        records["slot"].astype(np.intp), [(part, records[part]) for part in parts]
    )
    whole = BlockColumns.of(blocks)
    assert (columns, [*columns], columns.names) == (whole, [*whole], whole.names)
    assert columns.hashes.tolist() == columns.names
    assert columns.continues.tolist() == whole.continues.tolist()
    spaces = {one.namespace for one in blocks.values()}
    assert {space: found.tolist() for space, found in columns.by_namespace().items()} == {
        space: [one.namespace == space for one in blocks.values()] for space in spaces
    }
    some = np.arange(len(blocks)) % 3 > 0
    chosen = {slot: one for at, (slot, one) in enumerate(blocks.items()) if at % 3}
    assert columns.only(some) == chosen
    assert [*columns.only(some)] == [*chosen]
    assert columns.only(some).continues.tolist() == BlockColumns.of(chosen).continues.tolist()


def test_blocks_of_columns_share_what_is_equal() -> None:
    """A million blocks have few lengths, namespaces and numbers of parts."""
    blocks = {number: replace(block(number), bytes=4096) for number in (1, 2, 5)}
    made = BlockColumns.of(blocks).blocks(0, 3)
    assert made == [*blocks.values()]
    assert len({id(one.bytes) for one in made}) == 1
    assert len({id(one.namespace) for one in made}) == 1
    assert made[1].parent is made[0].hash


def test_columns_keep_how_a_block_is_cut() -> None:
    """Their checksums they do not keep: a lower tier learns them from the bytes."""
    grid = Grid(ranges=2, layers=3, heads=4)
    cut = replace(block(1), parts=grid.code.to_bytes(2, "little") + bytes(64))
    columns = BlockColumns.of({3: cut, 1: block(2)})
    assert columns[3] == replace(block(1), parts=grid.code)
    assert columns[1] == block(2)


def test_of_a_block_in_two_slots_the_newer_stays() -> None:
    """A removal was not journaled."""
    columns = BlockColumns.of({3: block(1), 0: block(2), 1: block(1)})
    assert columns.without_older() == {0: block(2), 1: block(1)}


def one_by_one(policy: EvictionPolicy, blocks: dict[int, Block]) -> None:
    """As if each was admitted in its turn, and then freed leaves first."""
    for one in blocks.values():
        policy.admit(one.hash, one.parent)
    for found in runs_turned_round(blocks):
        policy.hold(found)
        policy.free(found)


def facts(policy: EvictionPolicy) -> dict[SequenceHash, Sequence[object]]:
    """What a prefix policy knows of each block, but for the place among the leaves."""
    if not isinstance(policy, PrefixPolicy):
        return {}
    policy.check()
    return {
        found: (node.parent, node.turn, node.depth, node.count, node.used, node.kind, node.children)
        for found, node in policy._nodes.check().items()
    }


MOVES = st.lists(
    st.tuples(st.sampled_from(["touch", "hold", "forget", "admit"]), st.integers(1, SLOTS)),
    max_size=30,
)


@pytest.mark.parametrize("policy_name", sorted(POLICIES))
@settings(max_examples=150, deadline=None)
@given(blocks=forests(), moves=MOVES, peek=st.booleans())
def test_a_policy_that_is_filled_knows_what_it_would_have_learned(
    policy_name: str, blocks: dict[int, Block], moves: list[tuple[str, int]], peek: bool
) -> None:
    """… and goes on like it, whatever happens to which of the blocks."""
    filled, taught = (make_policy(policy_name, SLOTS) for _ in range(2))
    filled.fill(BlockColumns.of(blocks))
    one_by_one(taught, blocks)
    if peek:
        assert facts(filled) == facts(taught)
    here, held = {one.hash for one in blocks.values()}, set[SequenceHash]()
    for verb, number in moves:
        moved = name(number)
        for policy in (filled, taught):
            match verb:
                case "admit" if moved not in here:
                    policy.admit(moved, name(number - 1))
                case "touch" if moved in here:
                    policy.touch(moved)
                case "hold" if moved in held:
                    policy.free(moved)
                case "hold" if moved in here:
                    policy.hold(moved)
                case "forget" if moved in here - held:
                    policy.forget(moved)
                case _:
                    pass
        if verb == "admit":
            here.add(moved)
        elif verb == "hold" and moved in here:
            held ^= {moved}
        elif verb == "forget" and moved not in held:
            here.discard(moved)
        assert len(filled) == len(taught) == len(here - held)
        assert filled.victims(3) == taught.victims(3)
    assert facts(filled) == facts(taught)
    assert filled.victims(SLOTS) == taught.victims(SLOTS)


def test_a_former_order_is_left_once_and_does_not_come_back() -> None:
    """1 ← 2 ← 3: the leaf first. What is freed again is the latest."""
    order = FreeOrder()
    order.fill(BlockColumns.of({number: block(number) for number in (1, 2, 3)}))
    assert list(order) == names(3, 2, 1)
    order.hold(name(2))
    order.free(name(4))
    order.free(name(2))
    assert list(order) == names(3, 1, 4, 2)
    order.hold(name(3))
    assert (list(order), len(order), name(3) in order) == (names(1, 4, 2), 3, False)
    with pytest.raises(KeyError):
        order.hold(name(3))


def test_many_names_are_mixed_as_one_is() -> None:
    """The sketch is filled in bulk, and asked for single names."""
    columns = BlockColumns.of({slot: block(1 + slot * 2**56) for slot in range(9)})
    assert mixed(columns.hashes).tolist() == [mix(one) for one in columns.names]


def folded(*numbers: int) -> FoldedBlocks:
    """Blocks in slots of ten times their numbers."""
    return FoldedBlocks(BlockColumns.of({10 * number: block(number) for number in numbers}))


def test_blocks_are_taken_in_their_order_and_once() -> None:
    blocks = folded(3, 1, 2)
    assert (len(blocks), blocks.slots()) == (3, {10, 20, 30})
    assert blocks.take(2) == [(30, block(3)), (10, block(1))]
    assert (len(blocks), blocks.slots()) == (1, {20})
    assert blocks.take(9) == [(20, block(2))]
    assert (len(blocks), blocks.slots()) == (0, set())
    assert blocks.take(1) == []


def test_a_block_can_be_read_without_being_taken() -> None:
    blocks = folded(3, 1)
    assert blocks[10] == block(1)
    assert len(blocks) == 2


def test_columns_are_given_up_with_their_last_block() -> None:
    """Columns of millions of blocks do not stay in memory for nothing."""
    columns = BlockColumns.of({10: block(1), 20: block(2)})
    alive, blocks = weakref.ref(columns.slots), FoldedBlocks(columns)
    del columns
    blocks.take(1)
    assert alive() is not None
    blocks.take(1)
    assert alive() is None
