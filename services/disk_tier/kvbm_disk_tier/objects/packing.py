"""Packing: how the bytes of a block lie in its object. Here: as they are."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from kvbm_common.checksum import block_checksum
from kvbm_common.slots import Block
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


class Packing(Protocol):
    """Both directions compare the block's checksum. `packed` is `extra_bytes` longer than it."""

    extra_bytes: int

    def pack(self, source: Bytes, packed: Bytes, block: Block) -> bool:
        """False: the source is not this block."""

    def unpack(self, packed: Bytes, block: Block) -> Bytes | None:
        """The block's bytes; None: this is not the block."""


class Plain:
    """An object is its block."""

    extra_bytes = 0

    def pack(self, source: Bytes, packed: Bytes, block: Block) -> bool:
        np.copyto(packed, source)
        return block_checksum(packed) == block.checksum

    def unpack(self, packed: Bytes, block: Block) -> Bytes | None:
        return packed if block_checksum(packed) == block.checksum else None
