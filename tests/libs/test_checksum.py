"""The checksum is xxh3-64, over exactly the bytes that were named."""

from __future__ import annotations

import numpy as np
import pytest
from kvbm_common.checksum import block_checksum, checksums, parts_checksum


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


def test_one_flipped_bit_shows() -> None:
    block = bytearray(64 << 10)
    before = block_checksum(memoryview(block))
    block[-1] ^= 1
    assert block_checksum(memoryview(block)) != before


def test_a_block_beyond_the_end_is_our_mistake() -> None:
    with pytest.raises(AssertionError):
        checksums(np.zeros(4096, dtype=np.uint8), [1], 4096)
