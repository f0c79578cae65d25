"""Slots: the one machine that both tiers keep their blocks in.

The states of a slot and their drawing are in `slot_states.py`; this module has the moves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice

import numpy as np

from kvbm_common.eviction import EvictionPolicy
from kvbm_common.identity import SequenceHash
from kvbm_common.tier.blocks import Block, BlockColumns
from kvbm_common.tier.folded_blocks import FOLDED, FoldedBlocks
from kvbm_common.tier.machine import InvalidTransition
from kvbm_common.tier.slot_states import SLOT, SlotState

__all__ = ["Block", "SlotTable"]

_TRANSITIONS = SLOT.transitions  # Every block of every step makes four moves: no call for each.


class SlotTable:
    """The slots of one tier. Allocated once; every change is a transition of SLOT."""

    def __init__(self, slot_count: int, policy: EvictionPolicy) -> None:
        self.evicted_count = 0
        self.slot_count = 0
        self.lay_out(slot_count, policy)
        self._staged: dict[int, SequenceHash] = {}
        self._staging: dict[SequenceHash, int] = {}
        self._slot: dict[SequenceHash, int] = {}
        self._discarded: set[int] = set()
        self._abandoned: set[int] = set()
        self._retired: list[int] = []
        self._block_bytes = 0
        self._folded = FoldedBlocks(BlockColumns.of({}))

    def lay_out(self, slot_count: int, policy: EvictionPolicy) -> None:
        """Give a table without slots its slots: their number was not known when it was made."""
        assert self.slot_count == 0, "a table gets its slots once"
        assert slot_count >= 0
        self.slot_count = slot_count
        self.policy = policy
        self._state = [SlotState.RESET] * slot_count
        self._generation = [0] * slot_count
        self._pins = [0] * slot_count
        self._block: list[Block | None] = [None] * slot_count
        self._reset = list(range(slot_count - 1, -1, -1))  # A stack: low slots first.

    # --- questions --------------------------------------------------------------------------

    def find(self, block: SequenceHash) -> int | None:
        """Return the slot of a committed block, None when it is not there."""
        return self._slot.get(block)

    def holds(self, block: SequenceHash) -> bool:
        """Return whether a committed block is there."""
        return block in self._slot

    def is_staging(self, block: SequenceHash) -> bool:
        """Return whether a block is on its way in."""
        return block in self._staging

    def has_none_of(self, names: Sequence[SequenceHash]) -> bool:
        """Tell whether all of these are absent, and not on their way in."""
        return self._slot.keys().isdisjoint(names) and self._staging.keys().isdisjoint(names)

    def block(self, slot: int) -> Block:
        """Return the committed block in a slot."""
        block = self._block[slot]
        assert block is not None, f"slot {slot} is {self._state[slot].name}, holds no block"
        return block if block is not FOLDED else self._folded[slot]

    def idle_block(self, slot: int) -> Block | None:
        """Return the block in an INACTIVE slot; None: the slot has another state."""
        return self.block(slot) if self._state[slot] is SlotState.INACTIVE else None

    def generation(self, slot: int) -> int:
        """Return how often the slot was staged."""
        return self._generation[slot]

    def generations(self) -> dict[SequenceHash, int]:
        """Return all blocks that can be found, with the generation of their slot."""
        return {name: self._generation[slot] for name, slot in self._slot.items()}

    def blocks(self) -> list[Block]:
        """Return all blocks that can be found."""
        return list(self.each_block())

    def unfolded_blocks(self) -> list[Block]:
        """Return the blocks that can be found and are not folded."""
        found = map(self._block.__getitem__, self._slot.values())
        return [block for block in found if block is not None and block is not FOLDED]

    def folded(self, names: Iterable[SequenceHash]) -> set[SequenceHash]:
        """Return which of these blocks are here, and folded."""
        if not self.folded_count:
            return set()
        slots = ((name, self._slot.get(name)) for name in names)
        return {name for name, slot in slots if slot is not None and self._block[slot] is FOLDED}

    @property
    def folded_count(self) -> int:
        """How many `restore`d slots are still to be unfolded."""
        return len(self._folded)

    def each_block(self) -> Iterator[Block]:
        """Yield all blocks that can be found, one by one; nothing may be moved meanwhile."""
        return (self.block(slot) for slot in self._slot.values())

    def latest(self, count: int) -> list[SequenceHash]:
        """Return the `count` blocks that were committed last, oldest first."""
        return list(islice(reversed(self._slot), count))[::-1]

    def pin_count(self, slot: int) -> int:
        """Return how often a slot is pinned."""
        return self._pins[slot]

    def __len__(self) -> int:
        """Return how many blocks can be found."""
        return len(self._slot)

    @property
    def reset_count(self) -> int:
        """The slots that could be staged now without an eviction."""
        return len(self._reset)

    def room(self) -> int:
        """Return how many slots could be staged now, evicting where needed."""
        return len(self._reset) + len(self.policy)

    def counts(self) -> dict[str, int]:
        """Count slots by state, and in `total` those that may be used."""
        active = len(self._slot) + len(self._discarded) - len(self.policy)
        return {
            "reset": len(self._reset),
            "staged": len(self._staged) + len(self._abandoned),
            "inactive": len(self.policy),
            "active": active,
            "retired": len(self._retired),
            "total": self.usable_count,
        }

    @property
    def usable_count(self) -> int:
        """The slots that are not RETIRED."""
        return self.slot_count - len(self._retired)

    @property
    def block_bytes(self) -> int:
        """Bytes of all committed blocks, discarded ones included."""
        return self._block_bytes

    def staged(self) -> set[int]:
        """Return the STAGED slots, abandoned ones included; for `check`."""
        return self._staged.keys() | self._abandoned

    def pins(self) -> dict[int, int]:
        """Return the ACTIVE slots and how often each is pinned; for `check`."""
        return {slot: count for slot, count in enumerate(self._pins) if count}

    # --- moves ------------------------------------------------------------------------------

    def make_room(self, count: int) -> list[Block]:
        """Evict until `count` slots are RESET or nothing can be evicted; returns the evicted."""
        short = count - len(self._reset)
        return [self.evict(victim) for victim in self.policy.victims(short)] if short > 0 else []

    def stage(self, block: SequenceHash) -> int | None:
        """Take a RESET slot for a block that is neither committed nor staged; None: no room."""
        return self.stage_all([block])[0] if self._reset else None

    def stage_all(self, blocks: Sequence[SequenceHash]) -> list[int]:
        """Take a RESET slot for each of these blocks; the caller has made room for all."""
        slots: list[int] = []
        for block in blocks:
            assert block not in self._slot
            assert block not in self._staging
            slot = self._reset.pop()
            self._move(slot, "stage")
            self._generation[slot] += 1
            self._staged[slot] = block
            self._staging[block] = slot
            slots.append(slot)
        return slots

    def register(self, slot: int, block: Block) -> None:
        """Commit: from now on the block can be found."""
        assert self._staged.get(slot) == block.hash, f"slot {slot} was not staged for this block"
        self._move(slot, "register")
        del self._staged[slot], self._staging[block.hash]
        self._block[slot] = block
        self._block_bytes += block.bytes
        self._slot[block.hash] = slot
        self.policy.admit(block.hash, block.parent)

    def register_all(self, entries: Sequence[tuple[int, Block]]) -> None:
        """Commit a batch, and free it leaf first: the root of a chain outlives its leaf."""
        for slot, block in entries:
            self.register(slot, block)
        hold, free = self.policy.hold, self.policy.free
        for _, block in entries:
            hold(block.hash)
        for _, block in reversed(entries):
            free(block.hash)

    def abort(self, slot: int) -> None:
        """Reset a staged slot, because its bytes did not arrive, or not intact."""
        self._move(slot, "abort")
        if slot in self._abandoned:
            self._abandoned.remove(slot)
        else:
            del self._staging[self._staged.pop(slot)]
        self._reset.append(slot)

    def abandon(self, slot: int) -> None:
        """Free the name of a staged slot, but keep it until `abort`: late bytes may reach it."""
        assert slot in self._staged, f"slot {slot} is {self._state[slot].name}, cannot be abandoned"
        del self._staging[self._staged.pop(slot)]
        self._abandoned.add(slot)

    def restore(self, blocks: Mapping[int, Block]) -> None:
        """Put committed blocks where a former life had them, from the oldest on.

        Only into an all-RESET table: each is staged and registered in one. They are *folded*: like
        all others, but that a `Block` is made of one when it is wanted, until it is unfolded.
        Columns are taken over: their `slot_of` becomes the table's own.
        """
        assert len(self._reset) == self.slot_count
        former = BlockColumns.of(blocks)
        assert len(former.slot_of) == len(former), "a block is in two slots"
        taken = np.zeros(self.slot_count, bool)
        taken[former.slots] = True
        self._reset = np.flatnonzero(~taken)[::-1].tolist()
        self._state = [SlotState.INACTIVE] * self.slot_count
        self._generation = [1] * self.slot_count
        self._block = [FOLDED] * self.slot_count
        for slot in self._reset:
            self._state[slot], self._generation[slot], self._block[slot] = SlotState.RESET, 0, None
        self._slot = former.slot_of
        self._block_bytes = former.total_bytes
        self._folded = FoldedBlocks(former)
        self.policy.fill(former)

    def unfold(self, count: int) -> list[Block]:
        """Unfold the next `count` restored blocks; returns those that can still be found."""
        found: list[Block] = []
        for slot, block in self._folded.take(count):
            if self._block[slot] is FOLDED:  # Else it has left, and perhaps another has come.
                self._block[slot] = block
                if slot not in self._discarded:
                    found.append(block)
        return found

    def pin(self, slot: int, *, used: bool = False) -> None:
        """Keep a committed block from eviction; counts. `used`: a request asked for it by name."""
        assert slot not in self._discarded, f"slot {slot} is discarded"
        if used:
            self.policy.touch(self.block(slot).hash)
        if self._pins[slot] == 0:
            self._move(slot, "pin")
            self.policy.hold(self.block(slot).hash)
        self._pins[slot] += 1

    def pin_prefix(self, names: Iterable[SequenceHash]) -> list[int]:
        """Pin the leading blocks of a chain that are here, each once; returns their slots."""
        slots: list[int] = []
        pins, hold, touch = self._pins, self.policy.hold, self.policy.touch
        for name in names:
            slot = self._slot.get(name)
            if slot is None:
                break
            touch(name)
            if pins[slot] == 0:
                self._move(slot, "pin")
                hold(name)
            pins[slot] += 1
            slots.append(slot)
        return slots

    def unpin(self, slots: Iterable[int]) -> None:
        """Take one pin off each slot. Give a chain in prefix order: its leaf is freed first."""
        pins = self._pins
        for slot in reversed(list(slots)):
            left = pins[slot] - 1
            assert left >= 0, f"slot {slot} is not pinned"
            pins[slot] = left
            if left == 0:
                self._free(slot)

    def evict(self, name: SequenceHash) -> Block:
        """Give up an INACTIVE block."""
        slot = self._slot.pop(name)
        block = self.block(slot)
        self._move(slot, "evict")
        self.policy.forget(name)
        self._empty(slot)
        self.evicted_count += 1
        return block

    def discard(self, name: SequenceHash) -> Block | None:
        """Make a committed block unfindable at once, pinned or not; None when it is not there."""
        slot = self._slot.get(name)
        if slot is None:
            return None
        if self._pins[slot] == 0:
            self.evicted_count -= 1  # `evict` counts; a discarded block was not evicted.
            return self.evict(name)
        del self._slot[name]
        self._discarded.add(slot)
        # The policy forgets it now: the same name may be committed again before the last unpin.
        self.policy.free(name)
        self.policy.forget(name)
        return self.block(slot)

    def retire(self, count: int) -> int:
        """Take up to `count` RESET slots out of use; returns how many there were."""
        return self._shift(count, self._reset, self._retired, "retire")

    def revive(self, count: int) -> int:
        """Put up to `count` RETIRED slots back into use; returns how many there were."""
        return self._shift(count, self._retired, self._reset, "revive")

    def use_policy(self, policy: EvictionPolicy) -> None:
        """Have another policy choose from now on. It learns the blocks in the old one's order.

        O(blocks). What the old one knew beyond the order (counts, chances to return) is lost.
        """
        assert len(policy) == 0
        free = self.policy.victims(len(self.policy))
        held = [name for name, slot in self._slot.items() if self._pins[slot]]
        for name in (*free, *held):  # Held blocks are in use: the last to go.
            policy.admit(name, self.block(self._slot[name]).parent)
        for name in held:
            policy.hold(name)
        self.policy = policy

    def _shift(self, count: int, source: list[int], target: list[int], verb: str) -> int:
        count = min(count, len(source))
        for _ in range(count):
            slot = source.pop()
            self._move(slot, verb)
            target.append(slot)
        return count

    def _free(self, slot: int) -> None:
        self._move(slot, "unpin")
        if slot not in self._discarded:
            self.policy.free(self.block(slot).hash)
            return
        self._discarded.remove(slot)
        self._move(slot, "evict")
        self._empty(slot)

    def _empty(self, slot: int) -> None:
        self._block_bytes -= self.block(slot).bytes
        self._block[slot] = None
        self._reset.append(slot)

    def _move(self, slot: int, verb: str) -> None:
        state = self._state[slot]
        target = _TRANSITIONS.get((state, verb))
        if target is None:
            raise InvalidTransition(SLOT.refusal(state, verb, f"slot {slot}"))
        self._state[slot] = target

    def check(self) -> None:
        """Assert every invariant; O(slots)."""
        by_state = Counter(self._state)
        assert len(self._reset) == len(set(self._reset)) == by_state[SlotState.RESET]
        assert len(self._retired) == len(set(self._retired)) == by_state[SlotState.RETIRED]
        assert len(self._staged) == len(self._staging)
        assert not self._staged.keys() & self._abandoned
        assert len(self.staged()) == by_state[SlotState.STAGED]
        assert all(self._staging[name] == slot for slot, name in self._staged.items())
        assert not self._staging.keys() & self._slot.keys()
        assert len(self.policy) == by_state[SlotState.INACTIVE]
        named = len(self._slot) + len(self._discarded)
        assert named == by_state[SlotState.INACTIVE] + by_state[SlotState.ACTIVE]
        for name, slot in self._slot.items():
            assert self.block(slot).hash == name
        for slot in self._discarded:
            assert self._state[slot] is SlotState.ACTIVE
            assert self._slot.get(self.block(slot).hash) != slot
        for slot, state in enumerate(self._state):
            assert (self._pins[slot] > 0) == (state is SlotState.ACTIVE)
            committed = state in (SlotState.INACTIVE, SlotState.ACTIVE)
            assert (self._block[slot] is not None) == committed
        held = [slot for slot, block in enumerate(self._block) if block is not None]
        assert self._block_bytes == sum(self.block(slot).bytes for slot in held)
        folded = {slot for slot in held if self._block[slot] is FOLDED}
        assert folded <= self._folded.slots()
        counts = self.counts()
        assert counts["total"] == self.slot_count - by_state[SlotState.RETIRED]
        assert all(counts[state.value] == by_state[state] for state in SlotState), counts
