"""Slot blocks: the committed block of each slot, and the slot of each block.

They are the lowest layer of a `SlotTable`: see `slots.py`. In a table that packs them, blocks are
columns, and a `Block` is made when one is asked for. A block of a former life is folded at first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter, is_
from typing import cast

from kvbm_common.identity import SequenceHash
from kvbm_common.tier.block_columns import BlockColumns, FoldedBlocks
from kvbm_common.tier.block_lookup import BlockLookup
from kvbm_common.tier.blocks import Block
from kvbm_common.tier.packed_blocks import FOLDED, Kind, PackedBlocks

STRETCH_BITS = 10
"""A stretch has 1,024 slots: a tier knows how many blocks are in each."""
STRETCHES_MAX = 32
"""Stretches of one part of a listing: it is bounded though blocks come before it is made."""
_name_of = attrgetter("hash")


class SlotBlocks:
    """The block of each slot, by number; which block comes or leaves is decided above them."""

    def __init__(self, *, packs: bool = False) -> None:
        """Start without slots. `packs`: blocks take less memory, and time to return one."""
        self._block: list[Block | Kind | None] = []
        """Slot → its block, or the kind of one that is packed; FOLDED: it is in columns only."""
        self._packed = PackedBlocks(self._block) if packs else None
        self._slot: BlockLookup[int] = BlockLookup(0)
        """The slot of each block that can be found."""
        self._findable_count = 0
        self._held_in: list[int] = []
        """Stretch → the number of its slots that have a block."""
        self._discarded: set[int] = set()
        """Pinned slots whose block cannot be found any more."""
        self._block_bytes = 0
        self._folded = FoldedBlocks(BlockColumns.of({}))
        self.folded_count = 0
        """The number of `restore`d slots that are still to be unfolded; read at each lookup."""

    @property
    def packs(self) -> bool:
        """Tell whether blocks are packed: see `packed_blocks`."""
        return self._packed is not None

    def _grow(self, count: int) -> None:
        """Have so many slots more."""
        self._block += [None] * count
        if self._packed is not None:
            self._packed.grow(count)
        stretches = (len(self._block) - 1 >> STRETCH_BITS) + 1
        self._held_in += [0] * (stretches - len(self._held_in))
        assert len(self._held_in) == stretches, f"{len(self._held_in)} of {stretches} stretches"

    # --- one block, or some -----------------------------------------------------------------

    def block(self, slot: int) -> Block:
        """Return the committed block in a slot."""
        one = self._block[slot]
        return one if type(one) is Block else self._made(slot, one)

    def _made(self, slot: int, kind: Block | Kind | None) -> Block:
        """Make the block in a slot that has no object of its own."""
        assert isinstance(kind, Kind), f"slot {slot} holds no block"
        if kind is FOLDED:
            return self._folded[slot]
        assert self._packed is not None, f"slot {slot} of a table that packs no blocks"
        return self._packed.block(slot, kind)

    def blocks_in(self, slots: Sequence[int]) -> list[Block]:
        """Return the committed blocks in these slots, in their order."""
        if self.folded_count:
            return [self.block(slot) for slot in slots]
        return self._blocks_of(slots)

    def _blocks_of(self, slots: Sequence[int]) -> list[Block]:
        """Return the blocks in these slots; none is folded."""
        found = [*map(self._block.__getitem__, slots)]
        assert all(found), f"of {len(slots)} slots some hold no block"
        if self._packed is None:
            return cast("list[Block]", found)
        return self._packed.blocks(slots, cast("list[Kind]", found))

    def _names_in(self, slots: Sequence[int]) -> Sequence[SequenceHash]:
        """Return the names of the committed blocks in these slots."""
        if self._packed is None:
            return [*map(_name_of, self.blocks_in(slots))]
        names = [*map(self._packed.names.__getitem__, slots)]
        assert all(names), f"of {len(slots)} slots some hold no block"
        return cast("list[SequenceHash]", names)

    def _name_in(self, slot: int) -> SequenceHash:
        """Return the name of the committed block in a slot."""
        return self.block(slot).hash if self._packed is None else self._packed.name(slot)

    def _parent_in(self, slot: int) -> SequenceHash:
        """Return the parent of the committed block in a slot."""
        if self._packed is None or self._block[slot] is FOLDED:
            return self.block(slot).parent
        return self._packed.parent(slot)

    def bytes_in(self, slot: int) -> int:
        """Return how many bytes the committed block in a slot has; a packed one stays packed."""
        one = self._block[slot]
        assert one is not None, f"slot {slot} holds no block"
        return one.bytes if one is not FOLDED else self._folded[slot].bytes

    def has_still(self, slots: Sequence[int], blocks: Sequence[Block]) -> bool:
        """Tell whether these slots have these very blocks, and lookups find all of them."""
        assert self._packed is None, "packed blocks have no objects to compare"
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

    def found_in(self, slots: range) -> list[tuple[int, Block]]:
        """Return the blocks of some slots that can be found, each with its slot; none is folded."""
        assert not self.folded_in(slots), f"a block in {slots} is folded"
        held = self._held(slots)
        return [*zip(held, self.blocks_in(held), strict=True)]

    def _held(self, slots: range) -> list[int]:
        """Return those of some slots whose block can be found, and is not folded."""
        gone = self._discarded
        some = zip(slots, self._block[slots.start : slots.stop], strict=False)
        return [slot for slot, one in some if not (one is None or one is FOLDED or slot in gone)]

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
            if self._packed is not None:
                found += self._blocks_of(self._held(some))
                continue
            blocks = self._block[some.start : some.stop]
            if gone := self._discarded.intersection(some):
                blocks = [one for slot, one in zip(some, blocks, strict=False) if slot not in gone]
            found += [one for one in blocks if type(one) is Block]
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

    def _unfolded(self) -> list[tuple[int, Block]]:
        """Return each slot whose block can be found, with its block: columns are read once."""
        folded = self._folded.by_slot() if self.folded_count else {}
        gone = self._discarded
        found = [
            (slot, folded[slot] if one is FOLDED else self.block(slot))
            for slot, one in enumerate(self._block)
            if one is not None and slot not in gone
        ]
        assert len(found) == len(self), f"{len(found)} of {len(self)} blocks are in slots"
        return found

    def __len__(self) -> int:
        """Return how many blocks can be found."""
        return self._findable_count

    @property
    def block_bytes(self) -> int:
        """Bytes of all committed blocks, discarded ones included."""
        return self._block_bytes

    def discarded(self) -> frozenset[int]:
        """Return the slots of blocks that have left, and that are pinned still; for `check`."""
        return frozenset(self._discarded)
