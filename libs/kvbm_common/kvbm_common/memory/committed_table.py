"""Committed table: the blocks in an arena, by hash, for every engine of the host to look up.

    row 0     MAGIC, epoch, 0 …
    row 1 …   eight tags of committed blocks, 0 for an empty place (64 bytes: a cache line)

The first half of a block's hash chooses its row, the second half is its tag. The host tier alone
writes; readers take no lock. The table is a hint: it may list a block that has just gone, or lack
one whose row was full when it came. (A block whose tag is 0, one in 2^64, seems to be listed
wherever there is room.) Only a lookup tells whether a block can be loaded.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Self

from kvbm_common.identity import SequenceHash
from kvbm_common.memory.arena import Arena, ArenaUnavailable

MAGIC = int.from_bytes(b"kvbmrst1", "little")
SUFFIX = "-roster"
"""The suffix of the table's file, which lies beside its arena, under the arena's name."""
ROW_TAGS = 8
ROW_BYTES = 8 * ROW_TAGS
ROW_TAGS_MEAN = 2
"""Tags in a row with every slot taken; one block in some thousands then finds its row full."""
_halves = struct.Struct("=QQ").unpack


class CommittedTable:
    """The writing side. The owner of an arena owns its table."""

    def __init__(self, file: Arena, epoch: int) -> None:
        """Take over `file`. Use `create` instead."""
        self._file = file
        self._words = file.view(0, file.bytes).cast("Q")
        self._mask = file.bytes // ROW_BYTES - 2
        self._words[1] = epoch
        self._words[0] = MAGIC

    @classmethod
    def create(cls, arena_path: str, *, slot_count: int, epoch: int) -> Self:
        """Create an empty table for an arena of so many slots.

        Raises ArenaNoSpace, ArenaUnavailable.
        """
        assert slot_count > 0
        rows = 1 << (slot_count // ROW_TAGS_MEAN).bit_length()
        path = Path(arena_path + SUFFIX)
        # Without huge pages the file grows as it is allocated: a reader, who looks for it by
        # itself, never maps a hole.
        file = Arena.create(path.parent, path.name, (rows + 1) * ROW_BYTES, huge=False)
        return cls(file, epoch)

    def add(self, names: Iterable[SequenceHash]) -> int:
        """List blocks; return how many of them no row had room for."""
        words, unlisted = self._words, 0
        for name in names:
            row, tag = self._place(name)
            tags = words[row : row + ROW_TAGS].tolist()
            if tag in tags:
                continue
            if 0 in tags:
                words[row + tags.index(0)] = tag
            else:
                unlisted += 1
        return unlisted

    def remove(self, names: Iterable[SequenceHash]) -> None:
        """Remove blocks that are gone from the table."""
        words = self._words
        for name in names:
            row, tag = self._place(name)
            tags = words[row : row + ROW_TAGS].tolist()
            if tag in tags:
                words[row + tags.index(tag)] = 0

    def clear(self) -> None:
        """Empty every row of the table."""
        self._words[ROW_TAGS:] = memoryview(bytes(self._file.bytes - ROW_BYTES)).cast("Q")

    def close(self) -> None:
        """Unlink the file; readers keep what they have mapped."""
        self._words.release()
        self._file.close()

    def _place(self, name: SequenceHash) -> tuple[int, int]:
        chosen, tag = _halves(name)
        return (1 + (chosen & self._mask)) * ROW_TAGS, tag


class CommittedTableReader:
    """The reading side. Thread-safe.

    In plain Python on purpose: a question is short and rare, and the first call of numpy after a
    while costs as much as a hundred of these searches.
    """

    def __init__(self, arena_path: str, epoch: int) -> None:
        """Map the table of an arena.

        Raises ArenaUnavailable when there is no table, or it is not of this life of the arena.
        """
        self.epoch = epoch
        path = arena_path + SUFFIX
        try:
            with open(path, "rb") as file:
                self._file = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        except (OSError, ValueError) as error:  # ValueError: it is empty.
            raise ArenaUnavailable(f"cannot map {path}: {error}") from error
        count = len(self._file) // ROW_BYTES - 1
        if count < 1 or count & (count - 1) or _halves(self._file[:16]) != (MAGIC, epoch):
            self._file.close()
            raise ArenaUnavailable(f"{path} is no committed table of epoch {epoch}")
        self._mask = count - 1

    def has_all(self, names: Sequence[SequenceHash]) -> bool:
        """Return whether all of these blocks are listed."""
        find, mask = self._file.find, self._mask
        chosen = struct.unpack(f"={2 * len(names)}Q", b"".join(names))[::2]
        for name, number in zip(names, chosen, strict=True):
            begin = (1 + (number & mask)) * ROW_BYTES
            if find(name[8:], begin, begin + ROW_BYTES) < 0:
                return False
        return True

    def close(self) -> None:
        """Unmap the file. No question may follow."""
        self._file.close()
