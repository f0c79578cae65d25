"""The memory that a host tier may take beside its arena, from its slots and its settings."""

from __future__ import annotations

from kvbm_common.tier import departures
from kvbm_common.tier.former_blocks import horizon_for
from kvbm_common.tier.name_history import ENTRY_BYTES

from kvbm_host_tier.core import explanation_ring, first_blocks, known_runs
from kvbm_host_tier.core.limits import HostTierLimits
from kvbm_host_tier.core.lower_tiers import LOWER

SLOT_BYTES = 2_048
"""A block, its slot, its places in tables and in the policy; measured with `lru`: 800."""
BELOW_BYTES = 320
"""Memory for what is known of a block of a lower tier."""
QUEUE_BYTES = 48 << 20
"""Messages that wait, offers, lookups, leases, the diary and its 20,000 entries."""


def parts_of(limits: HostTierLimits, *, slot_count: int, below_count: int) -> dict[str, int]:
    """Return the bytes that each part may take, with so many slots here and blocks below."""
    assert slot_count >= 0, f"{slot_count} slots"
    assert below_count >= 0, f"{below_count} blocks below"
    slots, chosen = max(1, slot_count), limits.history_entries
    return {
        "slots": slot_count * SLOT_BYTES,
        "blocks_below": below_count * BELOW_BYTES,
        "departures": (1 + len(LOWER)) * departures.departures_for(slots, chosen) * ENTRY_BYTES,
        "former_blocks": 3 * horizon_for(slot_count, below_count),
        "first_blocks": first_blocks.first_blocks_for(slots, chosen) * ENTRY_BYTES,
        "known_runs": known_runs.STRETCHES_MAX * limits.stretch_blocks * known_runs.BLOCK_BYTES,
        "explanations": limits.explain_requests * explanation_ring.ENTRY_BYTES,
        "queues": QUEUE_BYTES,
    }
