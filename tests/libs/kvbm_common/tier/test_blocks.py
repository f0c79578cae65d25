"""Columns of blocks say what a dict of blocks says, and policies filled with them what one by one
they would have learned. Folded blocks are taken in their order, once, with their slots."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvbm_common.checksum import block_checksum, combined_checksum, pack_sums
from kvbm_common.eviction import POLICIES, EvictionPolicy, make_policy
from kvbm_common.eviction.lru import FreeOrder
from kvbm_common.eviction.prefix import PrefixPolicy
from kvbm_common.eviction.sketch import mix, mixed
from kvbm_common.identity import SequenceHash
from kvbm_common.tier.blocks import (
    BATCH_BLOCKS_MOST,
    Block,
    BlockColumns,
    FoldedBlocks,
    batch_blocks,
)
from kvbm_common.tier.parts import ONE_PART, Grid, is_divisible
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


def test_columns_keep_how_a_block_is_cut() -> None:
    """Their checksums they do not keep: a lower tier learns them from the bytes."""
    grid = Grid(ranges=2, layers=3, heads=4)
    cut = replace(block(1), parts=grid.code.to_bytes(2, "little") + bytes(64))
    columns = BlockColumns.of({3: cut, 1: block(2)})
    assert columns[3] == replace(block(1), parts=grid.code)
    assert columns[1] == block(2)


DATA = bytes(range(64))
SUMS = tuple(block_checksum(DATA[start : start + 32]) for start in (0, 32))
PACKED = pack_sums(SUMS)


def parted(sums: bytes = b"") -> Block:
    """Block 1, of 64 bytes in two parts."""
    parts = b"\x02\0" + sums if sums else 2
    return replace(block(1), checksum=combined_checksum(PACKED), parts=parts)


def test_a_block_of_one_part_is_verified_by_its_checksum() -> None:
    """After its bytes the slot may hold anything."""
    alone = replace(block(1), checksum=block_checksum(DATA))
    packed = pack_sums([alone.checksum])
    assert (alone.part_count, alone.part_sums) == (1, packed)
    assert alone.sums_in(memoryview(DATA + b"more")) == packed
    assert alone.sums_in(memoryview(bytes(64))) is None
    assert alone.with_sums(packed) is alone


@pytest.mark.parametrize("flipped", [None, 0, 31, 32, 63])
def test_a_block_of_two_parts_is_verified_by_what_their_checksums_combine_to(
    flipped: int | None,
) -> None:
    """A byte of either part; what was read is then known to each rank."""
    data = bytearray(DATA)
    if flipped is not None:
        data[flipped] ^= 1
    sums = parted().sums_in(memoryview(data))
    assert sums == (PACKED if flipped is None else None)
    assert parted().with_sums(PACKED) == parted(PACKED)
    assert (parted(PACKED).part_count, parted(PACKED).part_sums) == (2, PACKED)
    assert (parted().part_count, parted().part_sums) == (2, b"")


def test_scattered_parts_are_summed_over_their_runs() -> None:
    """Two ranges of two layers and two heads, in runs of 8 bytes."""
    grid = Grid(ranges=2, layers=2, heads=2)
    runs = [DATA[at : at + 8] for at in range(0, 64, 8)]
    parts = [runs[0] + runs[2], runs[1] + runs[3], runs[4] + runs[6], runs[5] + runs[7]]
    sums = pack_sums(map(block_checksum, parts))
    cut = Block.of_sums(name(1), name(0), bytes(32), 64, grid, sums)
    assert (cut.grid, cut.part_sums, cut.checksum) == (grid, sums, block_checksum(sums))
    assert cut.sums_in(memoryview(DATA)) == sums
    assert cut.sums_in(memoryview(DATA[::-1])) is None


@pytest.mark.parametrize("sums", [(), (1,), SUMS[::-1], (*SUMS, 0)])
def test_other_checksums_are_not_the_blocks(sums: tuple[int, ...]) -> None:
    """Too few, too many, in another order."""
    packed = pack_sums(sums)
    assert parted().has_sums(PACKED)
    assert not parted().has_sums(packed)
    assert not parted().has_sums(PACKED + b"x")
    with pytest.raises(AssertionError):
        parted().with_sums(packed)


@pytest.mark.parametrize(
    ("size", "parts", "good"),
    [(64, 1, True), (64, 2, True), (64, 3, False), (64, 0, False), (0, 1, True),
     (65_536, 65_536, False), (65, 65, False), (24, Grid(2, 3, 4).code, True),
     (25, Grid(2, 3, 4).code, False)],
)  # fmt: skip
def test_which_parts_a_block_can_have(size: int, parts: int, good: bool) -> None:
    """Of equal size, and by a grid that a record of the journal can say."""
    assert is_divisible(size, parts) is good


def test_a_block_of_one_part_takes_no_more_memory_than_it_did() -> None:
    """Python hands out multiples of 16 bytes: 56 bytes took 64, too."""
    assert sys.getsizeof(block(1)) <= 64


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


def test_a_block_of_several_parts_has_their_checksums() -> None:
    """One part: its checksum is the block's. Several: the block keeps the checksum of each."""
    one = Block.of_sums(name(1), name(0), bytes(32), 64, ONE_PART, pack_sums([7]))
    assert one == Block(name(1), name(0), bytes(32), 7, 64)
    sums = pack_sums([7, 8])
    two = Block.of_sums(name(1), name(0), bytes(32), 64, Grid(heads=2), sums)
    assert (two.part_sums, two.checksum) == (sums, combined_checksum(sums))
    assert two.has_sums(sums)
    with pytest.raises(AssertionError):
        Block.of_sums(name(1), name(0), bytes(32), 64, Grid(heads=3), sums)


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


MIB = 1 << 20


@pytest.mark.parametrize(
    ("slot_bytes", "blocks"),
    [(4 * MIB, 16), (MIB, 16), (MIB // 4, 64), (4096, BATCH_BLOCKS_MOST), (0, 256)],
)
def test_small_blocks_fill_a_batch_by_their_bytes(slot_bytes: int, blocks: int) -> None:
    assert batch_blocks(16, 16 * MIB, slot_bytes) == blocks


def test_without_a_measure_in_bytes_a_batch_is_counted_in_blocks() -> None:
    assert batch_blocks(2, 0, 4096) == 2
