"""A block is verified by the checksums of its parts, and says how it is cut."""

from __future__ import annotations

import sys

import pytest
from kvbm_common.checksum import block_checksum, combined_checksum, pack_sums
from kvbm_common.tier.blocks import BATCH_BLOCKS_MOST, Block, batch_blocks
from kvbm_common.tier.parts import ONE_PART, Grid, is_divisible
from msgspec.structs import replace

from tests.libs.helpers import block, name

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


MIB = 1 << 20


@pytest.mark.parametrize(
    ("slot_bytes", "blocks"),
    [(4 * MIB, 16), (MIB, 16), (MIB // 4, 64), (4096, BATCH_BLOCKS_MOST), (0, 256)],
)
def test_small_blocks_fill_a_batch_by_their_bytes(slot_bytes: int, blocks: int) -> None:
    assert batch_blocks(16, 16 * MIB, slot_bytes) == blocks


def test_without_a_measure_in_bytes_a_batch_is_counted_in_blocks() -> None:
    assert batch_blocks(2, 0, 4096) == 2
