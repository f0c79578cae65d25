"""A medium with an arena beside it: what the tests of files and of buckets share."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvbm_common.checksum import block_checksum, combined_checksum, part_checksums
from kvbm_common.memory.arena import Arena
from kvbm_common.nixl.mover_thread import MoverThread
from kvbm_common.runtime.loop import monotonic_ms
from kvbm_common.runtime.metrics import Metrics
from kvbm_common.tier.layout import UNIT_BYTES
from kvbm_common.tier.parts import Grid
from kvbm_common.tier.slots import Block
from kvbm_common.wire.verbs import ArenaReply
from kvbm_disk_tier.core.effects import AppendJournal, ReadSlots, WriteSlots
from kvbm_disk_tier.core.journal import Operation, Record
from kvbm_disk_tier.shell.cipher import Keys
from kvbm_disk_tier.shell.file_medium import FileMedium
from kvbm_disk_tier.shell.medium import Medium
from kvbm_disk_tier.shell.sealed_mover import SealedMover
from kvbm_disk_tier.shell.store import Store
from kvbm_disk_tier.shell.store_header import CIPHER, EXTRA_BYTES
from kvbm_disk_tier.shell.store_options import StoreOptions
from kvbm_disk_tier.shell.store_thread import StoreThread

from tests.services.disk_tier.helpers import NAMESPACE, name

SLOT_BYTES = 8192
BLOCK_BYTES = 5000
"""Smaller than its slot, and no multiple of anything."""
PART_BYTES = 2500
SLOTS = 8
_names = itertools.count()


class Inbox:
    """A core's loop that only writes down what it is given."""

    def __init__(self) -> None:
        self.inputs: list[Any] = []

    def complete(self, event: object) -> None:
        """The outcome of something."""
        self.inputs.append(event)

    async def offer(self, event: object, *, deadline_s: float) -> None:
        """Something else."""
        assert deadline_s > 0
        self.inputs.append(event)

    def of(self, kind: type[Any]) -> list[Any]:
        """Those of one type."""
        return [event for event in self.inputs if isinstance(event, kind)]


class Place:
    """An arena that a medium has mapped."""

    def __init__(self, arena: Arena, medium: Medium, *, epoch: int = 1) -> None:
        self.arena = arena
        self.medium = medium
        self.epoch = epoch
        self._ids = itertools.count(1)
        medium.use_arena(ArenaReply(
            path=str(arena.path), bytes=arena.bytes, slot_bytes=SLOT_BYTES, slot_count=SLOTS,
            epoch=epoch, instance="0",
        ))  # fmt: skip

    def fill(self, slot: int, number: int, *, size: int = BLOCK_BYTES) -> Block:
        """Put block `number` into a slot of the arena."""
        data = bytes([number]) * size
        self.arena.view(slot * SLOT_BYTES, size)[:] = data
        return Block(name(number), name(number - 1), NAMESPACE, block_checksum(data), size)

    def fill_parts(self, slot: int, *numbers: int) -> Block:
        """Put a block into a slot whose parts are of these numbers; it is called by the first."""
        size = len(numbers) * PART_BYTES
        data = b"".join(bytes([number]) * PART_BYTES for number in numbers)
        self.arena.view(slot * SLOT_BYTES, size)[:] = data
        sums = part_checksums(memoryview(data), Grid(heads=len(numbers)))
        parent, checksum = name(numbers[0] - 1), combined_checksum(sums)
        return Block(name(numbers[0]), parent, NAMESPACE, checksum, size, len(numbers))

    def bytes_of(self, slot: int, *, size: int = BLOCK_BYTES) -> bytes:
        """What a slot of the arena holds."""
        return bytes(self.arena.view(slot * SLOT_BYTES, size))

    def writing(self, blocks: dict[int, Block], *, target: int = 0) -> WriteSlots:
        """Arena slots to store slots `target`…"""
        return WriteSlots(
            next(self._ids), self.epoch, tuple(blocks), _places(target, len(blocks)),
            tuple(blocks.values()), SLOT_BYTES,
        )  # fmt: skip

    def reading(
        self, blocks: dict[int, Block], *, source: int = 0, within_ms: int = 5_000
    ) -> ReadSlots:
        """Store slots `source`… to arena slots."""
        return ReadSlots(
            next(self._ids), self.epoch, _places(source, len(blocks)), tuple(blocks),
            tuple(blocks.values()), SLOT_BYTES, monotonic_ms() + within_ms,
        )  # fmt: skip

    def removing(self, *blocks: Block) -> AppendJournal:
        """These are not wanted any more."""
        records = (Record(Operation.REMOVED, i, i, block) for i, block in enumerate(blocks))
        return AppendJournal(None, tuple(records))


def _places(first: int, count: int) -> tuple[int, ...]:
    """Where slots of a store are that is cut for these blocks, sealed or not."""
    units = (SLOT_BYTES + EXTRA_BYTES) // UNIT_BYTES
    return tuple(range(first * units, (first + count) * units, units))


def sealed_medium(directory: Path, keys: Keys, *, pool_slots: int = SLOTS) -> FileMedium:
    """A sealed store of `SLOTS` slots."""
    store = Store(
        StoreOptions(directory=directory, capacity_bytes=0, slot_count=SLOTS, cipher=CIPHER)
    )
    mover = MoverThread("test", backends=("POSIX",))
    sealed = SealedMover(
        mover=mover, counters=Metrics(), keys=keys,
        pool_bytes=lambda layout: pool_slots * layout.slot_bytes,
    )  # fmt: skip
    return FileMedium(StoreThread(store), sealed)


@contextmanager
def arena() -> Iterator[Arena]:
    """An arena of a host tier."""
    made = Arena.create(
        "/dev/shm", f"kvbm-test-medium-{os.getpid()}-{next(_names)}", SLOTS * SLOT_BYTES
    )
    try:
        yield made
    finally:
        made.close()
