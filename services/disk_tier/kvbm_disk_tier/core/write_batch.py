"""Batches of blocks on their way to disk: what is known of each, and the table they move by."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from kvbm_common.identity import SequenceHash, hashes_from_hex
from kvbm_common.tier.blocks import CHECKSUM_MAX
from kvbm_common.tier.diary import Diary
from kvbm_common.tier.machine import InvalidTransition, Machine
from kvbm_common.tier.parts import is_divisible
from kvbm_common.tier.slots import Block
from kvbm_common.wire.slot_entries import LeasedSlot
from kvbm_common.wire.verbs import ArenaReply

from kvbm_disk_tier.core.write_queue import Origin


class Phase(Enum):
    """The step that a write waits for."""

    LEASING = "leasing"
    LEASED = "leased"
    WRITING = "writing"
    RELEASING = "releasing"
    RELEASED = "released"
    JOURNALING = "journaling"

    __hash__ = object.__hash__  # Enum's own is written in Python, and every move hashes a phase.


WRITE = Machine(
    "disk write",
    {
        (None, "lease"): Phase.LEASING,
        (Phase.LEASING, "leased"): Phase.LEASED,
        (Phase.LEASING, "unanswered"): None,
        (Phase.LEASING, "refused"): None,
        (Phase.LEASED, "write"): Phase.WRITING,
        (Phase.LEASED, "nothing left"): Phase.RELEASING,
        (Phase.LEASED, "bypassed"): Phase.RELEASING,
        (Phase.WRITING, "written"): Phase.RELEASING,
        (Phase.WRITING, "write failed"): Phase.RELEASING,
        (Phase.RELEASING, "held"): Phase.RELEASED,
        (Phase.RELEASING, "nothing written"): None,
        (Phase.RELEASING, "unanswered"): None,
        (Phase.RELEASING, "lease lost"): None,
        (Phase.RELEASED, "record"): Phase.JOURNALING,
        (Phase.JOURNALING, "journaled"): None,
        (Phase.JOURNALING, "journal failed"): None,
    },
)


class Batch(NamedTuple):
    """Blocks that were taken out of the queue, to be leased together."""

    arena: ArenaReply
    names: list[SequenceHash]
    origin: Origin
    charged: int
    parents: Mapping[SequenceHash, SequenceHash]
    """Block → its parent, if that is known."""


@dataclass(slots=True)
class Write:
    """A batch on its way to disk."""

    id: int
    instance: str
    epoch: int
    """The arena that the lease is for."""
    names: list[SequenceHash]
    origin: Origin
    """The owner, size and namespace of these blocks."""
    charged: int = 0
    """Bytes taken from the budget."""
    parents: Mapping[SequenceHash, SequenceHash] = field(default_factory=dict)
    """Block → its parent, if that is known."""
    phase: Phase = Phase.LEASING
    lease: int = 0
    leased: Sequence[LeasedSlot] = ()
    """Arena slots that the host tier has pinned for it."""
    slots: list[tuple[int, Block]] = field(default_factory=list)
    """Staged file slots and what is being written into them."""
    load: int = 0
    """The part of `StoreStatus.write_load_max` that the write takes while it is in flight."""
    started_ms: int = 0
    """The time at which its blocks went to the mover."""
    released_ms: int = 0
    """The time at which the host tier has taken the lease back, held to the end; 0: it has not."""
    recorded_ms: int = 0
    """The time at which its records went to the journal; 0: they have not."""


class WritesInFlight:
    """Every write that has begun and not ended, by id and by phase."""

    def __init__(self, diary: Diary) -> None:
        self.by_id: dict[int, Write] = {}
        self.names: set[SequenceHash] = set()
        """All their blocks."""
        self.phases: dict[Phase, set[int]] = {phase: set() for phase in Phase}
        """The ids of the writes in each phase."""
        self._diary = diary

    def begin(self, write: Write) -> None:
        """Add a write whose lease is asked for."""
        assert write.id not in self.by_id, f"two writes have id {write.id}"
        assert write.names, "a write has blocks"
        assert self.names.isdisjoint(write.names), f"a block is in two writes: {self.story(write)}"
        self.by_id[write.id] = write
        self.phases[write.phase].add(write.id)
        self.names.update(write.names)

    def find(self, write_id: int) -> Write:
        """Return a write that something has come back for."""
        write = self.by_id.get(write_id)
        assert write is not None, f"no write has id {write_id}"
        return write

    def in_phase(self, phase: Phase) -> list[Write]:
        """Return the writes in a phase, oldest first."""
        return [self.by_id[write_id] for write_id in sorted(self.phases[phase])]

    def move(self, write: Write, event: str) -> None:
        """Move a write by the table; it is gone when the table says so."""
        assert write.id in self.by_id, f"{event!r} for a write that has ended: {self.story(write)}"
        key = (write.phase, event)
        if key not in WRITE.transitions:
            raise InvalidTransition(WRITE.refusal(write.phase, event, self.story(write)))
        self.phases[write.phase].remove(write.id)
        phase = WRITE.transitions[key]
        if phase is None:
            del self.by_id[write.id]
            self.names.difference_update(write.names)
            return
        write.phase = phase
        self.phases[phase].add(write.id)

    def drop(self, write: Write, names: Collection[SequenceHash]) -> None:
        """Take blocks out of a write that is not written yet."""
        assert not write.slots, self.story(write)
        write.names = [name for name in write.names if name not in names]
        self.names.difference_update(names)

    def holds_leases(self) -> bool:
        """Tell whether the release of some write will give slots back to a host tier."""
        phases = (Phase.LEASED, Phase.WRITING, Phase.RELEASING)
        return any(self.by_id[write].leased for one in phases for write in self.phases[one])

    def story(self, write: Write) -> str:
        """Return what happened to the blocks of a write, for assertions."""
        return f"write {write.id}: {[self._diary.story(name) for name in write.names]}"

    def check(self) -> None:
        """Assert that every write is in one phase, and every block in one write."""
        for write_id, write in self.by_id.items():
            at = [phase for phase, ids in self.phases.items() if write_id in ids]
            assert at == [write.phase], self.story(write)
        names = [name for write in self.by_id.values() for name in write.names]
        assert self.names == set(names)
        assert len(names) == len(self.names), "a block is in two writes"


def leased_blocks(
    slots: Sequence[LeasedSlot], arena: ArenaReply
) -> tuple[dict[SequenceHash, tuple[Block, int]], int]:
    """Return the blocks of leased slots with their slot, and how many slots cannot be right."""
    sound = [slot for slot in slots if _is_sound(slot, arena)]
    names = hashes_from_hex([slot.hash for slot in sound])
    parents = hashes_from_hex([slot.parent for slot in sound])
    namespaces = {text: bytes.fromhex(text) for text in {slot.namespace for slot in sound}}
    leased: dict[SequenceHash, tuple[Block, int]] = {}
    for slot, name, parent in zip(sound, names, parents, strict=True):
        # The bytes tell the checksums of the parts when they are read: only how it is cut is kept.
        namespace = namespaces[slot.namespace]
        block = Block(name, parent, namespace, slot.checksum, slot.bytes, slot.parts)
        leased[name] = block, slot.slot
    return leased, len(slots) - len(sound)


def _is_sound(slot: LeasedSlot, arena: ArenaReply) -> bool:
    """Tell whether a leased slot can be written and journaled at all."""
    end = slot.slot * arena.slot_bytes + slot.bytes
    inside = slot.bytes > 0 and end <= arena.slot_count * arena.slot_bytes
    inside = inside and (bool(arena.sizes) or slot.bytes <= arena.slot_bytes)
    whole = is_divisible(slot.bytes, slot.parts)
    return inside and whole and 0 <= slot.checksum <= CHECKSUM_MAX
