"""Memory, files and objects: slots of cells, and copies that tear what they overlap with."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from functools import partial

from kvbm_common.checksum import block_checksum, combined_checksum
from kvbm_common.identity import SequenceHash

from tests.sim.world import Node, World

ROT = b"rot "
"""Content that begins so was changed by the world; no code of ours is to blame."""
Cells = Sequence[int]
"""Cells that are moved together: all of a slot, or one rank's."""


def right(name: SequenceHash, rank: int) -> bytes:
    """Return what a rank's part of a block holds when it is right."""
    return bytes((rank,)) + name


def right_cells(name: SequenceHash, ranks: int) -> tuple[bytes, ...]:
    """Return what a whole block holds when it is right."""
    return tuple(right(name, rank) for rank in range(ranks))


def sums_of(cells: Iterable[bytes]) -> tuple[int, ...]:
    """Return the checksum of each rank's part."""
    return tuple(map(block_checksum, cells))


def checksum_of(cells: Iterable[bytes]) -> int:
    """Return the checksum of a whole block."""
    return combined_checksum(sums_of(cells))


@functools.lru_cache(maxsize=4_096)
def right_checksum(name: SequenceHash, ranks: int) -> int:
    """Return the checksum that a block has when it is right."""
    return checksum_of(right_cells(name, ranks))


class Memory:
    """Slots of one cell for each rank. A cell that is right holds its block's own name."""

    def __init__(self, world: World, slot_count: int, *, parts: int = 1) -> None:
        self._world, self.parts, self.slot_count = world, parts, slot_count
        self.cells = [self.garbage() for _ in range(slot_count * parts)]

    def garbage(self) -> bytes:
        """Return bytes that are like no others."""
        self._world.marks["garbage"] += 1
        return b"garbage %d" % self._world.marks["garbage"]

    def whole(self, slot: int) -> Cells:
        """Return the cells of a slot."""
        return range(slot * self.parts, (slot + 1) * self.parts)

    def part(self, slot: int, rank: int) -> Cells:
        """Return the one cell of a rank in a slot."""
        return (slot * self.parts + rank,)

    def content(self, slot: int) -> tuple[bytes, ...]:
        """Return what is in a slot, by rank."""
        return tuple(self.cells[slot * self.parts : (slot + 1) * self.parts])

    def put(self, slot: int, cells: Sequence[bytes]) -> None:
        """Overwrite a slot at once."""
        self.cells[slot * self.parts : (slot + 1) * self.parts] = cells

    def tear(self, slot: int) -> None:
        """Fill a slot with garbage."""
        self.put(slot, [self.garbage() for _ in range(self.parts)])

    def rot(self, slot: int) -> None:
        """Lose what a slot held, on one rank."""
        cell = slot * self.parts + self._world.rng.randrange(self.parts)
        self.cells[cell] = ROT + self.garbage()

    def sums(self, slot: int) -> tuple[int, ...]:
        """Sum up each part of a slot, as a mover does with what has arrived."""
        return sums_of(self.content(slot))


Place = tuple[Memory, Sequence[Cells]]


def copy(mover: Node, source: Place, target: Place, duration_ms: float) -> None:
    """Move groups of cells. Each is torn for a random part of the time, and right at the end of
    that only if its source has not changed meanwhile. The death of the mover leaves it torn."""
    (read, sources), (write, targets) = source, target
    for one, other in zip(sources, targets, strict=True):
        begin_ms = mover.world.rng.uniform(0, duration_ms)
        left_ms = duration_ms - begin_ms
        mover.later(begin_ms, partial(_copy_cells, mover, (read, one), (write, other), left_ms))


def _copy_cells(
    mover: Node, source: tuple[Memory, Cells], target: tuple[Memory, Cells], left_ms: float
) -> None:
    (read, one), (write, other) = source, target
    seen = [read.cells[cell] for cell in one]
    for cell in other:
        write.cells[cell] = write.garbage()

    def end() -> None:
        for before, source_cell, target_cell in zip(seen, one, other, strict=True):
            found = read.cells[source_cell]
            is_whole = found == before or found.startswith(ROT)
            write.cells[target_cell] = found if is_whole else write.garbage()

    mover.later(mover.world.rng.uniform(0, left_ms), end)
