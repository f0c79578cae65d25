"""Memory, files and objects: units of cells, and copies that tear what they overlap with."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from functools import partial
from typing import Protocol

from kvbm_common.checksum import block_checksum, combined_checksum, pack_sums
from kvbm_common.identity import SequenceHash
from kvbm_common.tier.layout import UNIT_BYTES, rounded_up

from tests.sim.world import Call, World

ROT = b"rot "
"""Content that begins so was changed by the world; no code of ours is to blame."""
Cells = Sequence[int]
"""Cells that are moved together: all of a block, or one part of it."""
CACHED_MAX = 8_192
"""Contents that are kept at hand: more than the blocks of one seed."""


@functools.lru_cache(maxsize=CACHED_MAX)
def right(name: SequenceHash, part: int) -> bytes:
    """Return what a part of a block holds when it is right."""
    return bytes((part,)) + name


@functools.lru_cache(maxsize=CACHED_MAX)
def right_cells(name: SequenceHash, part_count: int) -> tuple[bytes, ...]:
    """Return what a whole block holds when it is right."""
    return tuple(right(name, part) for part in range(part_count))


@functools.lru_cache(maxsize=CACHED_MAX)
def sums_of(cells: tuple[bytes, ...]) -> bytes:
    """Return the packed checksums of parts."""
    return pack_sums(map(block_checksum, cells))


def checksum_of(cells: tuple[bytes, ...]) -> int:
    """Return the checksum of a whole block."""
    return combined_checksum(sums_of(cells))


@functools.lru_cache(maxsize=CACHED_MAX)
def right_checksum(name: SequenceHash, part_count: int) -> int:
    """Return the checksum that a block has when it is right."""
    return checksum_of(right_cells(name, part_count))


def units_of(block_bytes: int) -> int:
    """Return how many units a block takes."""
    return rounded_up(block_bytes) // UNIT_BYTES


@functools.lru_cache(maxsize=CACHED_MAX)
def spread(content: bytes, units: int) -> tuple[bytes, ...]:
    """Return the cells that hold a part of a block: one for each unit of the block."""
    return (content, *(content + b"#%d" % unit for unit in range(1, units)))


def joined(cells: Sequence[bytes]) -> bytes:
    """Return what the cells of a part hold together: what was spread over them, if all have it."""
    first = cells[0]
    if len(cells) == 1 or spread(first, len(cells)) == tuple(cells):
        return first
    return next((cell for cell in cells if cell.startswith(ROT)), b"|".join(cells))


class Memory:
    """Units with a cell for each part. The cells of a block that is right hold its name."""

    def __init__(self, world: World, unit_count: int, *, parts: int = 1) -> None:
        self._world, self.parts, self.unit_count = world, parts, unit_count
        self.cells = [self.garbage() for _ in range(unit_count * parts)]

    def garbage(self) -> bytes:
        """Return bytes that are like no others."""
        marks = self._world.marks
        number = marks["garbage"] = marks["garbage"] + 1
        return b"garbage %d" % number

    def whole(self, place: int, units: int = 1) -> Cells:
        """Return the cells of a block that begins at a place."""
        return range(place * self.parts, (place + units) * self.parts)

    def part(self, place: int, part: int, units: int = 1) -> Cells:
        """Return the cells of one part of such a block."""
        return range(place * self.parts + part, (place + units) * self.parts + part, self.parts)

    def some(self, places: Sequence[int], parts: Sequence[int], units: int = 1) -> list[Cells]:
        """Return the cells of some parts of such blocks, part by part."""
        return [self.part(place, part, units) for place in places for part in parts]

    def content(self, place: int, units: int = 1) -> tuple[bytes, ...]:
        """Return what such a block holds, part by part."""
        parts = self.parts
        found = self.cells[place * parts : (place + units) * parts]
        if units == 1:
            return tuple(found)
        return tuple([joined(found[part::parts]) for part in range(parts)])

    def put(self, place: int, contents: Sequence[bytes], units: int = 1) -> None:
        """Overwrite a block at once."""
        if units == 1:
            first = place * self.parts
            self.cells[first : first + len(contents)] = contents
            return
        for part, content in enumerate(contents):
            cells = self.part(place, part, units)
            for cell, piece in zip(cells, spread(content, units), strict=True):
                self.cells[cell] = piece

    def tear(self, place: int) -> None:
        """Fill a unit with garbage."""
        self.put(place, [self.garbage() for _ in range(self.parts)])

    def rot(self, place: int) -> None:
        """Lose what a unit held of one part."""
        cell = place * self.parts + self._world.rng.randrange(self.parts)
        self.cells[cell] = ROT + self.garbage()

    def sums(self, place: int, units: int = 1) -> bytes:
        """Sum up each part of a block, as a mover does with what has arrived."""
        return sums_of(self.content(place, units))


Place = tuple[Memory, Sequence[Cells]]


class Mover(Protocol):
    """A process that moves bytes."""

    @property
    def world(self) -> World:
        """Return where it lives."""
        ...

    def later(self, delay_ms: float, call: Call) -> None:
        """Call back if it still lives then."""
        ...


def copy(mover: Mover, source: Place, target: Place, duration_ms: float) -> None:
    """Move groups of cells. Each is torn for a random part of the time, and right at the end of
    that only if its source has not changed meanwhile. The death of the mover leaves it torn.

    A group is of one part where one side has a cell for all of it: a device block is one cell.
    """
    (read, sources), (write, targets) = source, target
    world = mover.world
    # After weeks a float has steps of some 10^-7 ms: an end may be rounded up to the copy's own.
    last_ms = math.nextafter(world.now + duration_ms, 0)
    for one, other in zip(sources, targets, strict=True):
        begin_ms = world.rng.uniform(0, duration_ms)
        left_ms = duration_ms - begin_ms
        cells = partial(_copy_cells, mover, (read, one), (write, other), left_ms, last_ms)
        mover.later(max(0, min(begin_ms, last_ms - world.now)), cells)


def _copy_cells(
    mover: Mover,
    source: tuple[Memory, Cells],
    target: tuple[Memory, Cells],
    left_ms: float,
    last_ms: float,
) -> None:
    (read, one), (write, other) = source, target
    seen = [read.cells[cell] for cell in one]
    for cell in other:
        write.cells[cell] = write.garbage()

    def end() -> None:
        found: Sequence[bytes] = [read.cells[cell] for cell in one]
        before: Sequence[bytes] = seen
        if len(one) != len(other):
            found, before = (spread(joined(cells), len(other)) for cells in (found, seen))
        for was, cell, content in zip(before, other, found, strict=True):
            is_whole = content == was or content.startswith(ROT)
            write.cells[cell] = content if is_whole else write.garbage()

    world = mover.world
    mover.later(max(0, min(world.rng.uniform(0, left_ms), last_ms - world.now)), end)
