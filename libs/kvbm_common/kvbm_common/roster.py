"""The roster: the names of the blocks in an arena, where every engine of the host can look them up.

    row 0     MAGIC, epoch, 0 …
    row 1 …   eight tags of committed blocks, 0 where there is none   (64 bytes: a cache line)

The first half of a block's name chooses its row, the second half is its tag. The host tier alone
writes; readers take no lock. It is a hint: a reader may meet a block that has just gone, or miss
one whose row was full when it came. Whether a block can be had, a lookup tells.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from kvbm_common.arena import Arena, ArenaUnavailable
from kvbm_common.identity import SequenceHash

MAGIC = int.from_bytes(b"kvbmrst1", "little")
SUFFIX = "-roster"
"""A roster lies beside its arena, under the arena's name and this."""
ROW_TAGS = 8
ROW_BYTES = 8 * ROW_TAGS
ROW_TAGS_MEAN = 2
"""At most, with every slot taken: then one block in some thousands finds its row full."""
_halves = struct.Struct("=QQ").unpack


class Roster:
    """The writing side; whoever owns the arena owns its roster."""

    def __init__(self, file: Arena, epoch: int) -> None:
        """Takes over `file`. Use `create`."""
        self._file = file
        self._words = file.view(0, file.bytes).cast("Q")
        self._mask = file.bytes // ROW_BYTES - 2
        self._words[1] = epoch
        self._words[0] = MAGIC

    @classmethod
    def create(cls, arena_path: str, *, slot_count: int, epoch: int) -> Self:
        """An empty one for an arena of so many slots. Raises ArenaNoSpace, ArenaUnavailable."""
        assert slot_count > 0
        rows = 1 << (slot_count // ROW_TAGS_MEAN).bit_length()
        path = Path(arena_path + SUFFIX)
        return cls(Arena.create(path.parent, path.name, (rows + 1) * ROW_BYTES), epoch)

    def add(self, names: Iterable[SequenceHash]) -> int:
        """These blocks are there; returns how many of them no row had room for."""
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
        """These blocks are gone."""
        words = self._words
        for name in names:
            row, tag = self._place(name)
            tags = words[row : row + ROW_TAGS].tolist()
            if tag in tags:
                words[row + tags.index(tag)] = 0

    def clear(self) -> None:
        """Nothing is there."""
        self._words[ROW_TAGS:] = memoryview(bytes(self._file.bytes - ROW_BYTES)).cast("Q")

    def close(self) -> None:
        """Unlink it; readers keep what they have mapped."""
        self._words.release()
        self._file.close()

    def _place(self, name: SequenceHash) -> tuple[int, int]:
        chosen, tag = _halves(name)
        return (1 + (chosen & self._mask)) * ROW_TAGS, tag or 1


class RosterReader:
    """The reading side. Thread-safe."""

    def __init__(self, arena_path: str, epoch: int) -> None:
        """Raises ArenaUnavailable when there is none, or it is not of this life of the arena."""
        self.epoch = epoch
        self._file = Arena.attach(arena_path + SUFFIX, writable=False)
        whole = self._file.bytes // ROW_BYTES * ROW_BYTES
        rows = self._file.array[:whole].view(np.uint64).reshape(-1, ROW_TAGS)
        count = len(rows) - 1
        if count < 1 or count & (count - 1) or rows[0, :2].tolist() != [MAGIC, epoch]:
            self._file.close()
            raise ArenaUnavailable(f"{arena_path}{SUFFIX} is no roster of epoch {epoch}")
        self._rows: NDArray[np.uint64] = rows[1:]
        self._mask = np.uint64(count - 1)

    def listed(self, names: Sequence[SequenceHash]) -> NDArray[np.bool_]:
        """Which of these blocks are there, as far as the roster knows."""
        halves = np.frombuffer(b"".join(names), np.uint64).reshape(-1, 2)
        tags = np.maximum(halves[:, 1], np.uint64(1))
        matches = self._rows[halves[:, 0] & self._mask] == tags[:, None]
        found: NDArray[np.bool_] = np.any(matches, axis=1)
        return found

    def close(self) -> None:
        """Unmap it, as soon as nobody looks any more."""
        self._file.close()
