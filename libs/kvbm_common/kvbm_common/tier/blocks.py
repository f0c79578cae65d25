"""Blocks: what a tier knows of one. Of many that a former life has left, see `block_columns`."""

from __future__ import annotations

import builtins

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvbm_common.checksum import SUM_BYTES, combined_checksum, part_checksums
from kvbm_common.identity import SequenceHash
from kvbm_common.tier.parts import Grid, grid_of

CHECKSUM_MAX = 2**64 - 1
CODE_BYTES = 2
"""Bytes of the code of a grid, before the checksums of the parts."""


class Block(msgspec.Struct, frozen=True, gc=False):
    """A committed block, as a tier knows it.

    `checksum` is the `combined_checksum` of its parts; `namespace` is a 32-byte digest.
    """

    hash: SequenceHash
    parent: SequenceHash
    namespace: bytes
    checksum: int
    bytes: int
    parts: int | builtins.bytes = 1
    """The code of the grid that cuts it (`tier/parts.py`), which is all that lower tiers keep: they
    sum up what they read. Where the checksums of several parts are known, they follow the code, of
    two bytes then. One field for both: a tier has a million blocks."""

    @classmethod
    def of_sums(
        cls,
        name: SequenceHash,
        parent: SequenceHash,
        namespace: builtins.bytes,
        size: int,
        grid: Grid,
        sums: builtins.bytes,
    ) -> Block:
        """Return a block of `size` bytes whose parts have these packed checksums."""
        if len(sums) == SUM_BYTES:  # The checksum of an only part is the block's.
            assert grid.ranges == grid.heads == 1, f"one checksum for {grid}"
            return cls(name, parent, namespace, int.from_bytes(sums, "little"), size)
        assert len(sums) == SUM_BYTES * grid.count, f"{len(sums)} bytes of checksums for {grid}"
        packed = _with_code(grid.code, sums)
        return cls(name, parent, namespace, combined_checksum(sums), size, packed)

    @property
    def code(self) -> int:
        """The code of the grid that cuts it."""
        if isinstance(self.parts, int):
            return self.parts
        return int.from_bytes(self.parts[:CODE_BYTES], "little")

    @property
    def grid(self) -> Grid:
        """The grid that cuts it."""
        grid = grid_of(self.code)
        assert grid is not None, f"a block of parts {self.code}"
        return grid

    @property
    def part_count(self) -> int:
        """The number of parts that the block has."""
        return self.grid.count

    @property
    def part_sums(self) -> builtins.bytes:
        """The packed checksums of its parts; empty where only the combined one is known."""
        if isinstance(self.parts, int):
            return self.checksum.to_bytes(SUM_BYTES, "little") if self.parts == 1 else b""
        return self.parts[CODE_BYTES:]

    def has_sums(self, sums: builtins.bytes) -> bool:
        """Return whether bytes whose parts have these checksums are the bytes of this block."""
        if len(sums) != SUM_BYTES * self.part_count:
            return False
        return combined_checksum(sums) == self.checksum

    def sums_in(self, data: memoryview | NDArray[np.uint8]) -> builtins.bytes | None:
        """Return the checksums of the parts in `data`, or None if these are not the block's bytes.

        `data` begins with the block and may be longer.
        """
        sums = part_checksums(data[: self.bytes], self.grid)
        return sums if self.has_sums(sums) else None

    def with_sums(self, sums: builtins.bytes) -> Block:
        """Return the block with the checksums of its parts, which `sums` are."""
        assert self.has_sums(sums), "these are the checksums of other bytes"
        if len(sums) == SUM_BYTES:
            return self
        return msgspec.structs.replace(self, parts=_with_code(self.code, sums))


def _with_code(code: int, sums: bytes) -> bytes:
    """Return what a block keeps of several parts: the code of its grid, and their checksums."""
    assert len(sums) > SUM_BYTES, f"parts {code} with {len(sums)} bytes of checksums"
    return code.to_bytes(CODE_BYTES, "little") + sums


BATCH_UNIT_BYTES = 1024 * 1024
BATCH_BLOCKS_MOST = 256


def batch_blocks(blocks_max: int, bytes_max: int, slot_bytes: int) -> int:
    """Return how many blocks move together: `blocks_max`, and of small ones `bytes_max` worth.

    Question, lease, record and synchronisation cost the same for any batch: with 16 blocks of
    256 KiB in each the disk waited for us, and pulls of 16 blocks of 64 KiB took twice as long.
    """
    assert blocks_max > 0, f"a batch of {blocks_max} blocks"
    assert bytes_max >= 0, f"a batch of {bytes_max} bytes"
    return max(blocks_max, min(bytes_max // max(1, slot_bytes), BATCH_BLOCKS_MOST))
