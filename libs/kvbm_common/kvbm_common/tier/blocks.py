"""Blocks: what a tier knows of one, and, as columns, of the many that a former life has left.

An object per block costs a second per million, so columns make blocks only when they are asked for.
"""

from __future__ import annotations

import builtins
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvbm_common.checksum import combined_checksum, part_checksums
from kvbm_common.identity import SequenceHash

CHECKSUM_MAX = 2**64 - 1


class Block(msgspec.Struct, frozen=True, gc=False):
    """What a tier knows of a committed block.

    `checksum` is the `combined_checksum` of its parts; `namespace` is a 32-byte digest.
    """

    hash: SequenceHash
    parent: SequenceHash
    namespace: bytes
    checksum: int
    bytes: int
    parts: int | tuple[int, ...] = 1
    """Of several parts their checksums or, where only the bytes could tell these, their number.
    One field for both: a tier has a million blocks, and most have one part."""

    @classmethod
    def of_sums(
        cls,
        name: SequenceHash,
        parent: SequenceHash,
        namespace: builtins.bytes,
        size: int,
        sums: tuple[int, ...],
    ) -> Block:
        """Return a block of `size` bytes whose parts have these checksums."""
        assert sums, "a block has at least one part"
        if len(sums) == 1:
            return cls(name, parent, namespace, sums[0], size)
        return cls(name, parent, namespace, combined_checksum(sums), size, sums)

    @property
    def part_count(self) -> int:
        """How many parts of equal size the block has, one per rank of its engine."""
        return self.parts if isinstance(self.parts, int) else len(self.parts)

    @property
    def part_checksums(self) -> tuple[int, ...]:
        """The checksum of each part; empty where only the number of the parts is known."""
        if isinstance(self.parts, int):
            return (self.checksum,) if self.parts == 1 else ()
        return self.parts

    def has_sums(self, sums: Sequence[int]) -> bool:
        """Return whether bytes whose parts have these checksums are the bytes of this block."""
        if len(sums) != self.part_count or not all(0 <= one <= CHECKSUM_MAX for one in sums):
            return False
        return combined_checksum(sums) == self.checksum

    def sums_in(self, data: memoryview | NDArray[np.uint8]) -> tuple[int, ...] | None:
        """Return the checksums of the parts in `data`, or None if these are not the block's bytes.

        `data` begins with the block and may be longer.
        """
        sums = part_checksums(data[: self.bytes], self.part_count)
        return sums if self.has_sums(sums) else None

    def with_sums(self, sums: tuple[int, ...]) -> Block:
        """Return the block with the checksums of its parts, which `sums` are."""
        assert self.has_sums(sums), "these are the checksums of other bytes"
        return self if len(sums) == 1 else msgspec.structs.replace(self, parts=sums)


PART_COUNT_MAX = 65_535
"""A journal's record has two bytes for the number of a block's parts."""


def is_divisible(size: int, part_count: int) -> bool:
    """Return whether a block of `size` bytes can have so many parts of equal size."""
    return 1 <= part_count <= PART_COUNT_MAX and size % part_count == 0


COLUMNS = {
    "slot": "<u4", "bytes": "<u4", "hash": "V16", "parent": "V16", "namespace": "V32",
    "checksum": "<u8", "parts": "<u2",
}  # fmt: skip
"""The fields that records need, whatever else they have, and their types."""


class BlockColumns(Mapping[int, Block]):
    """Committed blocks by slot, oldest first, in columns of a numpy array of records."""

    def __init__(self, records: NDArray[np.void], rows: NDArray[np.intp]) -> None:
        """Take the blocks `records[rows]`, in that order; `records` has the fields of COLUMNS."""
        self._records, self._rows = records, rows
        self.slots: NDArray[np.intp] = records["slot"][rows].astype(np.intp)
        self.parents: NDArray[np.void] = records["parent"][rows]
        self.hashes: NDArray[np.void] = records["hash"][rows]
        self.names: list[SequenceHash] = self.hashes.tolist()
        self.slot_of: dict[SequenceHash, int] = dict(
            zip(self.names, self.slots.tolist(), strict=True)
        )
        """Shorter than `names` when a block is in two slots."""
        self.continues = np.zeros(len(rows), bool)
        """Whether a row is the child of the row before."""
        if len(rows):
            same = _words(self.parents)[1:] == _words(self.hashes)[:-1]
            self.continues[1:] = same.all(axis=1)
        self.row_of_slot = np.full(int(self.slots.max(initial=-1)) + 1, -1)
        self.row_of_slot[self.slots] = np.arange(len(rows))
        """Where in the columns the block of a slot is, or -1."""
        self._namespaces: dict[bytes, bytes] = {}

    @classmethod
    def of(cls, blocks: Mapping[int, Block]) -> BlockColumns:
        """Return the columns of these blocks, in their order."""
        if isinstance(blocks, BlockColumns):
            return blocks
        records = np.zeros(len(blocks), np.dtype(list(COLUMNS.items())))
        for row, (slot, block) in enumerate(blocks.items()):
            records[row] = (
                slot, block.bytes, block.hash, block.parent, block.namespace, block.checksum,
                block.part_count,
            )  # fmt: skip
        return cls(records, np.arange(len(blocks)))

    def without_older(self) -> BlockColumns:
        """Return every block in one slot only: of two, the newer one has it."""
        if len(self.slot_of) == len(self.names):
            return self
        newest = np.array([self.slot_of[name] for name in self.names]) == self.slots
        return BlockColumns(self._records, self._rows[newest])

    def __repr__(self) -> str:
        return f"BlockColumns({len(self)} blocks, {self.total_bytes} bytes)"

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[int]:
        return iter(self.slots.tolist())

    def __contains__(self, slot: object) -> bool:
        if not isinstance(slot, int) or not 0 <= slot < len(self.row_of_slot):
            return False
        return bool(self.row_of_slot[slot] >= 0)

    def __getitem__(self, slot: int) -> Block:
        if slot not in self:
            raise KeyError(slot)
        row = int(self.row_of_slot[slot])
        return self.blocks(row, row + 1)[0]

    @property
    def total_bytes(self) -> int:
        """Bytes of all blocks."""
        return int(self._records["bytes"][self._rows].sum(dtype=np.int64))

    def blocks(self, start: int, stop: int) -> list[Block]:
        """Return the blocks of the rows from `start` to `stop`."""
        part = self._records[self._rows[start:stop]]
        names = self.names[start:stop]
        return list(
            map(
                Block,
                names,
                self._parents(start, names, part),
                self._interned(part["namespace"].tolist()),
                part["checksum"].tolist(),
                part["bytes"].tolist(),
                part["parts"].tolist(),
            )
        )

    def _parents(
        self, start: int, names: list[SequenceHash], part: NDArray[np.void]
    ) -> list[SequenceHash]:
        """Return the parents. Most equal the name before: no new object is made of those."""
        parents = names[-1:] + names[:-1]
        continues = self.continues[start : start + len(names)].copy()
        continues[:1] = False
        for index in np.flatnonzero(~continues).tolist():
            parents[index] = part["parent"][index].item()
        return parents

    def _interned(self, namespaces: list[Any]) -> list[bytes]:
        """Return one object for all that are equal; few differ."""
        known = self._namespaces.setdefault
        return [known(namespace, namespace) for namespace in namespaces]

    def leaves_first(self) -> list[SequenceHash]:
        """Return the names, but every run of children behind their parents is turned round."""
        turned: list[SequenceHash] = []
        starts, lengths = self.runs()
        for start, end in zip(starts.tolist(), (starts + lengths).tolist(), strict=True):
            turned += self.names[start:end][::-1]
        return turned

    def leaves_first_of(self, rows: NDArray[np.intp]) -> list[SequenceHash]:
        """Return names like `leaves_first`, of some rows only, which are in ascending order."""
        starts, lengths = self.runs()
        run = np.searchsorted(starts, rows, side="right") - 1
        turned = rows[np.argsort(2 * starts[run] + lengths[run] - rows)]
        return [self.names[row] for row in turned.tolist()]

    def runs(self) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Return where each run of children behind their parents begins, and how long it is."""
        starts = np.flatnonzero(~self.continues)
        return starts, np.diff(starts, append=len(self))


def _words(names: NDArray[np.void]) -> NDArray[np.uint64]:
    """Return names as pairs of numbers, which are compared much faster."""
    return np.ascontiguousarray(names).view(np.uint64).reshape(-1, 2)
