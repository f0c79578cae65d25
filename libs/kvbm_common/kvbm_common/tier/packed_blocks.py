"""Packed blocks: what a tier keeps of each of many blocks, in columns by slot.

A `Block` of its own takes 64 bytes, its checksum 48 more, and a parent and a length that nothing
shares another 64 and 32. Packed, all of it takes 32 bytes, and the name, which the tables have in
any case. A `Block` is made of them when one is asked for, in 0.3 µs.

    slot       0    1    2    3
    kind       K    K         L     namespace, length and parts: one object for all that are alike
    name       a    b         d
    parent     r    a         c     the very object of a name, if that block is here
    checksum  17    4    0    9
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence, Set
from operator import attrgetter
from typing import cast

import msgspec

from kvbm_common.identity import SequenceHash
from kvbm_common.tier.blocks import Block

KINDS_MAX = 256
"""Kinds that are known again. Beyond them a kind has several objects, which are never compared."""
_namespace_of, _bytes_of, _parts_of = map(attrgetter, ("namespace", "bytes", "parts"))


class Kind(msgspec.Struct, frozen=True, gc=False, eq=False):
    """Fields that many blocks have in common, by the names that a `Block` gives them."""

    namespace: bytes
    bytes: int
    parts: int


FOLDED = Kind(b"", 0, 0)
"""Stands for a block of a former life that is in `block_columns` only."""


class PackedBlocks:
    """Columns by slot. The slot table has the one of kinds, which says what is packed."""

    def __init__(self, kinds: list[Block | Kind | None]) -> None:
        """Start without slots; `kinds` grows with the table."""
        self._kind_of = kinds
        self.names: list[SequenceHash | None] = []
        """Slot → the name of its block; `restore` notes those of folded blocks, too."""
        self._parents: list[SequenceHash | None] = []
        self._checksums = array("Q")
        self._kinds: dict[tuple[bytes, int, int | bytes], Kind] = {}

    def grow(self, count: int) -> None:
        """Have so many slots more."""
        self.names += [None] * count
        self._parents += [None] * count
        self._checksums.frombytes(bytes(8 * count))
        lengths = {len(self.names), len(self._parents), len(self._checksums)}
        assert len(lengths) == 1, f"columns of {lengths} slots, after {count} more"

    def pack(
        self, entries: Iterable[tuple[int, Block]], slot_of: Callable[[bytes], int | None]
    ) -> None:
        """Keep blocks in their slots; `slot_of` finds the slot of a name."""
        names, parents, checksums = self.names, self._parents, self._checksums
        kind_of, kind, last = self._kind_of, FOLDED, None
        size, parts, namespace = -1, 0, b""
        for slot, block in entries:
            name, parent = block.hash, block.parent
            if parent == last:  # Nearly always: chains come in one piece.
                parent = last
            elif (at := slot_of(parent)) is not None:
                parent = names[at] or parent
            names[slot] = last = name
            parents[slot] = parent
            checksums[slot] = block.checksum
            if block.bytes != size or block.parts != parts or block.namespace != namespace:
                kind = self._find_kind(block)
                size, parts, namespace = kind.bytes, kind.parts, kind.namespace
            kind_of[slot] = kind

    def _find_kind(self, block: Block) -> Kind:
        """Return the kind of a block, the same object as for others of late."""
        fields = block.namespace, block.bytes, block.parts
        kind = self._kinds.get(fields)
        if kind is None:
            assert isinstance(block.parts, int), f"{block} is packed with the sums of its parts"
            if len(self._kinds) >= KINDS_MAX:
                self._kinds.clear()
            kind = self._kinds[fields] = Kind(block.namespace, block.bytes, block.parts)
        return kind

    def restore(self, slots: Iterable[int], names: Iterable[SequenceHash]) -> None:
        """Note the names of blocks that are folded in these slots."""
        ours = self.names
        for slot, name in zip(slots, names, strict=True):
            ours[slot] = name

    def name(self, slot: int) -> SequenceHash:
        """Return the name of the block in a slot."""
        name = self.names[slot]
        assert name is not None, f"slot {slot} holds no block"
        return name

    def parent(self, slot: int) -> SequenceHash:
        """Return the parent of the block that is packed in a slot."""
        parent = self._parents[slot]
        assert parent is not None, f"no block is packed in slot {slot}"
        return parent

    def block(self, slot: int, kind: Kind) -> Block:
        """Return the block that is packed in a slot as one of this kind."""
        name, parent, checksum = self.names[slot], self._parents[slot], self._checksums[slot]
        assert name is not None, f"slot {slot} holds no block"
        assert parent is not None, f"no block is packed in slot {slot}"
        return Block(name, parent, kind.namespace, checksum, kind.bytes, kind.parts)

    def blocks(self, slots: Sequence[int], kinds: Sequence[Kind]) -> list[Block]:
        """Return the blocks that are packed in these slots as ones of these kinds."""
        names, parents = self.names, self._parents
        found = [*map(names.__getitem__, slots)]
        assert all(found), f"of {len(slots)} slots some hold no block"
        return [
            *map(
                Block,
                cast("list[SequenceHash]", found),
                cast("list[SequenceHash]", [*map(parents.__getitem__, slots)]),
                map(_namespace_of, kinds),
                map(self._checksums.__getitem__, slots),
                map(_bytes_of, kinds),
                map(_parts_of, kinds),
            )
        ]

    def drop(self, slot: int) -> None:
        """Forget the block in a slot, which leaves."""
        assert self.names[slot] is not None, f"slot {slot} holds no block"
        self.names[slot] = self._parents[slot] = None

    @property
    def kind_count(self) -> int:
        """The number of kinds that are known again."""
        return len(self._kinds)

    def check(self, held: Set[int]) -> None:
        """Assert that slots without a block are empty; `held`: the others."""
        for slot, (name, parent) in enumerate(zip(self.names, self._parents, strict=True)):
            assert (name is not None) == (slot in held), f"slot {slot} has the name {name!r}"
            assert parent is None or slot in held, f"slot {slot} has the parent {parent!r}"
        assert self.kind_count <= KINDS_MAX, f"{self.kind_count} kinds are known"
