"""Which of many blocks are here for an engine, and which may come: asked by a plan over KV groups.

A long prompt has thousands of blocks, and often most are absent. So sets are compared first.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvbm_common.identity import SequenceHash
from kvbm_common.tier.kv_groups import Has, has_each
from kvbm_common.tier.slots import SlotTable

from kvbm_host_tier.core.lower_tiers import LowerTiers, Namespaces
from kvbm_host_tier.core.waiting import Waiting


def blocks_here(table: SlotTable, own: Namespaces) -> Has:
    """Return the function that tells which blocks are here, in one of these namespaces."""

    assert own, "an engine has a namespace"

    def is_own(name: SequenceHash) -> bool:
        slot = table.find(name)
        return slot is not None and table.block(slot).namespace in own

    find = has_each(is_own)
    return lambda names: bytes(len(names)) if table.has_none_of(names) else find(names)


def blocks_to_come(
    here: Has, table: SlotTable, below: LowerTiers, waiting: Waiting, own: Namespaces, now_ms: int
) -> Has:
    """Return the function that tells which blocks are here, below for their engine, or on their way
    for a lookup."""

    def comes(name: SequenceHash) -> bool:
        if table.holds(name) or table.is_staging(name):
            return name in waiting  # What is here is not its engine's.
        return below.usable(name, now_ms, own)

    def find(names: Sequence[SequenceHash]) -> bytes:
        found = here(names)
        assert len(found) == len(names), f"{len(found)} of {len(names)} blocks were looked at"
        if 0 not in found or (below.has_none_of(names) and waiting.has_none_of(names)):
            return found
        return bytes(is_here or comes(name) for is_here, name in zip(found, names, strict=True))

    return find
