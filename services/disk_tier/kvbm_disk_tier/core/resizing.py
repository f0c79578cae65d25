"""Resizing: which blocks of a store that is made smaller stay, and where.

A block that lies before the new end stays where it is. Of those behind it, the newest move into
slots that are free before it. No block leaves for another, so that an end in the middle of the
moves loses nothing: each place is written only while the journal says that it is free.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from kvbm_common.tier.blocks import BlockColumns
from kvbm_common.tier.layout import UNIT_BYTES, Layout
from numpy.typing import NDArray


class Move(NamedTuple):
    """A slot whose bytes move, in units."""

    source: int
    target: int
    units: int


class Resizing(NamedTuple):
    """The blocks that stay, at their new places, oldest first; and what is copied before."""

    blocks: BlockColumns
    moves: list[Move]

    def without(self, failed: Sequence[Move]) -> Resizing:
        """Return the same without the blocks of some moves: they leave after all."""
        targets = {move.target for move in failed}
        left = np.isin(self.blocks.slots, list(targets))
        assert left.sum() == len(targets), f"{left.sum()} blocks of {len(targets)} moves"
        moves = [move for move in self.moves if move.target not in targets]
        return Resizing(self.blocks.only(~left), moves)


def resized(blocks: BlockColumns, layout: Layout, *, moved_units_max: int) -> Resizing:
    """Return what becomes of the blocks of a store whose layout is `layout` from now on.

    Only the number of slots has changed; no more than so many units are copied.
    """
    assert moved_units_max >= 0, moved_units_max
    units = -(-blocks.block_bytes // UNIT_BYTES) + layout.extra_bytes // UNIT_BYTES
    end = layout.total_bytes // UNIT_BYTES
    stays, begins = blocks.slots + units <= end, blocks.slots < end
    places, free = blocks.slots.copy(), _FreePlaces(blocks.only(begins), units[begins], layout)
    moves: list[Move] = []
    left = moved_units_max
    for row in np.flatnonzero(~stays)[::-1].tolist():
        size = int(units[row])
        target = free.take(size) if size <= left else None
        if target is not None:
            moves.append(Move(int(places[row]), target, size))
            places[row], stays[row] = target, True
            left -= size
    found = blocks.moved(places).only(stays)
    assert len(set(found.slots.tolist())) == len(found), "two blocks have one place"
    return Resizing(found, moves)


class _FreePlaces:
    """The places before the end that no block has, by the length of their slots.

    `blocks` are all that begin before the end: one that lies over it has its bytes there until
    they have moved, and keeps the class of its slab.
    """

    def __init__(self, blocks: BlockColumns, units: NDArray[np.intp], layout: Layout) -> None:
        self._taken = set(blocks.slots.tolist())
        self._layout = layout
        self._end = layout.total_bytes // UNIT_BYTES
        self._class_of = dict(
            zip((blocks.slots // layout.slab_units).tolist(), units.tolist(), strict=True)
        )
        """Slab → units of its slots; slabs that no block has can be of any class."""
        self._found: dict[int, Iterator[int]] = {}

    def take(self, units: int) -> int | None:
        """Take the next free place for a slot of this length; None: all are taken."""
        assert units > 0, units
        return next(self._found.setdefault(units, self._find(units)), None)

    def _find(self, units: int) -> Iterator[int]:
        step = self._layout.slab_units
        for slab in range(-(-self._end // step)):
            if self._class_of.get(slab, units) != units:
                continue
            begin, end = slab * step, min((slab + 1) * step, self._end)
            for place in range(begin, end - units + 1, units):
                if place not in self._taken:
                    self._class_of[slab] = units
                    self._taken.add(place)
                    yield place
