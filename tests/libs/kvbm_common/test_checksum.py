"""The checksum is xxh3-64, over exactly the bytes that were named."""

from __future__ import annotations

import numpy as np
import pytest
from kvbm_common.checksum import (
    block_checksum,
    combined_checksum,
    pack_sums,
    part_checksums,
    parts_checksum,
    unpack_sums,
)
from kvbm_common.copying import Copier, NativeCopier, PlainCopier
from kvbm_common.copying.block_sums import sums_at, sums_of
from kvbm_common.tier.blocks import Block
from kvbm_common.tier.parts import Grid

from tests.libs.helpers import name
from tests.libs.native import library


def test_the_function_is_xxh3_64() -> None:
    """The value for the empty input is from the xxHash specification; it pins the algorithm."""
    assert block_checksum(b"") == 0x2D06800538D394C2


def test_parts_sum_up_as_if_they_lay_back_to_back() -> None:
    array = np.random.default_rng(4).integers(0, 256, 3 * 4096, dtype=np.uint8)
    assert parts_checksum([array[:4096], array[4096:].data]) == block_checksum(array)


def test_a_block_has_the_checksum_of_its_parts_checksums() -> None:
    """Of one part its own; of several the xxh3-64 of little-endian numbers, in their order."""
    assert combined_checksum(pack_sums([5])) == 5
    packed = (5).to_bytes(8, "little") + (2**64 - 1).to_bytes(8, "little")
    assert pack_sums([5, 2**64 - 1]) == packed
    assert unpack_sums(packed) == (5, 2**64 - 1)
    assert combined_checksum(packed) == block_checksum(packed)
    assert combined_checksum(pack_sums([2**64 - 1, 5])) != combined_checksum(packed)
    with pytest.raises(AssertionError):
        combined_checksum(b"")
    with pytest.raises(AssertionError):
        unpack_sums(b"1234567")


CUTS = [(1, 1, 1), (1, 1, 2), (3, 1, 1), (1, 1, 16), (1, 4, 3), (2, 2, 4), (4, 3, 1)]


@pytest.mark.parametrize(
    "copier", [NativeCopier(library()), PlainCopier()], ids=["native", "plain"]
)
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_parts_are_summed_over_their_runs(cut: tuple[int, int, int], copier: Copier) -> None:
    """Each as if it lay alone, by slices of [range, layer, head, byte]; what cannot be cut so is a
    mistake of ours. The way without a copy, where blocks lie in memory, finds the same."""
    grid, size = Grid(*cut), 48 * 64
    blocks = np.random.default_rng(5).integers(0, 256, (3, size), dtype=np.uint8)
    found = sums_at([row.ctypes.data for row in blocks], size, grid, copier=copier)
    for block, sums in zip(blocks, found, strict=True):
        cells = block.reshape(*cut, -1)
        parts = [
            cells[at, :, head].tobytes() for at in range(cut[0]) for head in range(cut[2])
        ]  # fmt: skip
        assert unpack_sums(sums) == tuple(map(block_checksum, parts))
        assert part_checksums(block, grid) == sums
        assert part_checksums(block.data, grid) == sums
    if grid.run_count > 1:
        with pytest.raises(AssertionError):
            part_checksums(blocks[0, :-1], grid)
        with pytest.raises(AssertionError):
            sums_at([0], size - 1, grid)


def test_blocks_in_memory_are_compared_many_at_once() -> None:
    """Of several sizes and cuts, in their order; None: other bytes lie there."""
    rows = np.random.default_rng(6).integers(0, 256, (4, 96), dtype=np.uint8)
    sizes, grids = (96, 96, 48, 96), (Grid(2, 3, 4), Grid(2, 3, 4), Grid(), Grid(heads=2))
    blocks = [
        Block.of_sums(name(1), name(0), bytes(32), size, grid, part_checksums(row[:size], grid))
        for row, size, grid in zip(rows, sizes, grids, strict=True)
    ]
    rows[1, 95] ^= 1
    rows[2, 50] ^= 1  # After the block.
    found = sums_of(blocks, [row.ctypes.data for row in rows])
    assert [sums is not None for sums in found] == [True, False, True, True]
    assert found[0] == blocks[0].part_sums


def test_one_flipped_bit_shows() -> None:
    block = bytearray(64 << 10)
    before = block_checksum(memoryview(block))
    block[-1] ^= 1
    assert block_checksum(memoryview(block)) != before
