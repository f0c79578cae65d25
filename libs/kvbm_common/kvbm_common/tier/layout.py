"""Layout: how the medium of a tier is cut, and where its slots may begin.

The medium is cut into slabs of one length, a whole number of slots of the size that came first, so
that a tier with blocks of one size wastes nothing. The last slab may be shorter.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt

UNIT_BYTES = 4096
"""Slots begin and end on these: O_DIRECT reads and writes between arena and files need it."""
MIB = 1 << 20
SLAB_BYTES_MAX = 64 * MIB
"""A slab that changes its class loses all its blocks in one step: 1,024 of 64 KiB take 5 ms."""
SLAB_BYTES_LEAST = 16 * MIB
"""Blocks of large models have as much, and a block has to fit into a slab."""
SLABS_LEAST = 8
"""A slab of a small medium is no more than such a part of it."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The length of a medium's first slots, how many of them it has, and how many make a slab.

    `extra_bytes`: what a slot is longer than its block in whole units, in a sealed store.
    """

    slot_bytes: int
    slot_count: int
    slab_slots: int
    extra_bytes: int = 0
    unit_bytes: int = UNIT_BYTES

    def __post_init__(self) -> None:
        """Assert that slots begin on units, and that there are slabs for all of them."""
        assert self.slot_count >= 0, self
        assert self.slab_slots > 0, self
        assert self.slot_bytes > self.extra_bytes >= 0, self
        assert self.slot_bytes % self.unit_bytes == 0, self

    @classmethod
    def of(cls, slot_bytes: int, slot_count: int, *, extra_bytes: int = 0) -> Layout:
        """Return the layout of a medium for so many slots of its first size."""
        slab_slots = slab_slots_of(slot_bytes, slot_count * slot_bytes)
        return cls(slot_bytes, slot_count, slab_slots, extra_bytes)

    @classmethod
    def unsized(cls, slot_count: int) -> Layout:
        """Return the layout of slots that each take a block of any size, and count as a byte."""
        return cls(1, slot_count, max(1, slot_count), unit_bytes=1)

    @property
    def is_sized(self) -> bool:
        """Tell whether slots are places with a length in bytes, not mere counts."""
        return self.unit_bytes == UNIT_BYTES

    @property
    def total_bytes(self) -> int:
        """Bytes of all slabs."""
        return self.slot_count * self.slot_bytes

    @property
    def slab_bytes(self) -> int:
        """Bytes of every slab but the last."""
        return min(self.slab_slots, self.slot_count) * self.slot_bytes

    @property
    def slab_units(self) -> int:
        """Units of every slab but the last."""
        return self.slab_slots * self.slot_bytes // self.unit_bytes

    def slot_bytes_of(self, block_bytes: int) -> int:
        """Return the length of the slot that a block of this size takes."""
        if not self.is_sized:
            return 1
        assert block_bytes > 0, f"a block of {block_bytes} bytes"
        return rounded_up(block_bytes) + self.extra_bytes


def rounded_up(block_bytes: int) -> int:
    """Return the bytes that a block takes in an arena: whole units."""
    return -(-block_bytes // UNIT_BYTES) * UNIT_BYTES


def slab_slots_of(slot_bytes: int, medium_bytes: int) -> int:
    """Return how many slots of the first size make a slab of a medium.

    At the end of a slab, blocks of b bytes leave b / 2 on average, and each class half a slab
    unused: what is lost is least where a slab grows with the root of the medium.
    """
    assert slot_bytes > 0, f"slots of {slot_bytes} bytes"
    root = max(isqrt(medium_bytes * MIB), SLAB_BYTES_LEAST)
    wanted = min(root, SLAB_BYTES_MAX, medium_bytes // SLABS_LEAST)
    return max(1, wanted // slot_bytes)
