"""Layout: the bytes of a part, and chunks that leave no block out."""

from __future__ import annotations

import pytest
from kvbm_common.nixl.layout import chunks_of, part_bytes
from kvbm_common.wire.local import Region


def test_a_part_has_the_pieces_of_all_regions() -> None:
    """Strides do not count: what lies between pieces belongs to other blocks."""
    regions = [
        Region(address=1000, stride=10, piece_bytes=8, blocks=4),
        Region(address=2000, stride=20, piece_bytes=4, blocks=4),
    ]
    assert part_bytes(regions) == 12


@pytest.mark.parametrize(
    ("blocks", "block_bytes", "sizes"),
    [(5, 10, [2, 2, 1]), (3, 100, [1, 1, 1]), (0, 10, [])],
    ids=["several", "larger-than-a-chunk", "none"],
)
def test_chunks_have_every_block_once(blocks: int, block_bytes: int, sizes: list[int]) -> None:
    """A block that is larger than a chunk has one of its own."""
    chunks = chunks_of(blocks, block_bytes, chunk_bytes=25)
    found = [list(range(blocks))[chunk] for chunk in chunks]
    assert [len(chunk) for chunk in found] == sizes
    assert [number for chunk in found for number in chunk] == list(range(blocks))
