"""Reclaim: which blocks leave when a size class needs room, fairly over all classes.

While one class has all slabs, its policy chooses. Otherwise slabs are compared by how long their
blocks have been idle, on average. If the longest idle slab belongs to the class that needs room,
its policy chooses victims, a slab's worth of them before the next comparison. If it belongs to
another class, that slab is emptied, and changes its class. So a class that is used loses nothing to
one that is used less, and a class that is not used any more loses all its slabs.

A slab with pinned or staged slots is never emptied. If all slabs that should give way have some,
the longest idle one becomes LEAVING: nothing is staged in it any more, its idle blocks leave, and
it is given up when its last pin ends. In large tiers a few slabs of each class are compared, in
turn.

*Short* is by how many blocks of the wanted size there is no room. Class A is short of 6, with 4
blocks to a slab, and its slabs have been idle for 50 s at most:

```
    B's longest idle slab    what leaves                                      short then
    80 s (> 50 × 1.1)        all of that slab, which becomes A's              2
    40 s                     4 of A's own, which its policy chooses           2
```
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from kvbm_common.identity import SequenceHash
from kvbm_common.tier.slab_pool import SlabPool
from kvbm_common.tier.slabs import SizeClass, Slab, SlabState
from kvbm_common.tier.slot_states import SlotState
from kvbm_common.tier.tenants import Claim, MayLeave, Tenant, in_order

COMPARED_MAX = 8
"""Slabs of one class that are compared at a time: each takes some microseconds."""
LONGER = 1.1
"""The factor by which a slab of another class must be idle for longer. Without it, classes that are
used alike would take each other's slabs in turn."""
LEAVING_TICKS = 4_096
"""Batches of uses after which a LEAVING slab that is not empty stays: it is used after all."""

ANOTHER_SIZE = "another size"
"""The policy that an eviction names if a slab was needed for blocks of another size."""

IdleBlocks = Callable[[Slab], list[SequenceHash]]
"""Returns the blocks of a slab that are not pinned."""


@dataclass(frozen=True, slots=True)
class Victims:
    """Blocks to be evicted, so that there is room for blocks of one size."""

    chosen: Sequence[SequenceHash] = ()
    """Blocks that the policy of their class has chosen."""
    emptied: Sequence[SequenceHash] = ()
    """Blocks of another class: their slab is for another size from now on."""

    @property
    def names(self) -> list[SequenceHash]:
        """The names of all of them."""
        return [*self.chosen, *self.emptied]


class Reclaim:
    """Chooses victims; evicts none itself."""

    def __init__(
        self,
        pool: SlabPool,
        states: Sequence[SlotState],
        idle_blocks: IdleBlocks,
        tenant_of: Callable[[SequenceHash], Tenant],
    ) -> None:
        """Look at the states of all slots, which are in `states` by number."""
        self._pool = pool
        self._tenant_of = tenant_of
        self._states = states
        self._idle_blocks = idle_blocks
        self._turn = 0
        self._leaving_since = 0

    def victims(
        self,
        size: SizeClass,
        short: int,
        may_leave: MayLeave | None,
        claim: Claim | None = None,
    ) -> Victims:
        """Return the blocks that leave so that `short` more slots of a class (or fewer) are free.

        `may_leave`: which blocks may be evicted; None: all that are not pinned. `claim`: whose
        blocks may leave for whom; None: there is one tenant only.
        """
        if short <= 0:
            return Victims()
        if self._is_alone(size):
            self._end_leaving()
            return Victims(self._own(size, short, (), may_leave, claim))
        may_give = self._may_give(may_leave, claim)
        emptied, gained = self._of_leaving(size, may_give)
        short = max(0, short - gained)
        slabs = self._of_furthest(size, short, may_leave, claim)
        short = max(0, short - sum(slab.room(size) for slab in slabs))
        own = self._own(size, short, emptied, may_leave, claim)
        count = 0
        while short > 0:
            if count == len(own) or not size.own_left:
                slab = self._giver(size, slabs, may_give, must=count == len(own))
                if slab is not None:
                    slabs.append(slab)
                    room = slab.room(size)
                    assert room > 0, f"{slab} gives way, and has no room for {size}"
                    short -= room
                    continue
                size.own_left = max(1, self._pool.layout.slab_bytes // size.slot_bytes)
            step = min(short, size.own_left, len(own) - count)
            if not step:
                break
            count, short, size.own_left = count + step, short - step, size.own_left - step
        for slab in slabs:
            emptied += self._idle_blocks(slab)
        return Victims(own[:count], emptied)

    def longest_idle(self) -> list[SizeClass]:
        """Return the classes that have slabs, the one with the longest idle slab first."""
        classes = [size for size in self._pool.sizes.values() if size.slabs]
        return sorted(classes, key=self._idle_of_class, reverse=True)

    # --- the needy class's own blocks -------------------------------------------------------

    def _own(
        self,
        size: SizeClass,
        short: int,
        leaving: Sequence[SequenceHash],
        may_leave: MayLeave | None,
        claim: Claim | None,
    ) -> list[SequenceHash]:
        """Return blocks of the class, worst first; those that are `leaving` make no room in it."""
        most = max(0, short + len(leaving))
        free: Iterable[SequenceHash]
        if claim is not None:
            free = claim.shared_out(size.policies, most, may_leave)
        elif may_leave is not None:
            free = filter(may_leave, in_order(size.policy))
        else:
            free = size.policy.victims(most)
        known = set(leaving)
        return list(islice((name for name in free if name not in known), short))

    def _is_alone(self, size: SizeClass) -> bool:
        return not any(one.slabs for one in self._pool.sizes.values() if one is not size)

    # --- tenants ----------------------------------------------------------------------------

    def _may_give(self, may_leave: MayLeave | None, claim: Claim | None) -> MayLeave | None:
        """Return which blocks of a slab may leave with it: a tenant may lose a whole one."""
        if claim is None:
            return may_leave
        slab_bytes = self._pool.layout.slab_bytes
        losing = {one for one in claim.tenants if claim.may_lose(one, slab_bytes)}
        return self._of_tenants(losing, may_leave)

    def _of_tenants(self, losing: Collection[Tenant], may_leave: MayLeave | None) -> MayLeave:
        def may_give(name: SequenceHash) -> bool:
            is_theirs = self._tenant_of(name) in losing
            return is_theirs and (may_leave is None or may_leave(name))

        return may_give

    def _of_furthest(
        self, size: SizeClass, short: int, may_leave: MayLeave | None, claim: Claim | None
    ) -> list[Slab]:
        """Return slabs of the tenant that is furthest above its share, if none of this class's
        blocks are its own."""
        slabs: list[Slab] = []
        slab_bytes = self._pool.layout.slab_bytes
        while claim is not None and short > 0:
            worst = claim.furthest(slab_bytes)
            if worst is None or len(size.policies.get(worst, ())):
                break
            slab = self._giver(size, slabs, self._of_tenants((worst,), may_leave), must=True)
            if slab is None:
                break
            slabs.append(slab)
            short -= slab.room(size)
            claim.lose(worst, slab_bytes)
        return slabs

    # --- another class's slab ---------------------------------------------------------------

    def _giver(
        self, size: SizeClass, taken: Sequence[Slab], may_leave: MayLeave | None, *, must: bool
    ) -> Slab | None:
        """Return a long idle slab of another class that can be emptied now.

        None: one of the needy class is idle for as long, unless it `must` be another's.
        """
        least = -1.0 if must else LONGER * self._idle_of_class(size)
        older = self._older(size, taken, least)
        for slab in older:
            if self._can_be_emptied(slab, may_leave):
                return slab
        if must:
            everywhere = self._older(size, taken, least, all_of_them=True)
            for slab in everywhere:
                if self._can_be_emptied(slab, may_leave):
                    return slab
        if older:
            self._let_leave(older[0])
        return None

    def _older(
        self, size: SizeClass, taken: Sequence[Slab], least: float, *, all_of_them: bool = False
    ) -> list[Slab]:
        """Return slabs of other classes that are idle for longer, the longest first."""
        found = [
            (self._idle(slab), -slab.number, slab)
            for other in self._pool.sizes.values()
            if other is not size
            for slab in self._compared(other, all_of_them=all_of_them)
            if slab.state is SlabState.CUT and not slab.is_empty
            if slab.room(size) and slab not in taken
        ]
        return [slab for idle, _, slab in sorted(found, reverse=True) if idle > least]

    def _let_leave(self, slab: Slab) -> None:
        """Have a slab leave that cannot be emptied now; one at a time."""
        pool = self._pool
        if pool.clock - self._leaving_since > LEAVING_TICKS:
            self._end_leaving()
        if not pool.leaving:
            pool.leave(slab)
            self._leaving_since = pool.clock

    def _end_leaving(self) -> None:
        for slab in list(self._pool.leaving):
            self._pool.stay(slab)

    def _of_leaving(
        self, size: SizeClass, may_leave: MayLeave | None
    ) -> tuple[list[SequenceHash], int]:
        """Return what may leave of the slabs that are LEAVING, and how many slots that makes."""
        assert len(self._pool.leaving) <= 1, f"several slabs are leaving: {self._pool.leaving}"
        names, gained = list[SequenceHash](), 0
        for slab in self._pool.leaving:
            if self._can_be_emptied(slab, may_leave):
                gained += slab.room(size)
            idle = self._idle_blocks(slab)
            names += filter(may_leave, idle) if may_leave else idle
        return names, gained

    def _can_be_emptied(self, slab: Slab, may_leave: MayLeave | None) -> bool:
        inactive = self._states[slab.slots].count(SlotState.INACTIVE)
        unpinned = len(slab.reset) + inactive
        assert unpinned <= slab.usable, f"{slab}: {unpinned} of {slab.usable} slots are not pinned"
        if unpinned < slab.usable:
            return False
        return may_leave is None or all(map(may_leave, self._idle_blocks(slab)))

    # --- how long slabs are idle ------------------------------------------------------------

    def _idle_of_class(self, size: SizeClass) -> float:
        return max(map(self._idle, self._compared(size)), default=-1.0)

    def _idle(self, slab: Slab) -> float:
        """Return how many ticks ago the blocks of a slab were used, on average."""
        pool = self._pool
        assert slab.slot_count > 0, f"{slab} is not cut"
        idle = pool.clock - sum(pool.used[slab.slots]) / slab.slot_count
        assert idle >= 0, f"{slab} was used {-idle} ticks after tick {pool.clock}"
        return idle

    def _compared(self, size: SizeClass, *, all_of_them: bool = False) -> Iterator[Slab]:
        """Yield some slabs of a class, others each time; all, where there are few."""
        slabs = list(size.slabs.values())
        if all_of_them or len(slabs) <= COMPARED_MAX:
            yield from slabs
            return
        self._turn += 1
        for index in range(COMPARED_MAX):
            yield slabs[(index * len(slabs) // COMPARED_MAX + self._turn) % len(slabs)]
