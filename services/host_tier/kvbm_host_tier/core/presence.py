"""Presence: the blocks that an engine can have now or may get, for a plan over KV groups.

A long prompt has thousands of blocks, and often most are absent. So sets are compared first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

from kvbm_common.identity import SequenceHash
from kvbm_common.tier.kv_groups import Has
from kvbm_common.tier.slots import SlotTable

from kvbm_host_tier.core.lower_tier_view import Namespaces
from kvbm_host_tier.core.lower_tiers import LowerTiers
from kvbm_host_tier.core.waiting_lookups import WaitingLookups

# Compared in C: a long prompt has thousands of blocks.
_NAMESPACE = attrgetter("namespace")


def blocks_here(table: SlotTable, own: Namespaces) -> Has:
    """Return the function that tells which blocks are here, in one of these namespaces."""

    assert own, "an engine has a namespace"

    def here(names: Sequence[SequenceHash]) -> bytes:
        if table.has_none_of(names):
            return bytes(len(names))
        slots = table.find_all(names)
        found = [slot for slot in slots if slot is not None]
        if len(found) == len(slots) and own.issuperset(map(_NAMESPACE, table.blocks_in(found))):
            return b"\1" * len(slots)
        return bytes([slot is not None and table.block(slot).namespace in own for slot in slots])

    return here


@dataclass(frozen=True, slots=True)
class Available:
    """The blocks that can be had at one moment, for one engine."""

    here: Has
    may_come: Has
    """Tells of a block that is here, below for the engine, or on its way for a lookup."""
    takes_slot: Has
    """Tells of a block that would have to be brought: it is neither here nor on its way."""


class Presence:
    """The places of the blocks that lookups may have."""

    def __init__(self, table: SlotTable, below: LowerTiers, waiting: WaitingLookups) -> None:
        self._table, self._below, self._waiting = table, below, waiting

    def run_of(self, names: Sequence[SequenceHash], own: Namespaces, now_ms: int) -> int:
        """Return how many blocks, from the first on, are here, below, or on their way."""
        may_come = self.of(own, now_ms).may_come(names)
        count = may_come.find(0)
        return len(names) if count < 0 else count

    def of(self, own: Namespaces, now_ms: int) -> Available:
        """Return what tells of blocks in some namespaces."""
        table, below, waiting = self._table, self._below, self._waiting
        here = blocks_here(table, own)

        def comes(name: SequenceHash) -> bool:
            if table.holds(name) or table.is_staging(name):
                return name in waiting  # A block that is here is of another namespace.
            return below.usable(name, now_ms, own)

        def may_come(names: Sequence[SequenceHash]) -> bytes:
            found = here(names)
            assert len(found) == len(names), f"{len(found)} of {len(names)} blocks were looked at"
            if 0 not in found or (below.has_none_of(names) and waiting.has_none_of(names)):
                return found
            pairs = zip(found, names, strict=True)
            return bytes(is_here or comes(name) for is_here, name in pairs)

        def takes_slot(names: Sequence[SequenceHash]) -> bytes:
            pairs = zip(here(names), names, strict=True)
            return bytes(not is_here and name not in waiting for is_here, name in pairs)

        return Available(here, may_come, takes_slot)
