"""The checksum is xxh3-64, over exactly the bytes that were named."""

from __future__ import annotations

import numpy as np
import pytest
from kvbm_common.checksum import (
    block_checksum,
    checksums,
    combined_checksum,
    part_checksums,
    parts_checksum,
)


def test_the_function_is_xxh3_64() -> None:
    """The value for the empty input is from the xxHash specification; it pins the algorithm."""
    assert block_checksum(b"") == 0x2D06800538D394C2


def test_blocks_are_summed_where_they_lie() -> None:
    array = np.random.default_rng(3).integers(0, 256, 4 * 4096, dtype=np.uint8)
    offsets = list(np.array([8192, 0], dtype=np.uint64))
    expected = [
        block_checksum(array[int(offset) : int(offset) + 4096].tobytes()) for offset in offsets
    ]
    assert checksums(array, offsets, 4096) == expected
    assert block_checksum(array.data) == block_checksum(array.tobytes())


def test_parts_sum_up_as_if_they_lay_back_to_back() -> None:
    array = np.random.default_rng(4).integers(0, 256, 3 * 4096, dtype=np.uint8)
    assert parts_checksum([array[:4096], array[4096:].data]) == block_checksum(array)


def test_a_block_has_the_checksum_of_its_parts_checksums() -> None:
    """Of one part its own; of several the xxh3-64 of little-endian numbers, in their order."""
    assert combined_checksum([5]) == 5
    packed = (5).to_bytes(8, "little") + (2**64 - 1).to_bytes(8, "little")
    assert combined_checksum([5, 2**64 - 1]) == block_checksum(packed)
    assert combined_checksum([2**64 - 1, 5]) != combined_checksum([5, 2**64 - 1])
    with pytest.raises(AssertionError):
        combined_checksum([])


@pytest.mark.parametrize("part_count", [1, 2, 3, 16])
def test_parts_are_of_equal_size_and_back_to_back(part_count: int) -> None:
    """Each as if it were alone; what cannot be cut so is our mistake."""
    array = np.random.default_rng(5).integers(0, 256, 48 * 16, dtype=np.uint8)
    expected = tuple(block_checksum(part) for part in np.split(array, part_count))
    assert part_checksums(array, part_count) == expected
    assert part_checksums(array.data, part_count) == expected
    with pytest.raises(AssertionError):
        part_checksums(array[:-1], 2)


def test_one_flipped_bit_shows() -> None:
    block = bytearray(64 << 10)
    before = block_checksum(memoryview(block))
    block[-1] ^= 1
    assert block_checksum(memoryview(block)) != before


def test_a_block_beyond_the_end_is_our_mistake() -> None:
    with pytest.raises(AssertionError):
        checksums(np.zeros(4096, dtype=np.uint8), [1], 4096)


def test_combined_checksum_of_one_part_is_the_part_and_of_two_depends_on_their_order() -> None:
    assert combined_checksum([7]) == 7
    assert combined_checksum([7, 8]) == block_checksum((7 + (8 << 64)).to_bytes(16, "little"))
    assert combined_checksum([7, 8]) != combined_checksum([8, 7])
