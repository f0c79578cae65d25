"""Promises: memory of the engine's own, in which promised blocks wait for their workers.

    free --keep--> promised --taken--> free        (or given up: cancelled, finished, forgotten)

TensorRT-LLM counts on what it has been told of: a load can neither fail nor be called off. So a
block is copied out of the arena and compared with its checksum *before* anything is said. From then
on nothing that happens to the host tier, to its arena or to a lease touches it, and a load is a
copy between two pieces of this host's memory.

The leader creates the memory, as a file in shared memory that is locked while it lives; the workers
of all ranks map it, read-only, before they introduce themselves to the host tier. A leader is
welcomed when all its workers have been: who has been promised something can read it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvbm_common.arena import Arena, remove_stale
from kvbm_common.checksum import block_checksum

from kvbm_connectors.messages import Load

PREFIX = "kvbm-promises-"
SLOT_ALIGNMENT = 64
"""Slots begin on a cache line."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What of a load is safe now: `slots[i]` holds its block i. `corrupt` is the index of the block
    that was not what its checksum says; it and what is behind it are not kept."""

    slots: tuple[int, ...]
    corrupt: int | None = None


class PromiseKeeper:
    """The leader's side. Slots are cut when the first block comes: its size is known then."""

    def __init__(self, shm_dir: Path, incarnation: str, size_bytes: int) -> None:
        """Raises ArenaNoSpace and ArenaUnavailable. The memory is taken when it is first used."""
        remove_stale(shm_dir, PREFIX)
        self._memory = Arena.create(shm_dir, PREFIX + incarnation, size_bytes)
        self.slot_bytes = 0
        self._slot_count = 0
        self._free: list[int] = []

    def room(self, block_bytes: int) -> int:
        """How many more blocks can be kept."""
        if not self.slot_bytes:
            self.slot_bytes = -(-block_bytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
            self._slot_count = self._memory.bytes // self.slot_bytes
            self._free = list(range(self._slot_count))[::-1]
        return len(self._free) if block_bytes <= self.slot_bytes else 0

    @property
    def promised(self) -> int:
        """Slots that are in use."""
        return self._slot_count - len(self._free)

    def keep(self, load: Load, count: int, arena: Arena, arena_slot_bytes: int) -> Kept:
        """Copy the first `count` blocks of a load out of the arena, and compare each copy with its
        checksum."""
        assert 0 <= count <= self.room(load.block_bytes), "more than there is room for"
        slots: list[int] = []
        blocks = zip(load.slots[:count], load.checksums[:count], strict=True)
        for index, (source, checksum) in enumerate(blocks):
            slot = self._free.pop()
            slots.append(slot)
            self._copy(arena, source * arena_slot_bytes, slot, load.block_bytes)
            view = self._memory.view(slot * self.slot_bytes, load.block_bytes)
            if block_checksum(view) != checksum:
                self.give_up([slots.pop()])
                return Kept(tuple(slots), index)
        return Kept(tuple(slots))

    def _copy(self, arena: Arena, offset: int, slot: int, length: int) -> None:
        assert 0 <= offset <= arena.bytes - length, "outside the arena"
        target = self._memory.address + slot * self.slot_bytes
        ctypes.memmove(target, arena.address + offset, length)  # Without the GIL.

    def give_up(self, slots: Sequence[int]) -> None:
        """Nobody will read these slots any more."""
        self._free.extend(slots)
        assert len(self._free) <= self._slot_count, "a slot was given up twice"

    def close(self) -> None:
        """Unlink the memory; a worker that has mapped it can read on."""
        self._memory.close()

    def check(self) -> None:
        """Assert every invariant."""
        assert len(set(self._free)) == len(self._free)
        assert all(0 <= slot < self._slot_count for slot in self._free)


class PromiseReader:
    """A worker's side: the same memory, read-only. Raises ArenaUnavailable."""

    def __init__(self, shm_dir: Path, incarnation: str) -> None:
        self._memory = Arena.attach(shm_dir / (PREFIX + incarnation), writable=False)
        self.path, self.address = self._memory.path, self._memory.address

    def close(self) -> None:
        """Unmap."""
        self._memory.close()
