"""Sums of blocks where they lie in memory, part by part, many blocks in one call."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby

import numpy as np

from kvbm_common.checksum import pack_sums
from kvbm_common.copying import COPIER, Copier, Lanes, Numbers, Places
from kvbm_common.tier.blocks import Block
from kvbm_common.tier.parts import Grid


def sums_at(
    starts: Sequence[int], size: int, grid: Grid, *, copier: Copier = COPIER
) -> list[bytes]:
    """Return the packed checksums of blocks of `size` bytes at these addresses."""
    offsets, lengths, lanes = _pieces(size, grid)
    places = Places(np.array(starts, dtype=np.uint64).reshape(-1, 1) + offsets, lengths)
    sums, count = copier.sums(places, lanes=lanes), grid.count
    return [pack_sums(sums[at : at + count]) for at in range(0, len(sums), count)]


def sums_of(blocks: Sequence[Block], starts: Sequence[int]) -> tuple[bytes | None, ...]:
    """Return the packed checksums of the blocks at these addresses; None: other bytes lie there."""
    found: list[bytes | None] = []
    pairs = zip(blocks, starts, strict=True)
    for (size, _), alike in groupby(pairs, lambda pair: (pair[0].bytes, pair[0].code)):
        some, places = zip(*alike, strict=True)
        sums = sums_at(places, size, some[0].grid)
        known = zip(some, sums, strict=True)
        found += [one if block.has_sums(one) else None for block, one in known]
    return tuple(found)


@lru_cache(maxsize=64)
def _pieces(size: int, grid: Grid) -> tuple[Numbers, Numbers, Lanes]:
    """Return the offsets and lengths of the pieces of a block, and which part each is in."""
    run_bytes, rest = divmod(size, grid.run_count)
    assert not rest, f"{size} bytes are not cut by {grid}"
    parts = grid.parts_of_runs()
    if not grid.is_scattered:
        parts, run_bytes = np.arange(grid.count), size // grid.count
    offsets = np.arange(len(parts)) * run_bytes
    lengths = np.full(len(parts), run_bytes, dtype=np.uint64)
    return offsets.astype(np.uint64), lengths, Lanes(parts.astype(np.uint32), grid.count)
