"""The miss filter: the names that a lookup may find, where every engine of the host can see them.

    byte 0 …    MAGIC, epoch, owner, state, next generation, 0 … (eight words of 8 bytes)
    byte 64 …   counters of one byte: how many names have this place

A counting Bloom filter (Fan et al. 2000). A name has four places: its four 32-bit words, each
scaled to the number of counters; a name is a hash, so that no other is computed. A name with
a counter of 0 at a place is not there. A counter that reaches 255 stays there. With as many names
as it was made for, one of 150 other names seems to be there: (1 - e^(-4/12))^4 = 0.65 %.

The host tier alone writes, in turns in which names come first and leave then; a counter is one
byte, so that readers take no lock. A reader looks at the state *after* the counters: what it has
read was in force then. A filter that is too small ends, and names the generation that follows it.
"""

from __future__ import annotations

import mmap
import os
import stat
import struct
from collections.abc import Collection, Iterable, Sequence
from enum import IntEnum
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvbm_common.checksum import block_checksum
from kvbm_common.identity import SequenceHash
from kvbm_common.memory.arena import Arena, ArenaUnavailable

MAGIC = int.from_bytes(b"kvbmmis1", "little")
SUFFIX = "-names"
"""A filter lies beside its arena, under the arena's name, this and its generation."""
HEADER_BYTES = 64
COUNTERS_PER_NAME = 12
STUCK = 255
"""A counter that stays: how many names it counts is not known any more."""
FEW = 24
"""Names that are written one by one: numpy costs as much for one as for so many."""
SLICE = 65_536
"""Names that are written together; a million then take a second's third, and little memory."""
WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_EPOCH, _OWNER, _STATE, _NEXT = 1, 2, 3, 4
_words = struct.Struct("<4I").unpack
_state = struct.Struct("<Q").unpack_from


class FilterState(IntEnum):
    """The meaning of a hash that the filter does not list."""

    PARTIAL = 0
    """Nothing: there is something that it does not list."""
    COMPLETE = 1
    """No lookup finds it."""
    ENDED = 2
    """Nothing, and never again."""


def size_of(capacity: int) -> int:
    """Return the bytes of a filter for so many names."""
    assert capacity > 0, capacity
    return HEADER_BYTES + COUNTERS_PER_NAME * capacity


def owner_of(host: str, source: str) -> int:
    """Return a number for the host tier that writes a filter: an engine that has reached it over
    TCP may have another one's files before it."""
    return block_checksum(f"{host}/{source}".encode())


def path_of(arena_path: str, generation: int) -> Path:
    """Return where a filter of this arena is."""
    assert generation > 0, generation
    return Path(f"{arena_path}{SUFFIX}-{generation}")


class MissFilter:
    """The writing side, on memory that others have mapped."""

    def __init__(self, memory: memoryview, *, owner: int, epoch: int) -> None:
        """Begin without names, partial, in memory that is all zero."""
        self._header = memory[:HEADER_BYTES].cast("Q")
        self._counters = np.frombuffer(memory[HEADER_BYTES:], np.uint8)
        self._bytes = memory[HEADER_BYTES:]
        self._count = len(self._counters)
        assert self._count >= COUNTERS_PER_NAME, "a filter without room for a name"
        self._header[_EPOCH], self._header[_OWNER] = epoch, owner
        self._header[0] = MAGIC

    def change(self, came: Collection[SequenceHash], left: Collection[SequenceHash]) -> None:
        """Add names that a lookup may find from now on; then remove those that none finds."""
        self._write(came, 1)
        self._write(left, -1)

    def switch(self, state: FilterState) -> None:
        """Say what the filter is good for from now on."""
        self._header[_STATE] = state

    def end(self, next_generation: int = 0) -> None:
        """Have no reader believe it any more; it may look for the next generation."""
        self._header[_NEXT] = next_generation
        self.switch(FilterState.ENDED)

    def _write(self, names: Collection[SequenceHash], step: int) -> None:
        if len(names) < FEW:
            self._write_few(names, step)
            return
        ordered = list(names)
        for start in range(0, len(ordered), SLICE):
            self._write_many(ordered[start : start + SLICE], step)

    def _write_few(self, names: Iterable[SequenceHash], step: int) -> None:
        counters, count = self._bytes, self._count
        for name in names:
            for word in _words(name):
                place = word * count >> 32
                value = counters[place]
                if value != STUCK:
                    assert value + step >= 0, f"{name.hex()} leaves, and was not there"
                    counters[place] = value + step

    def _write_many(self, names: Sequence[SequenceHash], step: int) -> None:
        places, times = np.unique(self._places(names), return_counts=True)
        before = self._counters[places].astype(np.int64)
        after = np.minimum(before + step * times, STUCK)
        after[before == STUCK] = STUCK
        assert (after >= 0).all(), "names leave that were not there"
        self._counters[places] = after

    def _places(self, names: Sequence[SequenceHash]) -> NDArray[np.uint64]:
        words = np.frombuffer(b"".join(names), "<u4").astype(np.uint64)
        return (words * np.uint64(self._count)) >> np.uint64(32)


class MissFilterReader:
    """The reading side; in plain Python, since a question is about a name or two."""

    def __init__(self, memory: mmap.mmap | bytearray, *, owner: int, epoch: int) -> None:
        """Read a filter of this life of its host tier. Raises ArenaUnavailable for another's."""
        self._memory = memory
        self._count = len(memory) - HEADER_BYTES
        if self._count < COUNTERS_PER_NAME:
            raise ArenaUnavailable("a miss filter is too short")
        found = struct.unpack_from("<3Q", memory)
        if found != (MAGIC, epoch, owner):
            raise ArenaUnavailable(f"this is no miss filter of epoch {epoch}")

    def denies_any(self, names: Iterable[SequenceHash]) -> bool:
        """Return whether some of these names surely cannot be found now."""
        memory, count = self._memory, self._count
        for name in names:
            a, b, c, d = _words(name)
            if not (
                memory[HEADER_BYTES + (a * count >> 32)]
                and memory[HEADER_BYTES + (b * count >> 32)]
                and memory[HEADER_BYTES + (c * count >> 32)]
                and memory[HEADER_BYTES + (d * count >> 32)]
            ):
                return self.state is FilterState.COMPLETE  # Read last: see above.
        return False

    @property
    def state(self) -> FilterState:
        """Return what the filter is good for now; what is unknown is good for nothing."""
        word: int = _state(self._memory, 8 * _STATE)[0]
        return FilterState(word) if word <= FilterState.ENDED else FilterState.ENDED

    @property
    def next_generation(self) -> int:
        """Return the generation that follows this one; 0: none."""
        next_generation: int = _state(self._memory, 8 * _NEXT)[0]
        return next_generation


def make_file(arena_path: str, generation: int, capacity: int) -> Arena:
    """Make the memory of a filter. Raises ArenaNoSpace, ArenaUnavailable."""
    path = path_of(arena_path, generation)
    return Arena.create(path.parent, path.name, size_of(capacity), huge=False)


def map_file(arena_path: str, generation: int) -> mmap.mmap:
    """Map the memory of a filter to read it. Raises ArenaUnavailable.

    In a directory that all may write to, the name may have been taken by another user, whose filter
    would deny everything, or be cut off under its reader.
    """
    path = path_of(arena_path, generation)
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        fd = os.open(path, flags)
        try:
            _require_owner(os.fstat(fd), os.stat(arena_path))
            return mmap.mmap(fd, 0, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
    except (OSError, ValueError) as error:  # ValueError: it is empty, or has a NUL.
        raise ArenaUnavailable(f"cannot map {path}: {error}") from error


def _require_owner(found: os.stat_result, arena: os.stat_result) -> None:
    """Raise ValueError for anything but a file of the arena's owner that no other may write."""
    is_file = stat.S_ISREG(found.st_mode)
    if not is_file or found.st_uid != arena.st_uid or found.st_mode & WRITABLE_BY_OTHERS:
        raise ValueError("it is not a file that the arena's owner alone can write")
