"""Sizes: how the bytes of tiers are shared out among slots of each length."""

from __future__ import annotations

from collections.abc import Sequence

from kvbm_common.wire.tier_stats import SizeStats, TenantStats
from kvbm_common.wire.verbs import StatsReply

from kvbm_metrics.core.models import TierView
from kvbm_metrics.core.parts_models import SizeView, TenantView

USED_STATES = ("inactive", "active")
"""Slots with a committed block; a staged slot holds nothing that can be read yet."""


def used_slots(stats: StatsReply) -> int:
    """Return the number of slots with a block that can be read."""
    return sum(stats.slots.get(state, 0) for state in USED_STATES)


def bytes_of(stats: StatsReply) -> tuple[int, int]:
    """Return the bytes of a tier's slots, and those of the slots with a block."""
    if not stats.capacity_bytes:
        return stats.slots.get("total", 0) * stats.slot_bytes, used_slots(stats) * stats.slot_bytes
    return stats.capacity_bytes, sum(one.used * one.slot_bytes for one in stats.sizes)


def occupancy(stats: StatsReply) -> float:
    """Return the part of a tier's slots that have a block, by their bytes, from 0 to 1."""
    total, used = bytes_of(stats)
    if not total:  # Slots of an object tier have no length.
        total, used = stats.slots.get("total", 0), used_slots(stats)
    return used / total if total else 0.0


def size_view(size: SizeStats) -> SizeView:
    return SizeView(
        slot_bytes=size.slot_bytes,
        slabs=size.slabs,
        slots=size.slots,
        slots_used=size.used,
        bytes_used=size.used * size.slot_bytes,
    )


def tenant_view(tenant: TenantStats) -> TenantView:
    """Return what one tenant has in a tier."""
    return TenantView(
        name=tenant.name,
        blocks=tenant.blocks,
        bytes=tenant.bytes,
        share_bytes=tenant.share_bytes,
        waiting=tenant.waiting,
    )


def fragmentation(stats: StatsReply) -> float:
    """Return the part of the used slots' bytes that no block fills, from 0 to 1.

    It comes from blocks smaller than their slots.
    """
    _, taken = bytes_of(stats)
    return max(0.0, 1 - stats.block_bytes / taken) if taken else 0.0


def part_used(group: Sequence[TierView], slots_used: int, slots_total: int) -> float:
    """Return what is used of some tiers, by bytes where their slots have a length."""
    used, total = (sum(one.bytes_used for one in group), sum(one.bytes_total for one in group))
    if not total:
        used, total = slots_used, slots_total
    return used / total if total else 0.0


def sizes_of(group: Sequence[TierView]) -> list[SizeView]:
    """Return the slots of each size in some tiers together, the shortest first."""
    by_length: dict[int, list[SizeView]] = {}
    for size in (size for one in group for size in one.sizes):
        by_length.setdefault(size.slot_bytes, []).append(size)
    return [
        SizeView(
            slot_bytes=length,
            slabs=sum(one.slabs for one in alike),
            slots=sum(one.slots for one in alike),
            slots_used=sum(one.slots_used for one in alike),
            bytes_used=sum(one.bytes_used for one in alike),
        )
        for length, alike in sorted(by_length.items())
    ]


def tenants_of(group: Sequence[TierView]) -> list[TenantView]:
    """Return what each tenant has in some tiers together, by name."""
    by_name: dict[str, list[TenantView]] = {}
    for tenant in (tenant for one in group for tenant in one.tenants):
        by_name.setdefault(tenant.name, []).append(tenant)
    return [
        TenantView(
            name=name,
            blocks=sum(one.blocks for one in alike),
            bytes=sum(one.bytes for one in alike),
            share_bytes=sum(one.share_bytes for one in alike),
            waiting=sum(one.waiting for one in alike),
        )
        for name, alike in sorted(by_name.items())
    ]
