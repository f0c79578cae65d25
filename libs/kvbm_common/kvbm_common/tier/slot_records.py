"""Slot records: the state and the block of each slot, its moves, and the questions about them.

They are the lowest layer of a `SlotTable`: see `slots.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from operator import is_
from typing import cast

from kvbm_common.identity import SequenceHash
from kvbm_common.tier.block_columns import FOLDED, BlockColumns, FoldedBlocks
from kvbm_common.tier.block_lookup import BlockLookup
from kvbm_common.tier.blocks import Block
from kvbm_common.tier.layout import Layout
from kvbm_common.tier.machine import InvalidTransition
from kvbm_common.tier.slab_checks import check_pool
from kvbm_common.tier.slab_pool import MakePolicy, SlabPool
from kvbm_common.tier.slot_states import MOVES, SLOT, SlotState
from kvbm_common.tier.tenants import Tenants

STRETCH_BITS = 10
"""A stretch has 1,024 slots: a tier knows how many blocks are in each."""
STRETCHES_MAX = 32
"""Stretches of one part of a listing: it is bounded though blocks come before it is made."""


class SlotRecords:
    """State, generation, pins and block of each slot, by number, and the slot of each block.

    They move slots and answer; which block comes, stays or leaves is decided above them.
    """

    def __init__(self, layout: Layout, make: MakePolicy, tenants: Tenants) -> None:
        """Start with slots that are not cut; `make` makes the policy of each size class."""
        self._tenants = tenants
        self._state: list[SlotState] = []
        self._generation: list[int] = []
        self._pins: list[int] = []
        self._block: list[Block | None] = []
        self._staged: dict[int, SequenceHash] = {}
        """STAGED slot → the block that is on its way in."""
        self._staging: dict[SequenceHash, int] = {}
        """Block that is on its way in → its STAGED slot."""
        self._slot: BlockLookup[int] = BlockLookup(0)
        """The slot of each block that can be found."""
        self._findable_count = 0
        self._held_in: list[int] = []
        """Stretch → the number of its slots that have a block."""
        self._discarded: set[int] = set()
        """ACTIVE slots whose block cannot be found any more."""
        self._abandoned: set[int] = set()
        """STAGED slots without a block: late bytes may still reach them."""
        self._block_bytes = 0
        self._folded = FoldedBlocks(BlockColumns.of({}))
        self.folded_count = 0
        """The number of `restore`d slots that are still to be unfolded; read at each lookup."""
        self.pool = self._pool_of(layout, make)
        """The pool that knows which slots are free, how long each is, and where it begins."""

    def _pool_of(self, layout: Layout, make: MakePolicy) -> SlabPool:
        return SlabPool(layout, make, grow=self._grow, move=self._move_all, tenants=self._tenants)

    def _grow(self, count: int) -> None:
        """Have so many slots more."""
        self._state += [SlotState.RESET] * count
        self._generation += [0] * count
        self._pins += [0] * count
        self._block += [None] * count
        stretches = (len(self._block) - 1 >> STRETCH_BITS) + 1
        self._held_in += [0] * (stretches - len(self._held_in))
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

    def block(self, slot: int) -> Block:
        """Return the committed block in a slot."""
        block = self._block[slot]
        assert block is not None, f"slot {slot} is {self._state[slot].name}, holds no block"
        return block if block is not FOLDED else self._folded[slot]

    def blocks_in(self, slots: Sequence[int]) -> list[Block]:
        """Return the committed blocks in these slots, in their order."""
        if self.folded_count:
            return [self.block(slot) for slot in slots]
        blocks = cast("list[Block]", [*map(self._block.__getitem__, slots)])
        assert all(blocks), f"of {len(slots)} slots some hold no block"
        return blocks

    def place(self, slot: int) -> int:
        """Return where a slot begins, in units: what messages and records call the slot."""
        assert slot >= 0, f"slot {slot} would be counted from the end"
        return self.pool.place_of[slot]

    def places(self, slots: Iterable[int]) -> list[int]:
        """Return where each of these slots begins."""
        place_of = self.pool.place_of
        return [place_of[slot] for slot in slots]

    def has_still(self, slots: Sequence[int], blocks: Sequence[Block]) -> bool:
        """Tell whether these slots have these very blocks, and lookups find all of them."""
        assert len(slots) == len(blocks), f"{len(blocks)} blocks in {len(slots)} slots"
        if not all(map(is_, map(self._block.__getitem__, slots), blocks)):
            return False
        return not self._discarded or self._discarded.isdisjoint(slots)

    def holds(self, block: SequenceHash) -> bool:
        """Return whether a committed block is there."""
        return block in self._slot

    @property
    def names(self) -> BlockLookup[int]:
        """Return the committed blocks, in parts."""
        return self._slot

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

    def found_in(self, slots: range) -> list[tuple[int, Block]]:
        """Return the blocks of some slots that can be found, each with its slot; none is folded."""
        found: list[tuple[int, Block]] = []
        for slot, block in zip(slots, self._block[slots.start : slots.stop], strict=True):
            assert block is not FOLDED, f"the block in slot {slot} is folded"
            if block is not None and slot not in self._discarded:
                found.append((slot, block))
        return found

    def folded_in(self, slots: range) -> int:
        """Count the folded blocks in some slots."""
        assert slots.stop <= len(self._block), f"{slots} of {len(self._block)} slots"
        return self._block[slots.start : slots.stop].count(FOLDED) if self.folded_count else 0

    def _slot_of(self, name: SequenceHash) -> int:
        """Return the slot of a block that can be found; raises KeyError when it cannot."""
        slot = self._slot.get(name)
        if slot is None:
            raise KeyError(name)
        return slot

    def _lose_name(self, name: SequenceHash) -> int:
        """Let a block be found no more; returns its slot, or raises KeyError."""
        slot = self._slot.pop(name)
        if slot is None:
            raise KeyError(name)
        self._findable_count -= 1
        return slot

    # --- all blocks -------------------------------------------------------------------------

    def blocks(self) -> list[Block]:
        """Return all blocks that can be found, in the order of their slots."""
        return [one for _, one in self._unfolded()]

    def by_place(self) -> dict[int, Block]:
        """Return all blocks that can be found, each by where its slot begins."""
        place_of = self.pool.place_of
        found = {place_of[slot]: one for slot, one in self._unfolded()}
        assert len(found) == len(self), f"{len(self)} blocks in {len(found)} places"
        return found

    def cut(self, blocks_max: int) -> list[list[range]]:
        """Return ranges of slots in groups that have up to `blocks_max` blocks, or one stretch."""
        parts: list[list[range]] = []
        room = looks = 0
        for at, held in enumerate(self._held_in):
            if not held:
                continue
            if held > room or not looks:
                parts.append([])
                room, looks = blocks_max, STRETCHES_MAX
            room, looks = room - held, looks - 1
            parts[-1].append(range(at << STRETCH_BITS, at + 1 << STRETCH_BITS))
        assert sum(map(len, parts)) <= len(self._held_in), f"{len(parts)} parts of {len(self)}"
        return parts

    def unfolded_in(self, slots: Iterable[range]) -> list[Block]:
        """Return the blocks in some slots that can be found and are not folded."""
        found: list[Block] = []
        for some in slots:
            blocks = self._block[some.start : some.stop]
            if gone := self._discarded.intersection(some):
                blocks = [one for slot, one in zip(some, blocks, strict=False) if slot not in gone]
            found += [one for one in blocks if one is not None and one is not FOLDED]
        assert len(found) <= len(self), f"{len(found)} of {len(self)} blocks"
        return found

    def folded(self, names: Iterable[SequenceHash]) -> set[SequenceHash]:
        """Return which of these blocks are here, and folded."""
        if not self.folded_count:
            return set()
        slots = ((name, self._slot.get(name)) for name in names)
        return {name for name, slot in slots if slot is not None and self._block[slot] is FOLDED}

    def latest_folded(self, count: int) -> list[SequenceHash]:
        """Return the `count` restored blocks that a former life committed last, oldest first."""
        return self._folded.latest(count)

    def _findable(self) -> list[tuple[int, Block]]:
        """Return each slot whose block can be found, with what stands for that block."""
        gone = self._discarded
        slots = enumerate(self._block)
        found = [(slot, one) for slot, one in slots if one is not None and slot not in gone]
        assert len(found) == len(self), f"{len(found)} of {len(self)} blocks are in slots"
        return found

    def _unfolded(self) -> list[tuple[int, Block]]:
        """Return each slot whose block can be found, with its block: columns are read once."""
        if not self.folded_count:
            return self._findable()
        folded = self._folded.by_slot()
        return [(slot, folded[slot] if one is FOLDED else one) for slot, one in self._findable()]

    def __len__(self) -> int:
        """Return how many blocks can be found."""
        return self._findable_count

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

    @property
    def block_bytes(self) -> int:
        """Bytes of all committed blocks, discarded ones included."""
        return self._block_bytes

    # --- checks -----------------------------------------------------------------------------

    def staged(self) -> set[int]:
        """Return the STAGED slots, abandoned ones included; for `check`."""
        return self._staged.keys() | self._abandoned

    def pins(self) -> dict[int, int]:
        """Return the ACTIVE slots and how often each is pinned; for `check`."""
        return {slot: count for slot, count in enumerate(self._pins) if count}

    def discarded(self) -> frozenset[int]:
        """Return the slots of blocks that have left, and that are pinned still; for `check`."""
        return frozenset(self._discarded)

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
        folded = {slot for slot in held if self._block[slot] is FOLDED}
        assert folded <= self._folded.slots()
        assert self.folded_count == len(self._folded)
        counts = self.counts()
        assert all(counts[one.value] == by_state[one] for one in SlotState if one.value != "reset")
