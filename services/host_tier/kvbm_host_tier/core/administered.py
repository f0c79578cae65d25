"""The side of the host tier that an operator's verbs see; see `kvbm_common.tier.admin`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvbm_common.identity import SequenceHash
from kvbm_common.tier.diary import Diary
from kvbm_common.tier.leases import Lease, LeaseTable
from kvbm_common.tier.slots import SlotTable

from kvbm_host_tier.core.arena_leases import ArenaLeases
from kvbm_host_tier.core.held_blocks import HeldBlocks


class AdministeredHost:
    """Blocks and leases as one thing, at the time of the step that is being taken."""

    def __init__(self, held: HeldBlocks, leases: ArenaLeases) -> None:
        assert held.table.slot_count == 0, "made with the core, before any engine has joined"
        self._held = held
        self._arena_leases = leases
        self.leases: LeaseTable = leases.leases
        self.diary: Diary = held.diary
        self.now_ms = 0

    @property
    def draining(self) -> bool:
        """Tell whether an operator wants no new blocks here."""
        return self._held.draining

    @draining.setter
    def draining(self, draining: bool) -> None:
        self._held.draining = draining

    @property
    def table(self) -> SlotTable:
        """Return the slots of the tier."""
        return self._held.table

    @property
    def policy_name(self) -> str:
        """Return the eviction policy in force."""
        return self._held.policy_name

    def use_policy(self, name: str) -> bool:
        """Have another eviction policy choose; False: a staging arena needs its own."""
        return self._held.use_policy(name)

    def make_room(self, count: int) -> int:
        """Evict for `count` slots; returns how many are RESET now."""
        return self._held.make_room(count, self.now_ms)

    def remove(self, names: Sequence[SequenceHash], reason: str) -> None:
        """Remove committed blocks, and announce that."""
        self._held.remove(names, reason, self.now_ms)

    def end_leases(self, leases: Iterable[Lease]) -> None:
        """Unpin the slots of leases that have left the table."""
        self._arena_leases.end(leases)
