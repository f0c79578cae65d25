"""Slot records: the state of each slot, its moves, and the questions about them.

They are the layer of a `SlotTable` above its blocks: see `slots.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from kvbm_common.identity import SequenceHash
from kvbm_common.tier.blocks import Block
from kvbm_common.tier.layout import Layout
from kvbm_common.tier.machine import InvalidTransition
from kvbm_common.tier.packed_blocks import FOLDED
from kvbm_common.tier.slab_checks import check_pool
from kvbm_common.tier.slab_pool import MakePolicy, SlabPool
from kvbm_common.tier.slot_blocks import STRETCH_BITS, SlotBlocks
from kvbm_common.tier.slot_states import MOVES, SLOT, SlotState
from kvbm_common.tier.tenants import Tenants


class SlotRecords(SlotBlocks):
    """State, generation and pins of each slot, by number.

    They move slots and answer; which block comes, stays or leaves is decided above them.
    """

    def __init__(
        self, layout: Layout, make: MakePolicy, tenants: Tenants, *, packs: bool = False
    ) -> None:
        """Start with slots that are not cut; `make` makes the policy of each size class.

        `packs`: blocks take much less memory, and it takes longer to return one.
        """
        super().__init__(packs=packs)
        self._tenants = tenants
        self._state: list[SlotState] = []
        self._generation: list[int] = []
        self._pins: list[int] = []
        self._staged: dict[int, SequenceHash] = {}
        """STAGED slot → the block that is on its way in."""
        self._staging: dict[SequenceHash, int] = {}
        """Block that is on its way in → its STAGED slot."""
        self._abandoned: set[int] = set()
        """STAGED slots without a block: late bytes may still reach them."""
        self.pool = self._pool_of(layout, make)
        """The pool that knows which slots are free, how long each is, and where it begins."""

    def _pool_of(self, layout: Layout, make: MakePolicy) -> SlabPool:
        return SlabPool(layout, make, grow=self._grow, move=self._move_all, tenants=self._tenants)

    def _grow(self, count: int) -> None:
        """Have so many slots more."""
        super()._grow(count)
        self._state += [SlotState.RESET] * count
        self._generation += [0] * count
        self._pins += [0] * count
        lengths = {len(self._state), len(self._generation), len(self._pins), len(self._block)}
        assert len(lengths) == 1, f"columns of {lengths} slots, after {count} more"

    # --- moves ------------------------------------------------------------------------------

    def _move(self, slot: int, verb: str) -> None:
        assert verb in MOVES, f"slot {slot}: {verb!r} moves no slot"
        source, target = MOVES[verb]
        if self._state[slot] is not source:
            raise self._refusal(slot, verb)
        self._state[slot] = target

    def _move_all(self, slots: Iterable[int], verb: str) -> None:
        assert verb in MOVES, f"{verb!r} moves no slot"
        source, target = MOVES[verb]
        states = self._state
        for slot in slots:
            if states[slot] is not source:
                raise self._refusal(slot, verb)
            states[slot] = target

    def _refusal(self, slot: int, verb: str) -> InvalidTransition:
        return InvalidTransition(SLOT.refusal(self._state[slot], verb, f"slot {slot}"))

    # --- one block, or some -----------------------------------------------------------------

    def place(self, slot: int) -> int:
        """Return where a slot begins, in units: what messages and records call the slot."""
        assert slot >= 0, f"slot {slot} would be counted from the end"
        return self.pool.place_of[slot]

    def places(self, slots: Iterable[int]) -> list[int]:
        """Return where each of these slots begins."""
        place_of = self.pool.place_of
        return [place_of[slot] for slot in slots]

    def has_none_of(self, names: Sequence[SequenceHash]) -> bool:
        """Tell whether all of these are absent, and not on their way in."""
        return self._slot.has_none_of(names) and self._staging.keys().isdisjoint(names)

    def idle_block(self, slot: int) -> Block | None:
        """Return the block in an INACTIVE slot; None: the slot has another state."""
        return self.block(slot) if self._state[slot] is SlotState.INACTIVE else None

    def generation(self, slot: int) -> int:
        """Return how often the slot was staged; 0, too, of one that no slab was cut into yet."""
        assert slot >= 0, f"slot {slot} would be counted from the end"
        return self._generation[slot] if slot < len(self._generation) else 0

    def pin_count(self, slot: int) -> int:
        """Return how often a slot is pinned."""
        assert slot >= 0, f"slot {slot} would be counted from the end"
        return self._pins[slot]

    # --- all blocks -------------------------------------------------------------------------

    def by_place(self) -> dict[int, Block]:
        """Return all blocks that can be found, each by where its slot begins."""
        place_of = self.pool.place_of
        found = {place_of[slot]: one for slot, one in self._unfolded()}
        assert len(found) == len(self), f"{len(self)} blocks in {len(found)} places"
        return found

    # --- how many slots, and how large ------------------------------------------------------

    def slot_bytes(self, slot: int) -> int:
        """Return the length of a slot."""
        size = self.pool.slab_of[slot].size
        assert size is not None, f"slot {slot} is of no class"
        return size.slot_bytes

    @property
    def slot_count(self) -> int:
        """The number of slots of the first size that the medium has."""
        return self.pool.layout.slot_count

    @property
    def slots_made(self) -> int:
        """Numbers of slots are below this one."""
        return len(self._state)

    @property
    def usable_bytes(self) -> int:
        """Bytes of the medium that are not RETIRED."""
        usable = self.pool.layout.total_bytes - self.pool.retired_bytes
        assert usable >= 0, f"{self.pool.retired_bytes} bytes of {self.pool.layout} are retired"
        return usable

    @property
    def usable_count(self) -> int:
        """The number of slots of the first size that fit into what is not RETIRED."""
        return self.usable_bytes // self.pool.layout.slot_bytes

    @property
    def reset_count(self) -> int:
        """The slots that could be staged now without an eviction; in FREE slabs those of the first
        size."""
        return self.pool.free_count

    @property
    def idle_count(self) -> int:
        """The blocks that could be evicted."""
        return sum([size.idle_count for size in self.pool.sizes.values()])

    def counts(self) -> dict[str, int]:
        """Count slots by state, and in `total` those that may be used."""
        idle = self.idle_count
        active = len(self) + len(self._discarded) - idle
        assert active >= 0, f"{idle} blocks are free, {len(self)} can be found"
        leaving = sum([len(slab.reset) for slab in self.pool.leaving])
        counts = {
            "reset": self.reset_count + leaving,
            "staged": len(self._staged) + len(self._abandoned),
            "inactive": idle,
            "active": active,
        }
        assert min(counts.values()) >= 0, f"slots by state: {counts}"
        retired = sum([len(slab.retired) for slab in self.pool.slabs])
        return counts | {"retired": retired, "total": sum(counts.values())}

    # --- checks -----------------------------------------------------------------------------

    def staged(self) -> set[int]:
        """Return the STAGED slots, abandoned ones included; for `check`."""
        return self._staged.keys() | self._abandoned

    def pins(self) -> dict[int, int]:
        """Return the ACTIVE slots and how often each is pinned; for `check`."""
        return {slot: count for slot, count in enumerate(self._pins) if count}

    def check(self) -> None:
        """Assert every invariant; O(slots)."""
        check_pool(self.pool, self._state)
        by_state, is_sized = Counter(self._state), self.pool.layout.is_sized
        assert len(self._staged) == len(self._staging)
        assert not self._staged.keys() & self._abandoned
        assert len(self.staged()) == by_state[SlotState.STAGED]
        assert all(self._staging[name] == slot for slot, name in self._staged.items())
        assert self._slot.has_none_of(self._staging)
        assert len(self._slot) == len(self), f"{len(self._slot)} names of {len(self)} blocks"
        assert self.idle_count == by_state[SlotState.INACTIVE]
        named = len(self) + len(self._discarded)
        assert named == by_state[SlotState.INACTIVE] + by_state[SlotState.ACTIVE]
        for slot, block in self._unfolded():
            assert self._slot.get(block.hash) == slot
            assert not is_sized or block.bytes <= self.slot_bytes(slot)
        for slot in self._discarded:
            assert self._state[slot] is SlotState.ACTIVE
            assert self._slot.get(self.block(slot).hash) != slot
        columns = zip(self._state, self._pins, self._block, strict=True)
        for slot, (state, pins, one) in enumerate(columns):
            is_active = state is SlotState.ACTIVE
            assert (pins > 0) == is_active, f"slot {slot} is {state.name}, pinned {pins} times"
            committed = is_active or state is SlotState.INACTIVE
            assert (one is not None) == committed, f"slot {slot} is {state.name}, holds {one}"
        held = [slot for slot, block in enumerate(self._block) if block is not None]
        held_in = Counter(slot >> STRETCH_BITS for slot in held)
        assert self._held_in == [held_in[at] for at in range(len(self._held_in))]
        assert self._block_bytes == sum(self.block(slot).bytes for slot in held)
        if self._packed is not None:
            self._packed.check(set(held))
        folded = {slot for slot in held if self._block[slot] is FOLDED}
        assert folded <= self._folded.slots()
        assert self.folded_count == len(self._folded)
        counts = self.counts()
        assert all(counts[one.value] == by_state[one] for one in SlotState if one.value != "reset")
