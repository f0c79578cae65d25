"""Packed blocks are those that were put in, as a dict says, and share what they can."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvbm_common.identity import SequenceHash
from kvbm_common.tier.blocks import CHECKSUM_MAX, Block
from kvbm_common.tier.packed_blocks import KINDS_MAX, Kind, PackedBlocks
from kvbm_common.tier.parts import Grid

from tests.libs.helpers import block, name, names

SLOTS = 6
BLOCKS = st.builds(
    Block,
    st.integers(1, 9).map(name),
    st.integers(0, 9).map(name),
    st.sampled_from([b"n" * 32, b"m" * 32]),
    st.sampled_from([0, 1, CHECKSUM_MAX]),
    st.sampled_from([1, 4096, 2**32 - 1]),
    st.sampled_from([1, 2, 259]),
)
BATCHES = st.dictionaries(st.integers(0, SLOTS - 1), BLOCKS, max_size=4)


class Both:
    """Packed blocks beside a dict of blocks by slot."""

    def __init__(self) -> None:
        self.kind_of: list[Block | Kind | None] = []
        self.packed = PackedBlocks(self.kind_of)
        self.blocks: dict[int, Block] = {}

    def slot_of(self, wanted: bytes) -> int | None:
        return next((slot for slot, one in self.blocks.items() if one.hash == wanted), None)

    def grow(self, slots: int) -> None:
        """Have so many slots at least."""
        count = max(0, slots - len(self.kind_of))
        self.kind_of += [None] * count
        self.packed.grow(count)

    def pack(self, batch: dict[int, Block]) -> None:
        """As a table does: lookups find the blocks by then."""
        self.blocks |= batch
        self.packed.pack(batch.items(), self.slot_of)

    def kind(self, slot: int) -> Kind:
        """The kind of a packed block."""
        kind = self.kind_of[slot]
        assert isinstance(kind, Kind)
        return kind

    def drop(self, slot: int) -> None:
        self.packed.drop(slot)
        del self.blocks[slot]

    def check(self) -> None:
        slots = [*self.blocks]
        found = self.packed.blocks(slots, [*map(self.kind, slots)])
        assert found == [*self.blocks.values()]
        for slot, one in self.blocks.items():
            assert self.packed.block(slot, self.kind(slot)) == one
            assert self.packed.name(slot) == one.hash
            assert self.packed.parent(slot) == one.parent
        self.packed.check(set(slots))


@settings(max_examples=200)
@given(st.lists(st.one_of(BATCHES, st.integers(0, SLOTS - 1)), max_size=12))
def test_packed_blocks_are_a_dict_of_blocks(steps: list[dict[int, Block] | int]) -> None:
    """A batch comes, or the block in a slot leaves; slots are made when they are needed."""
    both = Both()
    for step in steps:
        if isinstance(step, int):
            if step in both.blocks:
                both.drop(step)
        else:
            both.grow(max(step, default=-1) + 1)
            both.pack({slot: one for slot, one in step.items() if slot not in both.blocks})
        both.check()


def fresh(number: int, parent: int) -> Block:
    """A block whose fields no other one shares, as a message brings it."""
    namespace = bytes(bytearray(b"n" * 32))
    return Block(name(number), name(parent), namespace, 7, int("4096"))


def test_what_is_equal_is_one_object() -> None:
    """2 after 1 in one batch, 3 after 2 in another; 9 is elsewhere."""
    both = Both()
    both.grow(4)
    both.pack({0: fresh(1, 9), 2: fresh(2, 1)})
    both.pack({3: fresh(3, 2)})
    assert both.packed.parent(2) is both.packed.name(0)
    assert both.packed.parent(3) is both.packed.name(2)
    assert both.packed.parent(0) == name(9)
    assert both.kind(0) is both.kind(2) is both.kind(3)


def test_the_parent_of_a_block_that_came_first_may_be_folded() -> None:
    """The name of a folded block is known; its parent is not, until it is packed."""
    both = Both()
    both.grow(2)
    both.packed.restore([1], names(1))
    both.blocks[1] = block(1)
    both.pack({0: fresh(2, 1)})
    assert both.packed.parent(0) is both.packed.name(1)
    with pytest.raises(AssertionError, match="packed in slot 1"):
        both.packed.parent(1)


def test_many_kinds_are_known_again_only_in_part() -> None:
    """The table of kinds is bounded; blocks are the same with a kind of their own."""
    both = Both()
    count = KINDS_MAX + 2
    both.grow(2 * count)
    for number in range(2 * count):
        one = Block(name(number + 1), name(0), b"n" * 32, 7, 1 + number % count)
        both.pack({number: one})
    both.check()
    assert len({id(kind) for kind in both.kind_of}) > count
    assert both.packed.kind_count <= KINDS_MAX


def test_a_block_with_the_checksums_of_its_parts_is_not_packed() -> None:
    """Tiers that know them have fewer blocks, and keep those as objects."""
    one = Block.of_sums(
        SequenceHash(b"h" * 16), name(0), b"n" * 32, 64, Grid(ranges=2), bytes(range(16))
    )
    both = Both()
    both.grow(1)
    with pytest.raises(AssertionError, match="sums of its parts"):
        both.pack({0: one})


def test_an_empty_slot_has_no_block() -> None:
    both = Both()
    both.grow(1)
    for ask in (both.packed.name, both.packed.parent, both.packed.drop):
        with pytest.raises(AssertionError, match="slot 0"):
            ask(0)
