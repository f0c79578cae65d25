"""Block columns: what a tier knows of the many blocks that a former life has left.

An object per block costs a second per million, so columns make blocks only when they are asked for:
committed blocks of a former life stay folded into them until each is made a `Block`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from itertools import compress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvbm_common.identity import SequenceHash
from kvbm_common.tier.blocks import Block

COLUMNS = {
    "slot": "<u8", "bytes": "<u4", "hash": "V16", "parent": "V16", "namespace": "V32",
    "checksum": "<u8", "parts": "<u2",
}  # fmt: skip
"""The fields that records need, whatever else they have, and their types."""
KEPT = ("parent", "checksum", "bytes", "parts")
"""The fields that columns keep as they are."""
ALL = slice(None)
"""Every row."""

Piece = tuple["NDArray[np.intp] | slice", "NDArray[np.void]"]
"""Rows, and their records, which have the fields of COLUMNS."""


class BlockColumns(Mapping[int, Block]):
    """Committed blocks by slot, oldest first, in columns: 50 bytes a block, and its name."""

    def __init__(self, slots: NDArray[np.intp], pieces: Iterable[Piece]) -> None:
        """Take a block into each of these slots; together the pieces have each row once."""
        count = len(slots)
        self.slots = slots
        self._kept: dict[str, NDArray[Any]] = {
            field: np.zeros(count, COLUMNS[field]) for field in KEPT
        }
        self._space = np.zeros(count, np.uint32)
        """Row → the number of its namespace."""
        self._spaces: dict[bytes, int] = {}
        hashes, missing = np.zeros(count, COLUMNS["hash"]), count
        for rows, records in pieces:
            hashes[rows] = records["hash"]
            for field, column in self._kept.items():
                column[rows] = records[field]
            self._space[rows] = self._numbers_of(records["namespace"])
            missing -= len(records)
        assert missing == 0, f"{missing} of {count} rows have no record"
        self.names: list[SequenceHash] = hashes.tolist()
        self.continues = _follows(hashes, self.parents)
        """Row → True if it is the child of the row before."""
        self._known: dict[int, int] = {}
        """One object for all lengths, or numbers of parts, that are equal."""

    def _numbers_of(self, spaces: NDArray[np.void]) -> NDArray[np.intp] | int:
        """Return the numbers of some namespaces, or the one that all of them have."""
        if not len(spaces):
            return 0
        known = self._spaces
        words = np.ascontiguousarray(spaces).view(np.uint64).reshape(-1, 4)
        if (words == words[0]).all():  # As a rule; a million rows are compared in some 10 ms.
            return known.setdefault(words[0].tobytes(), len(known))
        kinds, kind_of = np.unique(words, axis=0, return_inverse=True)
        numbers = [known.setdefault(kind.tobytes(), len(known)) for kind in kinds]
        return np.array(numbers)[kind_of.ravel()]

    @property
    def parents(self) -> NDArray[np.void]:
        """The parent of each block."""
        return self._kept["parent"]

    @property
    def hashes(self) -> NDArray[np.void]:
        """The names as a column, made for each call."""
        return np.frombuffer(b"".join(self.names), COLUMNS["hash"])

    @cached_property
    def slot_of(self) -> dict[SequenceHash, int]:
        """The slot of each block; shorter than `names` when a block is in two slots."""
        return dict(zip(self.names, self.slots.tolist(), strict=True))

    @cached_property
    def row_of_slot(self) -> NDArray[np.intp]:
        """Slot → the row of its block in the columns, or -1."""
        assert self.slots.min(initial=0) >= 0, f"a block is in slot {self.slots.min()}"
        found = np.full(int(self.slots.max(initial=-1)) + 1, -1)
        found[self.slots] = np.arange(len(self))
        return found

    @property
    def block_bytes(self) -> NDArray[np.intp]:
        """Bytes of each block."""
        return self._kept["bytes"].astype(np.intp)

    @classmethod
    def of(cls, blocks: Mapping[int, Block]) -> BlockColumns:
        """Return the columns of these blocks, in their order."""
        if isinstance(blocks, BlockColumns):
            return blocks
        records = np.zeros(len(blocks), np.dtype(list(COLUMNS.items())))
        for row, (slot, block) in enumerate(blocks.items()):
            records[row] = (
                slot, block.bytes, block.hash, block.parent, block.namespace, block.checksum,
                block.code,
            )  # fmt: skip
        return cls(records["slot"].astype(np.intp), [(ALL, records)])

    def without_older(self) -> BlockColumns:
        """Return every block in one slot only: of two, the newer one has it."""
        if len(set(self.names)) == len(self.names):
            return self
        newest = np.array([self.slot_of[name] for name in self.names]) == self.slots
        found = self.only(newest)
        assert found.slot_of == self.slot_of, f"{len(self.slot_of)} blocks became {len(found)}"
        return found

    def by_namespace(self) -> dict[bytes, NDArray[np.bool_]]:
        """Return which rows are of each namespace."""
        found = {space: self._space == number for space, number in self._spaces.items()}
        return {space: rows for space, rows in found.items() if rows.any()}

    def only(self, chosen: NDArray[np.bool_]) -> BlockColumns:
        """Return some of the blocks."""
        assert len(chosen) == len(self), f"of {len(self)} blocks {len(chosen)} are judged"
        found = self.moved(self.slots)
        found.slots, found._space = self.slots[chosen], self._space[chosen]
        found._kept = {field: column[chosen] for field, column in self._kept.items()}
        found.names = [*compress(self.names, chosen.tolist())]
        found.continues = _follows(found.hashes, found.parents)
        return found

    def moved(self, slots: NDArray[np.intp]) -> BlockColumns:
        """Return the same blocks in other slots."""
        assert len(slots) == len(self), f"{len(self)} blocks move to {len(slots)} slots"
        found, derived = BlockColumns.__new__(BlockColumns), ("slot_of", "row_of_slot")
        vars(found).update((key, value) for key, value in vars(self).items() if key not in derived)
        found.slots = slots
        return found

    def __repr__(self) -> str:
        return f"BlockColumns({len(self)} blocks, {self.total_bytes} bytes)"

    def __len__(self) -> int:
        return len(self.slots)

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
        return int(self._kept["bytes"].sum(dtype=np.int64))

    def blocks(self, start: int, stop: int) -> list[Block]:
        """Return the blocks of the rows from `start` to `stop`."""
        assert 0 <= start <= stop, f"rows {start} to {stop}"
        names = self.names[start:stop]
        kept = {field: column[start:stop] for field, column in self._kept.items()}
        spaces = [*self._spaces]
        return list(
            map(
                Block,
                names,
                self._parents(start, names, kept["parent"]),
                [spaces[number] for number in self._space[start:stop].tolist()],
                kept["checksum"].tolist(),
                self._interned(kept["bytes"].tolist()),
                self._interned(kept["parts"].tolist()),
            )
        )

    def _parents(
        self, start: int, names: list[SequenceHash], column: NDArray[np.void]
    ) -> list[SequenceHash]:
        """Return the parents. Most equal the name before: no new object is made of those."""
        assert len(names) == len(column), f"{len(names)} names, {len(column)} parents"
        parents = names[-1:] + names[:-1]
        continues = self.continues[start : start + len(names)].copy()
        continues[:1] = False
        for index in np.flatnonzero(~continues).tolist():
            parents[index] = column[index].item()
        return parents

    def _interned(self, values: list[int]) -> list[int]:
        """Return one object for all that are equal; few differ."""
        known = self._known.setdefault
        return [known(value, value) for value in values]

    def leaves_first(self) -> list[SequenceHash]:
        """Return the names, but every run of children after their parents is turned round."""
        turned: list[SequenceHash] = []
        starts, lengths = self.runs()
        for start, end in zip(starts.tolist(), (starts + lengths).tolist(), strict=True):
            turned += self.names[start:end][::-1]
        assert len(turned) == len(self.names), f"{len(turned)} of {len(self.names)} blocks"
        return turned

    def leaves_first_of(self, rows: NDArray[np.intp]) -> list[SequenceHash]:
        """Return names like `leaves_first`, of some rows only, which are in ascending order."""
        starts, lengths = self.runs()
        run = np.searchsorted(starts, rows, side="right") - 1
        assert not len(rows) or run.min() >= 0, "a row lies before the first run"
        turned = rows[np.argsort(2 * starts[run] + lengths[run] - rows)]
        return [self.names[row] for row in turned.tolist()]

    def runs(self) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Return where each run of children after their parents begins, and how long it is."""
        starts = np.flatnonzero(~self.continues)
        assert not len(self) or starts[0] == 0, f"the first run begins at row {starts[:1]}"
        return starts, np.diff(starts, append=len(self))


def _follows(hashes: NDArray[np.void], parents: NDArray[np.void]) -> NDArray[np.bool_]:
    """Tell which blocks are children of those before them."""
    assert len(hashes) == len(parents), f"{len(hashes)} blocks, {len(parents)} parents"
    found = np.zeros(len(hashes), bool)
    if len(hashes):
        found[1:] = (_words(parents)[1:] == _words(hashes)[:-1]).all(axis=1)
    return found


def _words(names: NDArray[np.void]) -> NDArray[np.uint64]:
    """Return names as pairs of numbers, which are compared much faster."""
    return np.ascontiguousarray(names).view(np.uint64).reshape(-1, 2)


class FoldedBlocks:
    """Columns of blocks, unfolded from the oldest on; the columns go when nothing is left."""

    def __init__(self, columns: BlockColumns) -> None:
        self._columns = columns
        self._taken = 0
        """Blocks (or their slots) that were unfolded already: they are kept like all others."""

    def __len__(self) -> int:
        """Return how many blocks are still to be unfolded."""
        return len(self._columns) - self._taken

    def __getitem__(self, slot: int) -> Block:
        """Return the block that a slot had."""
        return self._columns[slot]

    def latest(self, count: int) -> list[SequenceHash]:
        """Return the names of the last `count` blocks, oldest first."""
        assert count >= 0, f"the last {count} blocks"
        return self._columns.names[max(self._taken, len(self._columns) - count) :]

    def by_slot(self) -> dict[int, Block]:
        """Return all blocks that are still to be unfolded, each by the slot that it had."""
        columns, count = self._columns, len(self._columns)
        blocks = columns.blocks(self._taken, count)
        assert len(blocks) == len(self), f"{len(blocks)} of {len(self)} blocks are folded"
        return dict(zip(columns.slots[self._taken :].tolist(), blocks, strict=True))

    def slots(self) -> set[int]:
        """Return the slots whose blocks are still to be unfolded; for `check`."""
        return set(self._columns.slots[self._taken :].tolist())

    def take(self, count: int) -> list[tuple[int, Block]]:
        """Unfold the next `count` blocks; returns each with the slot that it had."""
        assert count >= 0, f"{count} blocks are to be unfolded"
        end = self._taken + count
        blocks = self._columns.blocks(self._taken, end)
        slots = self._columns.slots[self._taken : end].tolist()
        self._taken += len(blocks)
        assert self._taken <= len(self._columns), f"{self._taken} of {len(self._columns)} unfolded"
        if len(self) == 0:
            self._columns, self._taken = BlockColumns.of({}), 0
        return list(zip(slots, blocks, strict=True))
