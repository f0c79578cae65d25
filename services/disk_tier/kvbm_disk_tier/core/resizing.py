"""Resizing: which blocks of a store that is made smaller stay, and where.

A block that lies before the new end stays where it is. Those after it move into slots that are
free before it, and then into slots of blocks that are worth less, which leave. The journal says
that those are free before their places are written: so an end in the middle of the moves serves
nothing wrong.

When a block was used last is not in the journal. But a block came from a prompt that had all of its
ancestors: each is as recent as its newest descendant, and worth more than that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from kvbm_common.tier.block_columns import BlockColumns
from kvbm_common.tier.layout import UNIT_BYTES, Layout
from numpy.typing import NDArray


class Move(NamedTuple):
    """A slot whose bytes move, in units."""

    source: int
    target: int
    units: int


class Resizing(NamedTuple):
    """The blocks that stay, at their new places, oldest first; and what comes before."""

    blocks: BlockColumns
    moves: list[Move]
    replaced: BlockColumns
    """The blocks whose places others move to, at these places."""

    def without(self, failed: Sequence[Move]) -> Resizing:
        """Return the same without the blocks of some moves: they leave after all."""
        targets = {move.target for move in failed}
        left = np.isin(self.blocks.slots, list(targets))
        assert left.sum() == len(targets), f"{left.sum()} blocks of {len(targets)} moves"
        moves = [move for move in self.moves if move.target not in targets]
        return Resizing(self.blocks.only(~left), moves, self.replaced)


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
    replaced = np.zeros(len(blocks), bool)
    if stays.all():
        return Resizing(blocks, moves, blocks.only(replaced))
    ranks = _ranks(blocks)
    yielding = _Yielding(ranks, units, np.flatnonzero(stays))
    left = moved_units_max
    leaves = np.flatnonzero(~stays)
    for row in leaves[np.argsort(ranks[leaves])].tolist():
        size = int(units[row])
        if size > left:
            break  # A shorter one may be a child of this one.
        target = free.take(size)
        other = yielding.take(size, int(ranks[row])) if target is None else None
        if other is not None:
            target = int(places[other])
            stays[other], replaced[other] = False, True
        if target is not None:
            moves.append(Move(int(places[row]), target, size))
            places[row], stays[row] = target, True
            left -= size
    found = blocks.moved(places).only(stays)
    assert len(set(found.slots.tolist())) == len(found), "two blocks have one place"
    return Resizing(found, moves, blocks.only(replaced))


def _ranks(blocks: BlockColumns) -> NDArray[np.intp]:
    """Return how many blocks are worth more than each.

    From the newest block to the oldest, each comes after those of its ancestors that have not
    come. So of any first ranks no block lacks an ancestor that is here.
    """
    row_of = {name: row for row, name in enumerate(blocks.names)}
    parents = [row_of.get(name, -1) for name in blocks.parents.tolist()]
    ranks = np.full(len(blocks), -1)
    seen, count = bytearray(len(blocks)), 0
    for row in reversed(range(len(blocks))):
        chain: list[int] = []
        while row >= 0 and not seen[row]:
            seen[row] = True
            chain.append(row)
            row = parents[row]
        ranks[chain] = np.arange(count + len(chain) - 1, count - 1, -1)
        count += len(chain)
    assert count == len(blocks), f"{count} of {len(blocks)} blocks have a rank"
    return ranks


class _Yielding:
    """The blocks before the end, those that are worth least first, by the length of their slots."""

    def __init__(
        self, ranks: NDArray[np.intp], units: NDArray[np.intp], rows: NDArray[np.intp]
    ) -> None:
        self._ranks = ranks
        ordered = rows[np.argsort(ranks[rows])]
        self._rows = {
            size: ordered[units[ordered] == size].tolist() for size in set(units[rows].tolist())
        }

    def take(self, units: int, rank: int) -> int | None:
        """Take the block with a slot of this length that is worth least; None: none is below."""
        rows = self._rows.get(units, [])
        return rows.pop() if rows and self._ranks[rows[-1]] > rank else None


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
