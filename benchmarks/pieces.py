"""Spans of a rank's blocks whose part is one run in a slot: on the device, and in the arena.

The product finds them in `copying/rank_pieces.py`, for every grid of parts; that needs msgspec,
which `benchmarks/gpu.py` does without.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from kvbm_common.cuda.copies import Lent
from kvbm_common.nixl.spans import Spans


def device_spans(regions: Sequence[Lent], blocks: Sequence[int]) -> Spans:
    """Return where the pieces of the blocks are on the device, region by region."""
    ids = np.asarray(blocks, dtype=np.uint64)
    return _joined(
        [
            Spans.of(np.uint64(one.address) + ids * np.uint64(one.stride), one.piece_bytes)
            for one in regions
        ]
    )


def slot_spans(
    regions: Sequence[Lent],
    slots: Sequence[int],
    *,
    arena_address: int,
    slot_bytes: int,
    part_offset: int = 0,
) -> Spans:
    """Return where the same pieces are in the arena: a rank's part begins at `part_offset`."""
    starts = np.uint64(arena_address) + np.asarray(slots, dtype=np.uint64) * np.uint64(slot_bytes)
    found: list[Spans] = []
    offset = part_offset
    for region in regions:
        found.append(Spans.of(starts + np.uint64(offset), region.piece_bytes))
        offset += region.piece_bytes
    return _joined(found)


def _joined(spans: Sequence[Spans]) -> Spans:
    return Spans(np.concatenate([one.rows for one in spans]))
