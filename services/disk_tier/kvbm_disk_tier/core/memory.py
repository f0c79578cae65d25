"""The memory that a disk tier or an object tier may take, from its slots and its settings."""

from __future__ import annotations

from kvbm_common.tier import departures
from kvbm_common.tier.name_history import ENTRY_BYTES

from kvbm_disk_tier.core import frequency_filter
from kvbm_disk_tier.core.limits import DiskTierLimits
from kvbm_disk_tier.core.pending import DROPPED_MAX

SLOT_BYTES = 1_536
"""A block, its slot, its places in tables, in the policy and in the journal; measured: 600."""
PENDING_BYTES = 400
DROPPED_BYTES = 200
QUEUE_BYTES = 96 << 20
"""Messages that wait, reads, the diary, and the blocks that measure a disk at the start."""


def parts_of(limits: DiskTierLimits, *, slot_count: int, buffer_bytes: int = 0) -> dict[str, int]:
    """Return the bytes that each part may take; `buffer_bytes` are those of blocks in flight."""
    assert slot_count >= 0, f"{slot_count} slots"
    assert buffer_bytes >= 0, f"{buffer_bytes} bytes of buffers"
    slots = max(1, slot_count)
    return {
        "slots": slot_count * SLOT_BYTES,
        "departures": departures.departures_for(slots, limits.history_entries) * ENTRY_BYTES,
        "sights": frequency_filter.sights_for(slots) * ENTRY_BYTES,
        "waiting_writes": limits.pending_max * PENDING_BYTES,
        "dropped_writes": DROPPED_MAX * DROPPED_BYTES,
        "buffers": buffer_bytes,
        "queues": QUEUE_BYTES,
    }
