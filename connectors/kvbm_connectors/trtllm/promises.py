"""Promises: memory of the engine's own, in which promised blocks wait for their workers.

TensorRT-LLM relies on every hit that it learns of: a load can neither fail nor be cancelled. So a
block is copied out of the arena and compared with its checksum *before* that.
From then on no failure of the host tier, its arena or a lease affects it, and a load is a copy
within this host's memory. Each rank compares its part once more while it copies it: a bit that has
flipped, or a slot that was used again too early, ends the step.

The leader creates the memory, as a file in shared memory that is locked while it lives; the workers
of all ranks map it, read-only, before they connect to the host tier. The host tier welcomes a
leader after all its workers, so every worker can read what the leader promises.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from kvbm_common.checksum import SUM_BYTES, pack_sums
from kvbm_common.copying import COPIER, Places, copy_threads, slot_places
from kvbm_common.memory.arena import Arena, remove_stale
from kvbm_common.tier.machine import Machine

from kvbm_connectors.core.messages import Load

PREFIX = "kvbm-promises-"
SLOT_ALIGNMENT = 64
"""Slots begin on a cache line."""


@dataclass(frozen=True, slots=True)
class PromisedLoad:
    """Copy promised slot `slots[i]` into device block `blocks[i]`, before this step computes.

    `checksums[i]` has those of its parts, packed: one for each rank, in the order of the ranks.
    """

    request: int
    slots: tuple[int, ...]
    blocks: tuple[int, ...]
    checksums: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class PromisePlan:
    """The plan of a step for all workers.

    `number` grows from step to step: TensorRT-LLM keeps a plan until the next one comes, and a
    plan that ran twice would write into another request's blocks.
    """

    number: int
    slot_bytes: int = 0
    loads: tuple[PromisedLoad, ...] = ()
    offering: bool = False
    """The host tier may be reading device blocks."""


class PromiseState(Enum):
    """The states of a slot of the promised memory."""

    FREE = "free"
    KEPT = "kept"


PROMISE = Machine(
    "promised slot",
    {
        (PromiseState.FREE, "kept"): PromiseState.KEPT,
        (PromiseState.KEPT, "given up"): PromiseState.FREE,
    },
)


@dataclass(frozen=True, slots=True)
class Kept:
    """The part of a load that is safe now: `slots[i]` holds its block i. `corrupt` is the index of
    the block whose checksums differ; it and the blocks after it are not kept."""

    slots: tuple[int, ...]
    corrupt: int | None = None


class PromiseKeeper:
    """The leader's side. The first block determines the size of the slots."""

    def __init__(self, shm_dir: Path, incarnation: str, size_bytes: int) -> None:
        """Allocate the memory. Raises ArenaNoSpace and ArenaUnavailable."""
        remove_stale(shm_dir, PREFIX)
        self._memory = Arena.create(
            shm_dir, PREFIX + incarnation, size_bytes, setting="KVBM_PROMISE_GB"
        )
        self.slot_bytes = 0
        self._state: list[PromiseState] = []
        """The state of each slot."""
        self._free: list[int] = []
        self._checksums: dict[int, bytes] = {}
        """Slot → the packed checksums of the parts of its block."""
        self._threads = copy_threads("promises")

    def room(self, block_bytes: int) -> int:
        """Return how many more blocks can be kept."""
        if not self.slot_bytes:
            self.slot_bytes = -(-block_bytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
            slot_count = self._memory.bytes // self.slot_bytes
            self._state = [PromiseState.FREE] * slot_count
            self._free = list(range(slot_count))[::-1]
        return len(self._free) if block_bytes <= self.slot_bytes else 0

    @property
    def promised(self) -> int:
        """Slots that are in use."""
        return len(self._state) - len(self._free)

    def keep(self, load: Load, count: int, arena: Arena, arena_slot_bytes: int) -> Kept:
        """Copy the first `count` blocks of a load out of the arena, and compare the copies with
        their checksums, part by part."""
        assert 0 <= count <= self.room(load.block_bytes), "more than there is room for"
        slots = [self._free.pop() for _ in range(count)]
        for slot in slots:
            self._move(slot, "kept")
        here = slot_places(load.slots[:count], load.block_bytes, arena_address=arena.address,
                           slot_bytes=arena_slot_bytes)  # fmt: skip
        assert here.inside(arena.address, arena.bytes), "outside the arena"
        ours = slot_places(slots, load.block_bytes, arena_address=self._memory.address,
                           slot_bytes=self.slot_bytes)  # fmt: skip
        intact = self._threads.map(
            lambda index: _copied(ours.only([index]), here.only([index]), load.checksums[index]),
            range(count),
        )
        wrong = [index for index, is_intact in enumerate(intact) if not is_intact]
        first = wrong[0] if wrong else count
        self._checksums |= zip(slots, load.checksums[:count], strict=True)
        self.give_up(slots[first:])
        return Kept(tuple(slots[:first]), first if wrong else None)

    def checksums(self, slots: Sequence[int]) -> tuple[bytes, ...]:
        """Return the packed checksums of the parts, for slots that are kept."""
        return tuple(self._checksums[slot] for slot in slots)

    def give_up(self, slots: Sequence[int]) -> None:
        """Free slots that are not read any more."""
        for slot in slots:
            self._move(slot, "given up")
            self._free.append(slot)
            del self._checksums[slot]

    def _move(self, slot: int, event: str) -> None:
        self._state[slot] = PROMISE.next(self._state[slot], event, f"slot {slot}")

    def close(self) -> None:
        """Unlink the memory; a worker that has mapped it can read on."""
        self._threads.shutdown(wait=True)
        self._memory.close()

    def check(self) -> None:
        """Assert every invariant of the promises."""
        assert len(set(self._free)) == len(self._free)
        assert len(self._checksums) == self.promised
        assert all(self._state[slot] is PromiseState.FREE for slot in self._free)
        assert all(self._state[slot] is PromiseState.KEPT for slot in self._checksums)


def _copied(target: Places, source: Places, sums: bytes) -> bool:
    """Copy one block; return whether every rank's part is what its checksum says."""
    parts, rest = divmod(len(sums), SUM_BYTES)
    if not parts or rest or target.block_bytes % parts:
        return False
    return pack_sums(COPIER.copy(target.split(parts), source.split(parts))) == sums


class PromiseReader:
    """The worker's side: the same memory, read-only. Raises ArenaUnavailable."""

    def __init__(self, shm_dir: Path, incarnation: str) -> None:
        self._memory = Arena.attach(shm_dir / (PREFIX + incarnation), writable=False)
        self.path, self.address = self._memory.path, self._memory.address

    def close(self) -> None:
        """Unmap the promised memory."""
        self._memory.close()
