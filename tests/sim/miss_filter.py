"""The miss filter of the simulation: the real one, in memory that outlives its host tier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvbm_common.identity import SequenceHash
from kvbm_common.memory.miss_filter import FilterState, MissFilter, MissFilterReader, size_of
from kvbm_common.tier.kv_groups import GroupRun, indispensable
from kvbm_host_tier.core.filter_messages import (
    FilterEffect,
    MakeFilter,
    NamesChanged,
    SwitchFilter,
    UseFilter,
)

from tests.sim import invariants

if TYPE_CHECKING:
    from tests.sim.engine_node import EngineNode
    from tests.sim.host_tier import HostTier

OWNER = 1


class HostFilter:
    """The filter of one life of a host tier."""

    def __init__(self, tier: HostTier) -> None:
        self._tier = tier
        self._filter: MissFilter | None = None
        self._new: MissFilter | None = None
        self._memory = bytearray()

    def carry_out(self, effect: FilterEffect) -> None:
        """Write as the shell does."""
        match effect:
            case MakeFilter(_, capacity):
                self._memory, epoch = bytearray(size_of(capacity)), self._tier.epoch
                self._new = MissFilter(memoryview(self._memory), owner=OWNER, epoch=epoch)
            case NamesChanged(came, left, is_new):
                one = self._new if is_new else self._filter
                assert one is not None
                one.change(came, left)
            case UseFilter():
                if self._filter is not None:
                    self._filter.end()
                self._filter, epoch = self._new, self._tier.epoch
                reader = MissFilterReader(self._memory, owner=OWNER, epoch=epoch)
                self._tier.cluster.filters[epoch] = reader
            case SwitchFilter(is_complete):
                assert self._filter is not None
                self._filter.switch(FilterState.COMPLETE if is_complete else FilterState.PARTIAL)


def denies(
    engine: EngineNode, hashes: Sequence[SequenceHash], groups: Sequence[GroupRun] = ()
) -> bool | None:
    """Return what the filter of an engine's host tier says of a lookup, and check it."""
    epoch = engine.core.view.epoch
    reader = engine.cluster.filters.get(epoch)
    names = indispensable(groups, hashes)
    if reader is None or not names:
        return None
    if not reader.denies_any(names):
        return False if reader.state is FilterState.COMPLETE else None
    engine.world.marks["lookup denied by the filter"] += 1
    tier = next((t for t in engine.cluster.host_tiers if t.up and t.epoch == epoch), None)
    if tier is not None:
        absent = [name for name in names if not tier.core.view.may_find(name)]
        invariants.check_denied(names, absent, tier.name)
    return True
