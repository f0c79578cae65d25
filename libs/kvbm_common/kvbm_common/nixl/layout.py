"""Layout: where a block's pieces are in device memory and in an arena slot, as arrays of spans.

A block of a rank is the pieces of its regions, back to back; in an arena slot the parts of all
ranks follow each other. A region may be one layer or all of them: only addresses and strides count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from kvbm_common.wire.local import Region

Addresses = npt.NDArray[np.uint64]
CHUNK_BYTES = 16 * 1024 * 1024
"""One transfer at a time moves so much: it is summed up while the next one flies. Smaller ones cost
more calls than they save (measured: offload at 0.62, 0.70 and 0.71 of NIXL's rate with chunks of 4,
8 and 16 MiB), larger ones delay the first checksum."""


def chunks_of(block_count: int, block_bytes: int, chunk_bytes: int = CHUNK_BYTES) -> list[slice]:
    """Cut a run of blocks into chunks of about `chunk_bytes`, at least one block each."""
    step = max(1, chunk_bytes // block_bytes)
    return [slice(start, min(start + step, block_count)) for start in range(0, block_count, step)]


def part_bytes(regions: Sequence[Region]) -> int:
    """Return how many bytes one rank's part of a block has."""
    return sum(region.piece_bytes for region in regions)


def device_pieces(regions: Sequence[Region], blocks: Sequence[int]) -> list[tuple[Addresses, int]]:
    """Return per region the addresses of the blocks' pieces, and the piece's size in bytes."""
    ids = np.asarray(blocks, dtype=np.uint64)
    return [
        (np.uint64(region.address) + ids * np.uint64(region.stride), region.piece_bytes)
        for region in regions
    ]


def slot_pieces(
    regions: Sequence[Region],
    slots: Sequence[int],
    *,
    arena_address: int,
    slot_bytes: int,
    part_offset: int,
) -> list[tuple[Addresses, int]]:
    """Return where the pieces of `device_pieces` are in the arena, in the same order."""
    starts = np.uint64(arena_address) + np.asarray(slots, dtype=np.uint64) * np.uint64(slot_bytes)
    pieces: list[tuple[Addresses, int]] = []
    offset = part_offset
    for region in regions:
        pieces.append((starts + np.uint64(offset), region.piece_bytes))
        offset += region.piece_bytes
    return pieces
