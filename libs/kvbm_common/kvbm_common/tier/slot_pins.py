"""Slot pins: they keep committed blocks in their slots, and tell the policies which are in use.

They are the layer of a `SlotTable` above its tenants: see `slots.py`. A lookup pins hundreds of
blocks at once, and the engine waits. So what is done for each of a run is a loop without calls, and
the policy takes the run as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import is_

from kvbm_common.eviction import EvictionPolicy
from kvbm_common.identity import SequenceHash
from kvbm_common.tier.slot_tenants import SlotTenants

HANDED_OVER_MAX = 512
"""Blocks of a former policy that a commit after them brings to the one in force, 5 µs each. Longer
chains stay where they are until they are used."""


class SlotPins(SlotTenants):
    """Slots with pins that count: the first holds a block in its policy, the last frees it."""

    # --- pins -------------------------------------------------------------------------------

    def pin(self, slot: int, *, used: bool = False) -> None:
        """Keep a committed block from eviction; counts. `used`: a request asked for it by name."""
        assert slot not in self._discarded, f"slot {slot} is discarded"
        if used:
            self.pool.policy_of[slot].touch(self._name_in(slot))
            self.pool.used[slot] = self.pool.clock
        if self._pins[slot] == 0:
            self._move(slot, "pin")
            self.pool.policy_of[slot].hold(self._name_in(slot))
        self._pins[slot] += 1

    def pin_prefix(self, names: Sequence[SequenceHash], known: Sequence[int] = ()) -> list[int]:
        """Pin the leading blocks of a chain that are here, each once; returns their slots.

        `known`: the slots of the first of them, as far as they are known.
        """
        slots = [*known]
        if len(known) < len(names):
            slots += self._slot.leading(names[len(known) :] if known else names)
        self.pool.clock += 1
        pins, used, clock = self._pins, self.pool.used, self.pool.clock
        first: list[int] = []
        for slot in slots:
            used[slot] = clock
            if not pins[slot]:
                first.append(slot)
            pins[slot] += 1
        self._move_all(first, "pin")
        found = names if len(names) == len(slots) else names[: len(slots)]
        held = found if len(first) == len(slots) else self._names_in(first)
        for policy, ours in self._by_policy(slots, found):
            policy.touch_all(ours)
        for policy, ours in self._by_policy(first, held):
            policy.hold_all(ours)
        self._note_use(slots)
        return slots

    def _by_policy(
        self, slots: Sequence[int], names: Sequence[SequenceHash]
    ) -> Iterable[tuple[EvictionPolicy, Sequence[SequenceHash]]]:
        """Return the names of blocks in these slots by the policy that has them, in their order."""
        assert len(slots) == len(names), f"{len(names)} names of {len(slots)} slots"
        if len(sizes := self.pool.sizes) == 1 and not self.pool.has_switched:
            [size] = sizes.values()
            if len(size.policies) == 1:  # In the common case.
                return [(size.policy, names)]
        policy_of = self.pool.policy_of
        found: dict[EvictionPolicy, list[SequenceHash]] = {}
        for slot, name in zip(slots, names, strict=True):
            found.setdefault(policy_of[slot], []).append(name)
        return found.items()

    def unpin(self, slots: Iterable[int]) -> None:
        """Take one pin off each slot. Give a chain in prefix order: its leaf is freed first."""
        pins = self._pins
        ended: list[int] = []
        for slot in reversed(list(slots)):
            left = pins[slot] - 1
            assert left >= 0, f"slot {slot} is not pinned"
            pins[slot] = left
            if not left:
                ended.append(slot)
        self._move_all(ended, "unpin")
        gone: list[int] = []
        if self._discarded:
            gone = [slot for slot in ended if slot in self._discarded]
            ended = [slot for slot in ended if slot not in self._discarded]
        names = self._names_in(ended)
        if not self._hand_over(ended, names):
            for policy, ours in self._by_policy(ended, names):
                policy.free_all(ours)
        for slot in gone:
            self._discarded.remove(slot)
            self._move(slot, "evict")
            self._empty(slot, self.bytes_in(slot))

    def renew_chain(self, last: SequenceHash, most: int) -> None:
        """Let a chain's blocks from its root to this one leave later than what came after them.

        Nothing can reach a block whose parent has left. A chain of more than `most` blocks stays.
        """
        assert most > 0, f"{most} blocks are renewed"
        slots: list[int] = []
        names: list[SequenceHash] = []
        name, find, pins = last, self._slot.get, self._pins
        while (slot := find(name)) is not None:
            if len(names) == most:
                return
            names.append(name)
            slots.append(slot)
            name = self._parent_in(slot)
        used, clock = self.pool.used, self.pool.clock
        for slot in slots:
            used[slot] = clock
        if any(map(pins.__getitem__, slots)):
            free = [at for at, slot in enumerate(slots) if not pins[slot]]
            slots, names = [slots[at] for at in free], [names[at] for at in free]
        if self.pool.has_switched and self._renew_former(slots, names):
            return
        for policy, ours in self._by_policy(slots, names):
            policy.renew_all(ours)

    def _renew_former(self, slots: Sequence[int], names: Sequence[SequenceHash]) -> bool:
        """Renew free blocks in the policy in force, if former ones have some of them.

        Returns False, and does nothing, if that one has all of them. Of many none is renewed.
        """
        assert self.pool.has_switched, "no policy is a former one"
        policy_of, in_force = self.pool.policy_of, [*map(self._policy_in_force, slots)]
        count = sum(
            policy_of[slot] is not policy for slot, policy in zip(slots, in_force, strict=True)
        )
        if not count:
            return False
        if count > HANDED_OVER_MAX:
            return True
        for slot, name, policy in zip(slots, names, in_force, strict=True):
            if policy_of[slot] is policy:
                policy.renew_all((name,))
                continue
            policy_of[slot].forget(name)
            policy.admit(name, self._parent_in(slot))
            policy_of[slot] = policy
        return True

    def _hand_over(self, slots: Sequence[int], names: Sequence[SequenceHash]) -> bool:
        """Free held blocks in the policy in force, if former ones have some of them.

        Returns False, and does nothing, if that one has all of them.
        """
        assert len(slots) == len(names), f"{len(names)} names of {len(slots)} slots"
        if not self.pool.has_switched:
            return False
        policy_of = self.pool.policy_of
        in_force = [*map(self._policy_in_force, slots)]
        if all(map(is_, map(policy_of.__getitem__, slots), in_force)):
            return False
        for slot, name, policy in zip(slots, names, in_force, strict=True):
            former = policy_of[slot]
            if former is policy:
                policy.free(name)
                continue
            former.free(name)
            former.forget(name)
            policy.admit(name, self._parent_in(slot))
            policy_of[slot] = policy
        return True
