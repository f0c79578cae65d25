"""Size figures: how the bytes of a tier are shared out among sizes of blocks, for metrics."""

from __future__ import annotations

from collections import Counter
from typing import TypedDict

from kvbm_common.tier.slabs import SlabState
from kvbm_common.tier.slot_records import SlotRecords
from kvbm_common.wire.tier_stats import SizeStats


class SizeFigures(TypedDict):
    """The fields of a StatsReply that tell of sizes."""

    capacity_bytes: int
    slab_bytes: int
    slabs: dict[str, int]
    sizes: list[SizeStats]


NO_SIZES = SizeFigures(capacity_bytes=0, slab_bytes=0, slabs={}, sizes=[])
"""The figures of a tier whose slots have no length."""


def size_figures(table: SlotRecords) -> SizeFigures:
    """Return the figures of a table whose slots have lengths."""
    pool = table.pool
    states = Counter(slab.state for slab in pool.slabs)
    staged = Counter(map(table.slot_bytes, table.staged()))
    sizes = [
        SizeStats(
            slot_bytes=size.slot_bytes,
            slabs=len(size.slabs),
            slots=sum([slab.usable for slab in size.slabs.values()]),
            used=sum([slab.usable - len(slab.reset) for slab in size.slabs.values()])
            - staged[size.slot_bytes],
        )
        for size in pool.sizes.values()
    ]
    assert all(one.used >= 0 for one in sizes), f"more slots are staged than in use: {sizes}"
    return SizeFigures(
        capacity_bytes=table.usable_bytes,
        slab_bytes=pool.layout.slab_bytes,
        slabs={state.value: states[state] for state in SlabState},
        sizes=sizes,
    )


def waste_percent(table: SlotRecords) -> float:
    """Return the part of the slabs in use that no block fills, from 0 to 100.

    These are the ends of slabs, the roundings of slots, and the free slots of a class beside its
    blocks.
    """
    slabs = [slab for slab in table.pool.slabs if not slab.is_empty]
    in_use = sum([slab.length - slab.retired_bytes for slab in slabs])
    if not in_use or not table.pool.layout.is_sized:
        return 0.0
    return max(0.0, 100 * (1 - table.block_bytes / in_use))
