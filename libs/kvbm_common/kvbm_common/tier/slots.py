"""Slots: the one machine that both tiers keep their blocks in. `slot_states` has its drawing.

A `SlotTable` has five layers, each a class that extends the one below it, and two parts:

    slots         SlotTable    blocks come and leave: stage, register, evict, discard, resize
    slot_pins     SlotPins     blocks stay: pin, unpin, renew a chain; policies learn of each use
    slot_tenants  SlotTenants  whose block it is: `_owner`; counts, shares, the next one to leave
    slot_records  SlotRecords  all other numbers: `_state`, `_generation`, `_pins`; moves
    slot_blocks   SlotBlocks   the block of each slot: `_block`, `_slot`, and columns of packed ones

    slab_pool     `pool`       which slots are free, how long each is, which policy has its block
    reclaim       `_reclaim`   which blocks make room for others
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from kvbm_common.eviction import EvictionPolicy
from kvbm_common.eviction.succession import Succession
from kvbm_common.identity import SequenceHash
from kvbm_common.tier.block_columns import BlockColumns, FoldedBlocks
from kvbm_common.tier.blocks import Block
from kvbm_common.tier.layout import Layout
from kvbm_common.tier.packed_blocks import FOLDED
from kvbm_common.tier.reclaim import Reclaim, Victims
from kvbm_common.tier.slab_pool import MakePolicy
from kvbm_common.tier.slabs import Slab
from kvbm_common.tier.slot_blocks import STRETCH_BITS
from kvbm_common.tier.slot_pins import SlotPins
from kvbm_common.tier.slot_states import SlotState
from kvbm_common.tier.tenants import MayLeave, Tenants

__all__ = ["Block", "SlotTable"]

RENEWED_PER_BLOCK = 64
"""A chain is renewed for blocks after it if it has no more than so many for each: its walk takes
0.2 µs a block. A few decoded tokens after a long prompt are not worth it. The chains after which
a batch comes share this evenly, so that no commit takes longer."""

FORMERS_MAX = 4
"""Replaced policies that may still own blocks. Each came from an operator's switch."""
JOINED_MAX = 256
"""Blocks that one step gives from a policy beyond these to the one before: 3 µs each."""


class SlotTable(SlotPins):
    """The slots of one tier: blocks come, stay and leave, each by a transition of SLOT."""

    def __init__(
        self,
        layout: Layout,
        make: MakePolicy,
        tenants: Tenants | None = None,
        *,
        packs: bool = False,
    ) -> None:
        """Start with empty slots; `make` makes the policies of each size class.

        `packs`: see `packed_blocks`. It is for tiers of many blocks that are seldom used.
        """
        super().__init__(layout, make, tenants, packs=packs)
        self._reclaim = self._new_reclaim()
        self._is_joining = False
        """Former policies are too many, and have still to be joined."""

    def _new_reclaim(self) -> Reclaim:
        return Reclaim(self.pool, self._state, self._idle_in, self.tenant_of)

    def lay_out(self, layout: Layout, make: MakePolicy) -> None:
        """Give a table without slots its slots: their size was not known when it was made."""
        assert self.slot_count == 0, "a table gets its slots once"
        self.pool = self._pool_of(layout, make)
        self._reclaim = self._new_reclaim()

    # --- a block and its slot ---------------------------------------------------------------

    def find(self, block: SequenceHash) -> int | None:
        """Return the slot of a committed block, None when it is not there."""
        return self._slot.get(block)

    def find_all(self, blocks: Iterable[SequenceHash]) -> list[int | None]:
        """Return what `find` does of each block."""
        return self._slot.get_all(blocks)

    def is_staging(self, block: SequenceHash) -> bool:
        """Return whether a block is on its way in."""
        return block in self._staging

    def first_discarded(self, slots: Iterable[int | None]) -> int | None:
        """Return the index of the first of these slots whose block was discarded; None: none was.

        None is a slot that is not there yet.
        """
        if not self._discarded:
            return None
        return next((at for at, slot in enumerate(slots) if slot in self._discarded), None)

    def committed(self, slot: int) -> Block | None:
        """Return the block in a slot, pinned or not; None: none can be found there."""
        assert slot >= 0, f"slot {slot} would be counted from the end"
        if slot >= len(self._block) or slot in self._discarded:
            return None
        return None if self._block[slot] is None else self.block(slot)

    # --- room -------------------------------------------------------------------------------

    @property
    def has_room(self) -> bool:
        """Tell whether a slot could be staged now, evicting where needed."""
        sizes = self.pool.sizes.values()
        return any(size.free_count or size.idle_count for size in sizes) or any(
            slab.retired_bytes < slab.length for slab in self.pool.free
        )

    def room_for(self, count: int, block_bytes: int = 0) -> int:
        """Return how many of `count` blocks of this size could be staged now."""
        pool = self.pool
        size = pool.known.get(block_bytes) or pool.size_of(block_bytes)
        if size is None:
            return 0
        return count if size.free_count >= count else pool.room_for(size, count)

    def victims(
        self,
        count: int,
        block_bytes: int = 0,
        may_leave: MayLeave | None = None,
        namespace: bytes = b"",
    ) -> Victims:
        """Return the blocks to evict so that `count` of this size can be staged: as many as can be.

        `may_leave`: which blocks may be evicted; None: all that are not pinned. `namespace`: whose
        blocks want room.
        """
        assert count >= 0, f"room for {count} blocks"
        size = self.pool.size_of(block_bytes)
        if size is None:
            return Victims()
        short = count - self.pool.room_for(size, count)
        claim = self.claim(count, block_bytes, namespace) if short > 0 else None
        return self._reclaim.victims(size, short, may_leave, claim)

    def longest_idle(self, count: int) -> list[SequenceHash]:
        """Return up to `count` blocks of any size, those first that would leave first."""
        names: list[SequenceHash] = []
        for size in self._reclaim.longest_idle():
            names += self.worst_of(size, count - len(names))
        return names

    def _idle_in(self, slab: Slab) -> list[SequenceHash]:
        """Return the blocks of a slab that can be evicted."""
        states = enumerate(self._state[slab.slots], slab.first)
        return [*self._names_in([slot for slot, one in states if one is SlotState.INACTIVE])]

    # --- moves ------------------------------------------------------------------------------

    def stage(self, block: SequenceHash, block_bytes: int = 0) -> int | None:
        """Take a RESET slot for a block that is neither committed nor staged; None: no room."""
        return self.stage_all([block], block_bytes)[0] if self.room_for(1, block_bytes) else None

    def stage_all(self, blocks: Sequence[SequenceHash], block_bytes: int = 0) -> list[int]:
        """Take a RESET slot for each of these blocks of one size; the caller has made room."""
        pool, count = self.pool, len(blocks)
        size = pool.known.get(block_bytes) or pool.size_of(block_bytes)
        assert size is not None, f"no slot takes {block_bytes} bytes"
        assert len(set(blocks)) == count, f"a block twice among {count}"
        assert self._slot.has_none_of(blocks), f"of {count} blocks some are here"
        assert self._staging.keys().isdisjoint(blocks), f"of {count} some are on their way in"
        pool.clock += 1
        slab = size.open[-1] if size.open else None
        if slab is not None and 0 < count < len(slab.reset) < slab.usable:
            # Nearly always one slab has all of them: it stays open, and neither was nor is empty.
            slots = slab.reset[: -1 - count : -1]
            del slab.reset[-count:]
            size.free_count -= count
        else:
            slots = pool.take(size, count)
        generation = self._generation
        self._move_all(slots, "stage")
        for slot in slots:
            generation[slot] += 1
        self._staged.update(zip(slots, blocks, strict=True))
        self._staging.update(zip(blocks, slots, strict=True))
        return slots

    def register(self, slot: int, block: Block) -> None:
        """Commit: from now on the block can be found."""
        self.register_all([(slot, block)])

    def register_all(self, entries: Sequence[tuple[int, Block]]) -> None:
        """Commit a batch, and free it leaf first: the root of a chain outlives its leaf."""
        policy_of, used, clock = self.pool.policy_of, self.pool.used, self.pool.clock
        slots = [slot for slot, _ in entries]
        self._come(entries)
        self._move_all(slots, "register")
        if self.pool.has_switched:
            if self._is_joining:
                self._join_formers()
            for slot in slots:
                policy_of[slot] = self._policy_in_force(slot)
        self._hold(entries)
        for slot in slots:
            used[slot] = clock
        parent_of = {block.hash: block.parent for _, block in entries}
        names = [*parent_of]
        self._slot.set_each(names, slots)
        self._findable_count += len(entries)
        if self._packed is not None:
            self._packed.pack(entries, self._slot.get)
        for policy, ours in self._by_policy(slots, names):
            policy.admit_all(ours, [parent_of[name] for name in ours])
        # In the order of the entries: it says which chain is the older one afterwards.
        parents = dict.fromkeys([one for one in parent_of.values() if one not in parent_of])
        for parent in parents:
            self.renew_chain(parent, RENEWED_PER_BLOCK * len(entries) // len(parents))

    def _hold(self, entries: Sequence[tuple[int, Block]]) -> None:
        """Put staged blocks into their slots."""
        staged, staging, blocks, held_in = self._staged, self._staging, self._block, self._held_in
        length = 0
        for slot, block in entries:
            name = block.hash
            assert staged.get(slot) == name, f"slot {slot} was not staged for this block"
            del staged[slot], staging[name]
            blocks[slot] = block
            held_in[slot >> STRETCH_BITS] += 1
            length += block.bytes
        self._block_bytes += length

    def abort(self, slot: int) -> None:
        """Reset a staged slot, because its bytes did not arrive, or not intact."""
        self._move(slot, "abort")
        if slot in self._abandoned:
            self._abandoned.remove(slot)
        else:
            del self._staging[self._staged.pop(slot)]
        self.pool.give_back(slot)

    def abandon(self, slot: int) -> None:
        """Free the name of a staged slot, but keep it until `abort`: late bytes may reach it."""
        assert slot in self._staged, f"slot {slot} is {self._state[slot].name}, cannot be abandoned"
        del self._staging[self._staged.pop(slot)]
        self._abandoned.add(slot)

    def restore(self, blocks: Mapping[int, Block]) -> None:
        """Put committed blocks where a former life had them, by their places, from the oldest on.

        Only into an all-RESET table: each is staged and registered in one. They are *folded*: like
        all others, but that a `Block` is made of one when it is wanted, until it is unfolded.
        """
        assert not self._state, "slots are in use"
        left = BlockColumns.of(blocks)
        former = left.moved(self.pool.adopt(left.slots, left.block_bytes))
        slots = former.slots.tolist()
        self._slot.set_each(former.names, slots)
        if self._packed is not None:
            self._packed.restore(slots, former.names)
        del slots
        self._findable_count = len(former)
        assert len(self._slot) == len(former), "a block is in two slots"
        count = len(self._state)
        self._state[:] = [SlotState.INACTIVE] * count
        self._generation[:] = [1] * count
        self._block[:] = [FOLDED] * count
        taken = np.zeros(count, bool)
        taken[former.slots] = True
        stretches = len(self._held_in)
        self._held_in[:] = np.bincount(former.slots >> STRETCH_BITS, minlength=stretches).tolist()
        for slot in np.flatnonzero(~taken).tolist():
            self._state[slot], self._generation[slot], self._block[slot] = SlotState.RESET, 0, None
        self._block_bytes = former.total_bytes
        self._folded = FoldedBlocks(former)
        self.folded_count = len(self._folded)
        self._fill_policies(former)

    def unfold(self, count: int) -> list[Block]:
        """Unfold the next `count` restored blocks; returns those that can still be found."""
        # Others have left, and perhaps a block has come in their place.
        left = [one for one in self._folded.take(count) if self._block[one[0]] is FOLDED]
        self.folded_count = len(self._folded)
        if self._packed is not None:
            self._packed.pack(left, self._slot.get)
        else:
            for slot, block in left:
                self._block[slot] = block
        return [block for slot, block in left if slot not in self._discarded]

    def evict(self, name: SequenceHash) -> Block:
        """Give up an INACTIVE block."""
        slot = self._lose_name(name)
        block = self.block(slot)
        self._move(slot, "evict")
        self.pool.policy_of[slot].forget(name)
        self._empty(slot, block.bytes)
        return block

    def discard(self, name: SequenceHash) -> Block | None:
        """Make a committed block unfindable at once, pinned or not; None when it is not there."""
        slot = self._slot.get(name)
        if slot is None:
            return None
        if self._pins[slot] == 0:
            return self.evict(name)
        assert slot not in self._discarded, f"slot {slot} has a name, and is discarded"
        self._lose_name(name)
        self._discarded.add(slot)
        # The policy forgets it now: the same name may be committed again before the last unpin.
        policy = self.pool.policy_of[slot]
        policy.free(name)
        policy.forget(name)
        return self.block(slot)

    def retire(self, count: int) -> int:
        """Take RESET slots out of use, as much as `count` of the first size; returns how many."""
        assert count >= 0, f"retire {count} slots"
        before = self.pool.retired_bytes
        self.pool.withdraw(count * self.pool.layout.slot_bytes)
        return (self.pool.retired_bytes - before) // self.pool.layout.slot_bytes

    def revive(self, count: int) -> int:
        """Put RETIRED slots back into use, like `retire` takes them out of it."""
        assert count >= 0, f"revive {count} slots"
        before = self.pool.retired_bytes
        slots = self.pool.put_back(count * self.pool.layout.slot_bytes)
        self._move_all(slots, "revive")
        for slot in slots:
            self.pool.give_back(slot)
        return (before - self.pool.retired_bytes) // self.pool.layout.slot_bytes

    def use_policy(self, make: MakePolicy) -> None:
        """Have another policy choose from now on. Blocks come to it when they are used again.

        Until then they leave first, in the order of the policy that had them.
        """
        self.pool.use_policy(make)
        self._join_formers()

    def _join_formers(self) -> None:
        """Give some blocks of formers that are too many to those before; commits go on with it."""
        policies = [one for size in self.pool.sizes.values() for one in size.policies.values()]
        many = [
            one.formers
            for one in policies
            if isinstance(one, Succession) and len(one.formers) > FORMERS_MAX
        ]
        self._is_joining = len(many) > 1  # Each tenant has policies of its own: one in a step.
        for formers in many[:1]:
            at = min(range(1, len(formers)), key=lambda one: len(formers[one]))
            self._join(formers[at - 1], formers[at])
            if not len(formers[at]):
                formers.pop(at)
            self._is_joining |= len(formers) > FORMERS_MAX

    def _join(self, older: EvictionPolicy, joined: EvictionPolicy) -> None:
        """Give the blocks that would leave first to the policy before, after what it has."""
        count = len(joined)
        names = joined.victims(JOINED_MAX)
        for name in names:
            slot = self._slot_of(name)
            joined.forget(name)
            older.admit(name, self._parent_in(slot))
            self.pool.policy_of[slot] = older
        assert len(joined) == count - len(names), f"{len(joined)} of {count} free blocks are left"
