"""Packing: how the bytes of a block lie in its object. Here: as they are."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from kvbm_common.tier.slots import Block
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Unpacked = tuple[Bytes, bytes]


class Packing(Protocol):
    """A way to pack blocks. Both directions compare the block's checksum, and `packed` is
    `extra_bytes` longer than the block."""

    extra_bytes: int

    def pack(self, source: Bytes, packed: Bytes, block: Block) -> bool:
        """Copy a block into its object; False: the source is not this block."""

    def unpack(self, packed: Bytes, block: Block) -> Unpacked | None:
        """Return the block's bytes and its parts' checksums; None: this is not the block."""


class Plain:
    """The packing of objects that are their blocks, byte for byte."""

    extra_bytes = 0

    def pack(self, source: Bytes, packed: Bytes, block: Block) -> bool:
        assert len(source) == len(packed), f"{len(source)} bytes into {len(packed)}"
        np.copyto(packed, source)
        return block.sums_in(packed) is not None

    def unpack(self, packed: Bytes, block: Block) -> Unpacked | None:
        assert len(packed) == block.bytes, f"{len(packed)} bytes for {block}"
        sums = block.sums_in(packed)
        return None if sums is None else (packed, sums)
