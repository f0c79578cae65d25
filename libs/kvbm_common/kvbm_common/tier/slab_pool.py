"""The slab pool: all slabs of one medium, the classes that have them, and their RESET slots."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from kvbm_common.eviction import EvictionPolicy
from kvbm_common.eviction.succession import Succession
from kvbm_common.tier.block_columns import BlockColumns
from kvbm_common.tier.layout import UNIT_BYTES, Layout
from kvbm_common.tier.slabs import SizeClass, Slab, SlabState
from kvbm_common.tier.tenants import TENANTS_MAX, Tenant, Tenants

SIZES_MAX = 32
"""Size classes of one tier at most: each wastes a part of one slab."""
KNOWN_MAX = 256
"""Block sizes whose class is remembered: sizes of one class differ by less than 4 KiB."""

MakePolicy = Callable[[int], EvictionPolicy]
"""Makes an eviction policy for so many slots."""


class SlabPool:
    """The slabs of a medium and their classes; the slot table knows the blocks in the slots."""

    def __init__(
        self,
        layout: Layout,
        make: MakePolicy,
        *,
        grow: Callable[[int], None],
        move: Callable[[Iterable[int], str], None],
        tenants: Tenants,
    ) -> None:
        """Start with FREE slabs. `grow` makes so many slots, `move` moves slots by SLOT's table."""
        self.layout = layout
        self._tenants = tenants
        self.sizes: dict[int, SizeClass] = {}
        """The classes, by the length of their slots."""
        self.known: dict[int, SizeClass] = {}
        """The classes of blocks that were asked for lately, by the size of the block."""
        self.slab_of: list[Slab] = []
        """Slot → its slab."""
        self.policy_of: list[EvictionPolicy] = []
        """Slot → the policy that has its block: of its class, for its tenant."""
        self.has_switched = False
        """The policy was switched: some of `policy_of` may be former ones."""
        self.used: list[int] = []
        """Slot → the clock at the last use of its block."""
        self.clock = 0
        """Counts batches of uses and of new blocks."""
        self.leaving: list[Slab] = []
        """The slabs that are LEAVING."""
        self._make, self._grow, self._move = make, grow, move
        self.place_of = array("Q")
        """Slot → where it begins, in units: messages and records call the slot by this number."""
        self._ranges: dict[int, list[int]] = {}
        """Length of a range of slots that is not in use → first slots of such ranges."""
        step, count = layout.slab_slots, layout.slot_count
        units = layout.slot_bytes // layout.unit_bytes
        self.slabs = [
            Slab(number, start * units, min(step, count - start) * layout.slot_bytes)
            for number, start in enumerate(range(0, count, step))
        ]
        self.free = self.slabs[::-1]
        """The FREE slabs, a stack: low slabs first."""
        self._empty: dict[int, Slab] = {}
        """Number → CUT slab without a slot in use."""
        self.retired_bytes = 0
        """Bytes out of use, of all slabs."""
        if count:
            self._add(layout.slot_bytes)

    # --- classes ----------------------------------------------------------------------------

    def size_of(self, block_bytes: int) -> SizeClass | None:
        """Return the class of blocks of this size; None: it cannot have one."""
        size = self._find_or_add(self.layout.slot_bytes_of(block_bytes))
        if size is not None:
            if len(self.known) >= KNOWN_MAX:
                self.known.clear()
            self.known[block_bytes] = size
        return size

    def _find_or_add(self, slot_bytes: int) -> SizeClass | None:
        size = self.sizes.get(slot_bytes)
        if size is not None:
            return size
        if slot_bytes > self.layout.slab_bytes or not self.has_room_for_size():
            return None
        return self._add(slot_bytes)

    def has_room_for_size(self) -> bool:
        """Tell whether another class can be added, after forgetting classes without a slab."""
        if len(self.sizes) < SIZES_MAX:
            return True
        first = self.layout.slot_bytes
        self.sizes = {key: one for key, one in self.sizes.items() if one.slabs or key == first}
        self.known.clear()
        return len(self.sizes) < SIZES_MAX

    def _add(self, slot_bytes: int) -> SizeClass:
        assert slot_bytes not in self.sizes, f"slots of {slot_bytes} bytes have a class"
        policy = self._make(self.layout.total_bytes // slot_bytes)
        units = slot_bytes // self.layout.unit_bytes
        size = SizeClass(slot_bytes, units, policy, self._tenants.unnamed)
        self.sizes[slot_bytes] = size
        return size

    def use_policy(self, make: MakePolicy) -> None:
        """Give every class and tenant another policy, which takes over from the one before."""
        self._make = make
        for size in self.sizes.values():
            for tenant, old in size.policies.items():
                policy = make(self.layout.total_bytes // size.slot_bytes)
                size.policies[tenant] = Succession(policy, old)
            size.policy = size.policies[self._tenants.unnamed]
        self.has_switched = True

    def policy_for(self, size: SizeClass, tenant: Tenant) -> EvictionPolicy:
        """Return the policy of a tenant's blocks in a class."""
        policy = size.policies.get(tenant)
        if policy is None:
            if len(size.policies) > TENANTS_MAX:  # Some tenants were forgotten.
                known = set(self._tenants)
                left = [one for one, had in size.policies.items() if one not in known and len(had)]
                assert not left, f"{left} were forgotten, and have blocks of {size}"
                size.policies = {one: had for one, had in size.policies.items() if one in known}
            policy = size.policies[tenant] = self._make(self.layout.total_bytes // size.slot_bytes)
        return policy

    # --- slots come into use, and out of it -------------------------------------------------

    @property
    def free_count(self) -> int:
        """RESET slots of all classes, and those of the first that FREE slabs have room for."""
        first = self.sizes.get(self.layout.slot_bytes)
        if first is None:
            return 0
        cut = sum(size.free_count for size in self.sizes.values())
        return cut + sum(slab.room(first) for slab in self.free)

    def room_for(self, size: SizeClass, count: int) -> int:
        """Return how many slots of a class can be taken now, `count` at most."""
        room = size.free_count
        if room >= count:
            return count
        for slab in reversed(self.free):
            room += slab.room(size)
            if room >= count:
                return count
        for slab in self._empty.values():
            if slab.size is not size:
                room += slab.room(size)
        return min(room, count)

    def take(self, size: SizeClass, count: int) -> list[int]:
        """Take RESET slots of a class, for which there is room, out of their slabs."""
        assert self.room_for(size, count) == count, f"{count} slots of {size}"
        slots: list[int] = []
        while len(slots) < count:
            if not size.open:
                self._acquire(size)
            slab = size.open[-1]
            reset = slab.reset
            if len(reset) == slab.usable:
                del self._empty[slab.number]
            part = reset[: -1 - (count - len(slots)) : -1]
            del reset[-len(part) :]
            if not reset:
                size.open.pop()
            size.free_count -= len(part)
            slots += part
        return slots

    def give_back(self, slot: int) -> None:
        """Put a slot that is RESET again back into its slab."""
        slab = self.slab_of[slot]
        size, reset = slab.size, slab.reset
        assert size is not None, f"slot {slot} is of {slab}"
        reset.append(slot)
        count = len(reset)
        assert count <= slab.usable, f"slot {slot} is given back twice: {slab} of {slab.usable}"
        if slab.state is SlabState.CUT:
            size.free_count += 1
            if count == 1:
                size.open.append(slab)
            if count == slab.usable:
                self._empty[slab.number] = slab
        elif count == slab.usable:
            self.give_up(slab)

    # --- slabs change their class -----------------------------------------------------------

    def _acquire(self, size: SizeClass) -> None:
        """Give a class a slab that is FREE, or that another class has left empty."""
        for index in range(len(self.free) - 1, -1, -1):
            if self.free[index].room(size):
                self._cut(self.free.pop(index), size)
                return
        fits = (one for one in self._empty.values() if one.size is not size and one.room(size))
        slab = next(fits, None)
        assert slab is not None, f"no slab is left for {size}"
        self.give_up(slab)
        self._cut(self.free.pop(), size)

    def _cut(self, slab: Slab, size: SizeClass) -> None:
        """Cut a FREE slab, which is not listed any more, into slots of a class."""
        count = slab.length // size.slot_bytes
        first = self._range_of(count)
        slab.be_cut(size, first)
        end, last_place = first + count, slab.place + count * size.units
        self.place_of[first:end] = array("Q", range(slab.place, last_place, size.units))
        self.slab_of[first:end] = [slab] * count
        self.policy_of[first:end] = [size.policy] * count
        self.used[first:end] = [self.clock] * count
        lengths = {len(self.place_of), len(self.slab_of), len(self.policy_of), len(self.used)}
        assert len(lengths) == 1, f"columns of {lengths} slots, after {slab} was cut"
        self._move(slab.retired, "retire")
        size.slabs[slab.number] = slab
        self._empty[slab.number] = slab
        size.open.append(slab)
        size.free_count += slab.usable

    def _range_of(self, count: int) -> int:
        """Return the first of so many slot numbers in a row that are not in use."""
        spare = self._ranges.get(count)
        if spare:
            return spare.pop()
        first = len(self.used)
        self.place_of.extend(range(count))
        self.slab_of += self.slabs[:1] * count
        self.policy_of += [self.sizes[self.layout.slot_bytes].policy] * count
        self.used += [0] * count
        self._grow(count)
        return first

    def give_up(self, slab: Slab) -> None:
        """Make a slab FREE in which no slot is in use."""
        size = slab.size
        assert size is not None, f"{slab} is of no class"
        if slab.state is SlabState.CUT:
            self._close(slab, size)
        else:
            self.leaving.remove(slab)
        self._move(slab.retired, "revive")
        self._ranges.setdefault(slab.slot_count, []).append(slab.first)
        slab.be_free()
        self._empty.pop(slab.number, None)
        del size.slabs[slab.number]
        self.free.append(slab)

    def leave(self, slab: Slab) -> None:
        """Have a class stage nothing in a slab any more: it is FREE when it is empty."""
        assert slab.size is not None, f"{slab} is of no class"
        assert not slab.is_empty, f"{slab} is empty: it can be given up at once"
        self._close(slab, slab.size)
        slab.leave()
        self.leaving.append(slab)

    def stay(self, slab: Slab) -> None:
        """Let a class stage blocks in a LEAVING slab again."""
        size = slab.size
        assert size is not None, f"{slab} is of no class"
        slab.stay()
        self.leaving.remove(slab)
        size.free_count += len(slab.reset)
        if slab.reset:
            size.open.append(slab)

    def _close(self, slab: Slab, size: SizeClass) -> None:
        size.free_count -= len(slab.reset)
        assert size.free_count >= 0, f"{size} has {size.free_count} free slots without {slab}"
        if slab.reset:
            size.open.remove(slab)

    # --- a medium is used in part -----------------------------------------------------------

    def withdraw(self, wanted_bytes: int) -> None:
        """Take RESET slots of so many bytes, or of some more, out of use, as far as there are."""
        while wanted_bytes > 0:
            size = self._to_withdraw(wanted_bytes)
            if size is None:
                break
            [slot] = self.take(size, 1)
            self._move([slot], "retire")  # At once: the next slot may cost an empty slab its class.
            slab = self.slab_of[slot]
            slab.retired.append(slot)
            slab.usable -= 1
            slab.retired_bytes += size.slot_bytes
            self.retired_bytes += size.slot_bytes
            assert slab.retired_bytes <= slab.length, f"{slab}: {slab.retired_bytes} bytes retired"
            if slab.is_empty:
                self._empty[slab.number] = slab
            wanted_bytes -= size.slot_bytes

    def _to_withdraw(self, wanted_bytes: int) -> SizeClass | None:
        """Return the class whose slot goes next: the longest that is not too long, if there is."""
        first = self.sizes[self.layout.slot_bytes]
        there = {size.slot_bytes: size for size in self.sizes.values() if size.free_count}
        if self.room_for(first, 1):
            there[first.slot_bytes] = first
        fit = [length for length in there if length <= wanted_bytes]
        if fit:
            return there[max(fit)]
        return there[min(there)] if there else None

    def put_back(self, wanted_bytes: int) -> list[int]:
        """Put RETIRED slots of so many bytes at most back into use: the caller gives them back."""
        slots: list[int] = []
        for slab in self.slabs:
            length = slab.size.slot_bytes if slab.size is not None else 0
            before = slab.retired_bytes
            while slab.retired and min(length, slab.retired_bytes) <= wanted_bytes:
                slots.append(slab.retired.pop())
                slab.usable += 1
                wanted_bytes -= min(length, slab.retired_bytes)
                slab.retired_bytes -= min(length, slab.retired_bytes)
            if not slab.retired:  # It is FREE, or what is left is of the rest at its end.
                some = min(slab.retired_bytes, wanted_bytes)
                slab.retired_bytes -= some
                wanted_bytes -= some
            self.retired_bytes -= before - slab.retired_bytes
        return slots

    # --- a former life ----------------------------------------------------------------------

    def adopt(self, places: NDArray[np.intp], block_bytes: NDArray[np.intp]) -> NDArray[np.intp]:
        """Cut FREE slabs for blocks that are there already, oldest first; returns their slots.

        No two blocks of different classes are in one slab.
        """
        assert len(self.free) == len(self.slabs), "only a medium without slots in use is adopted"
        layout = self.layout
        units = self._units_of(block_bytes)
        numbers = places // layout.slab_units
        units_of, firsts = np.zeros((2, len(self.slabs)), np.intp)
        units_of[numbers] = units
        assert np.array_equal(units_of[numbers], units), "two classes have blocks in one slab"
        counts = np.bincount(numbers, minlength=len(self.slabs))
        ages = np.bincount(numbers, np.arange(len(places)), len(self.slabs))
        for number in np.flatnonzero(counts).tolist():
            self.clock = int(ages[number] / counts[number])  # As if all were used together.
            slot_bytes = int(units_of[number]) * layout.unit_bytes
            size = self.sizes.get(slot_bytes) or self._add(slot_bytes)
            self._cut(self.slabs[number], size)
            firsts[number] = self.slabs[number].first
        self.clock = len(places)
        slots = firsts[numbers] + (places - numbers * layout.slab_units) // units
        self._leave_free(slots)
        return slots

    def _leave_free(self, taken: NDArray[np.intp]) -> None:
        """Leave to the slabs the slots that hold no block of a former life."""
        is_taken = np.zeros(len(self.used), bool)
        is_taken[taken] = True
        assert int(is_taken.sum()) == len(taken), "two blocks of a former life are in one slot"
        self.free = [slab for slab in reversed(self.slabs) if slab.size is None]
        self._empty.clear()
        for size in self.sizes.values():
            size.open, size.free_count = [], 0
            for slab in reversed(size.slabs.values()):
                slab.reset = (np.flatnonzero(~is_taken[slab.slots])[::-1] + slab.first).tolist()
                size.free_count += len(slab.reset)
                if slab.reset:
                    size.open.append(slab)

    def fill_policies(self, former: BlockColumns, tenant: Tenant) -> None:
        """Fill the policies of a tenant, which are new, with its blocks of a former life."""
        for size, ours in self._by_size(former):
            policy = self.policy_for(size, tenant)
            if policy is not size.policy:
                for slot in ours.slots.tolist():
                    self.policy_of[slot] = policy
            policy.fill(ours)

    def _by_size(self, former: BlockColumns) -> Iterator[tuple[SizeClass, BlockColumns]]:
        """Yield the blocks of each class, which has their slots."""
        if len(self.sizes) == 1:  # Nothing is computed: this is where a restart takes most memory.
            yield next(iter(self.sizes.values())), former
            return
        units = self._units_of(former.block_bytes)
        for size in list(self.sizes.values()):
            ours = units == size.units
            if ours.any():
                yield size, former if ours.all() else former.only(ours)

    def _units_of(self, block_bytes: NDArray[np.intp]) -> NDArray[np.intp]:
        """Return how many units the slot of each block has."""
        if not self.layout.is_sized:
            return np.ones(len(block_bytes), np.intp)
        whole = (block_bytes + UNIT_BYTES - 1) // UNIT_BYTES
        return whole + self.layout.extra_bytes // UNIT_BYTES
