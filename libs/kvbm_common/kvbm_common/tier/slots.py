"""Slots: the one machine that both tiers keep their blocks in. `slot_states` has its drawing.

What is in the slots is in `slot_records`, which slots are free in `slab_pool`, and which blocks
make room for others in `reclaim`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import numpy as np

from kvbm_common.eviction import EvictionPolicy
from kvbm_common.identity import SequenceHash
from kvbm_common.tier.blocks import FOLDED, Block, BlockColumns, FoldedBlocks
from kvbm_common.tier.layout import Layout
from kvbm_common.tier.machine import InvalidTransition
from kvbm_common.tier.reclaim import MayLeave, Reclaim, Victims
from kvbm_common.tier.slab_pool import MakePolicy, SlabPool
from kvbm_common.tier.slabs import SizeClass, Slab
from kvbm_common.tier.slot_records import SlotRecords
from kvbm_common.tier.slot_states import SLOT, SlotState

__all__ = ["Block", "SlotTable"]

_TRANSITIONS = SLOT.transitions  # Every block of every step makes four moves: no call for each.


class SlotTable(SlotRecords):
    """The slots of one tier. Every change is a transition of SLOT."""

    def __init__(self, layout: Layout, make: MakePolicy) -> None:
        """Start with empty slots; `make` makes the policy of each size class."""
        super().__init__(layout, make)
        self._reclaim = Reclaim(self.pool, self._state, self._idle_in)

    def lay_out(self, layout: Layout, make: MakePolicy) -> None:
        """Give a table without slots its slots: their size was not known when it was made."""
        assert self.slot_count == 0, "a table gets its slots once"
        self.pool = SlabPool(layout, make, grow=self._grow, move=self._move_all)
        self._reclaim = Reclaim(self.pool, self._state, self._idle_in)

    # --- a block and its slot ---------------------------------------------------------------

    def find(self, block: SequenceHash) -> int | None:
        """Return the slot of a committed block, None when it is not there."""
        return self._slot.get(block)

    def is_staging(self, block: SequenceHash) -> bool:
        """Return whether a block is on its way in."""
        return block in self._staging

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

    def first_discarded(self, slots: Iterable[int | None]) -> int | None:
        """Return the index of the first of these slots whose block was discarded; None: none was.

        None is a slot that is not there yet.
        """
        if not self._discarded:
            return None
        return next((at for at, slot in enumerate(slots) if slot in self._discarded), None)

    def slot_bytes(self, slot: int) -> int:
        """Return the length of a slot."""
        size = self.pool.slab_of[slot].size
        assert size is not None, f"slot {slot} is of no class"
        return size.slot_bytes

    def committed(self, slot: int) -> Block | None:
        """Return the block in a slot, pinned or not; None: none can be found there."""
        assert slot >= 0, f"slot {slot} would be counted from the end"
        is_made = slot < len(self._block)
        return self.block(slot) if is_made and self._block[slot] is not None else None

    def place(self, slot: int) -> int:
        """Return where a slot begins, in units: what messages and records call the slot."""
        return self.pool.place_of[slot]

    def places(self, slots: Iterable[int]) -> list[int]:
        """Return where each of these slots begins."""
        place_of = self.pool.place_of
        return [place_of[slot] for slot in slots]

    # --- room -------------------------------------------------------------------------------

    @property
    def has_room(self) -> bool:
        """Whether a slot could be staged now, evicting where needed."""
        sizes = self.pool.sizes.values()
        return any(size.free_count or len(size.policy) for size in sizes) or any(
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
        self, count: int, block_bytes: int = 0, may_leave: MayLeave | None = None
    ) -> Victims:
        """Return the blocks to evict so that `count` of this size can be staged: as many as can be.

        `may_leave`: which blocks may be evicted; None: all that are not pinned.
        """
        assert count >= 0, f"room for {count} blocks"
        size = self.pool.size_of(block_bytes)
        if size is None:
            return Victims()
        short = count - self.pool.room_for(size, count)
        return self._reclaim.victims(size, short, may_leave)

    def longest_idle(self, count: int) -> list[SequenceHash]:
        """Return up to `count` blocks of any size, those first that would leave first."""
        names: list[SequenceHash] = []
        for size in self._reclaim.longest_idle():
            names += size.policy.victims(count - len(names))
        return names

    def make_room(self, count: int, block_bytes: int = 0) -> list[Block]:
        """Evict until `count` blocks of this size can be staged, or as many as can be; returns the
        evicted."""
        return [self.evict(victim) for victim in self.victims(count, block_bytes).names]

    def _idle_in(self, slab: Slab) -> list[SequenceHash]:
        """Return the blocks of a slab that can be evicted."""
        states = enumerate(self._state[slab.slots], slab.first)
        return [self.block(slot).hash for slot, state in states if state is SlotState.INACTIVE]

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
        assert self._slot.keys().isdisjoint(blocks), f"of {count} blocks some are here"
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
        for slot in slots:
            self._move(slot, "stage")
            generation[slot] += 1
        self._staged.update(zip(slots, blocks, strict=True))
        self._staging.update(zip(blocks, slots, strict=True))
        return slots

    def register(self, slot: int, block: Block) -> None:
        """Commit: from now on the block can be found."""
        self.register_all([(slot, block)])

    def register_all(self, entries: Sequence[tuple[int, Block]]) -> None:
        """Commit a batch, and free it leaf first: the root of a chain outlives its leaf."""
        staged, blocks, slot_of = self._staged, self._block, self._slot
        policy_of, used, clock = self.pool.policy_of, self.pool.used, self.pool.clock
        for slot, block in entries:
            name = block.hash
            assert staged.get(slot) == name, f"slot {slot} was not staged for this block"
            self._move(slot, "register")
            del staged[slot], self._staging[name]
            blocks[slot] = block
            self._block_bytes += block.bytes
            slot_of[name] = slot
            used[slot] = clock
            policy = policy_of[slot]
            policy.admit(name, block.parent)
            policy.hold(name)
        for slot, block in reversed(entries):
            policy_of[slot].free(block.hash)

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
        Columns are taken over: their `slot_of` becomes the table's own.
        """
        assert not self._state, "slots are in use"
        left = BlockColumns.of(blocks)
        former = left.moved(self.pool.adopt(left.slots, left.block_bytes))
        assert len(former.slot_of) == len(former), "a block is in two slots"
        count = len(self._state)
        self._state[:] = [SlotState.INACTIVE] * count
        self._generation[:] = [1] * count
        self._block[:] = [FOLDED] * count
        taken = np.zeros(count, bool)
        taken[former.slots] = True
        for slot in np.flatnonzero(~taken).tolist():
            self._state[slot], self._generation[slot], self._block[slot] = SlotState.RESET, 0, None
        self._slot = former.slot_of
        self._block_bytes = former.total_bytes
        self._folded = FoldedBlocks(former)
        self.folded_count = len(self._folded)
        self.pool.fill_policies(former)

    def unfold(self, count: int) -> list[Block]:
        """Unfold the next `count` restored blocks; returns those that can still be found."""
        found: list[Block] = []
        for slot, block in self._folded.take(count):
            if self._block[slot] is FOLDED:  # Else it has left, and perhaps another has come.
                self._block[slot] = block
                if slot not in self._discarded:
                    found.append(block)
        self.folded_count = len(self._folded)
        return found

    def pin(self, slot: int, *, used: bool = False) -> None:
        """Keep a committed block from eviction; counts. `used`: a request asked for it by name."""
        assert slot not in self._discarded, f"slot {slot} is discarded"
        if used:
            self.pool.policy_of[slot].touch(self.block(slot).hash)
            self.pool.used[slot] = self.pool.clock
        if self._pins[slot] == 0:
            self._move(slot, "pin")
            self.pool.policy_of[slot].hold(self.block(slot).hash)
        self._pins[slot] += 1

    def pin_prefix(self, names: Iterable[SequenceHash]) -> list[int]:
        """Pin the leading blocks of a chain that are here, each once; returns their slots."""
        slots: list[int] = []
        self.pool.clock += 1
        pins, policy_of = self._pins, self.pool.policy_of
        used, clock = self.pool.used, self.pool.clock
        for name in names:
            slot = self._slot.get(name)
            if slot is None:
                break
            policy = policy_of[slot]
            policy.touch(name)
            used[slot] = clock
            if pins[slot] == 0:
                self._move(slot, "pin")
                policy.hold(name)
            pins[slot] += 1
            slots.append(slot)
        return slots

    def unpin(self, slots: Iterable[int]) -> None:
        """Take one pin off each slot. Give a chain in prefix order: its leaf is freed first."""
        pins, policy_of = self._pins, self.pool.policy_of
        for slot in reversed(list(slots)):
            left = pins[slot] - 1
            assert left >= 0, f"slot {slot} is not pinned"
            pins[slot] = left
            if left:
                continue
            self._move(slot, "unpin")
            if slot not in self._discarded:
                policy_of[slot].free(self.block(slot).hash)
                continue
            self._discarded.remove(slot)
            self._move(slot, "evict")
            self._empty(slot)

    def evict(self, name: SequenceHash) -> Block:
        """Give up an INACTIVE block."""
        slot = self._slot.pop(name)
        block = self.block(slot)
        self._move(slot, "evict")
        self.pool.policy_of[slot].forget(name)
        self._empty(slot)
        return block

    def discard(self, name: SequenceHash) -> Block | None:
        """Make a committed block unfindable at once, pinned or not; None when it is not there."""
        slot = self._slot.get(name)
        if slot is None:
            return None
        if self._pins[slot] == 0:
            return self.evict(name)
        assert slot not in self._discarded, f"slot {slot} has a name, and is discarded"
        del self._slot[name]
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
        """Have another policy choose from now on. It learns the blocks in the old one's order.

        O(blocks). What the old one knew beyond the order (counts, chances to return) is lost.
        """
        held = [(name, slot) for name, slot in self._slot.items() if self._pins[slot]]

        def learn(size: SizeClass, policy: EvictionPolicy) -> None:
            assert len(policy) == 0, "a policy that knows blocks is no new one"
            ours = [name for name, slot in held if self.pool.policy_of[slot] is size.policy]
            for name in (*size.policy.victims(len(size.policy)), *ours):  # Held: the last to go.
                policy.admit(name, self.block(self._slot[name]).parent)
            for name in ours:
                policy.hold(name)
            assert len(policy) == len(size.policy), f"{len(policy)} of {len(size.policy)} are free"

        self.pool.use_policy(make, learn)

    def _empty(self, slot: int) -> None:
        left = self.block(slot)
        self._block_bytes -= left.bytes
        assert self._block_bytes >= 0, f"{left} has left slot {slot}: {self._block_bytes} bytes"
        self._block[slot] = None
        self.pool.give_back(slot)

    def _move(self, slot: int, verb: str) -> None:
        state = self._state[slot]
        target = _TRANSITIONS.get((state, verb))
        if target is None:
            raise InvalidTransition(SLOT.refusal(state, verb, f"slot {slot}"))
        self._state[slot] = target

    def _move_all(self, slots: Iterable[int], verb: str) -> None:
        for slot in slots:
            self._move(slot, verb)
