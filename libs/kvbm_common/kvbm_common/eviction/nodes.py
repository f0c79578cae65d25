"""Nodes: the prefix policy's record of each block that is in the tier.

Of the blocks of a former life it knows columns, and makes a node of one when it is asked for: a
million nodes would take longer than all the rest of a restart.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from kvbm_common.identity import SequenceHash
from kvbm_common.tier.blocks import BlockColumns

TURN_ENDS = (1, 2, 3, 5, 9)
"""Turns up to each are of one kind, and all beyond the last."""
DEPTH_ENDS = (3, 15, 63)
DEPTH_KINDS = len(DEPTH_ENDS) + 1
KINDS = (len(TURN_ENDS) + 1) * DEPTH_KINDS


def _kinds(ends: tuple[int, ...]) -> list[int]:
    assert list(ends) == sorted(set(ends)), f"the ends of kinds ascend: {ends}"
    return [sum(value > end for end in ends) for value in range(ends[-1] + 2)]


TURN_KIND = _kinds(TURN_ENDS)
DEPTH_KIND = _kinds(DEPTH_ENDS)


class Node:
    """The record of a block that is in the tier."""

    __slots__ = ("children", "count", "depth", "kind", "parent", "place", "sampled", "turn", "used")

    def __init__(self, parent: SequenceHash, *, turn: int, depth: int, sampled: bool) -> None:
        assert turn > 0, f"a child of {parent.hex()} is of turn {turn}"
        assert depth >= 0, f"a child of {parent.hex()} is {depth} deep"
        self.parent = parent
        self.turn = turn
        self.depth = depth
        self.sampled = sampled
        self.children = 0
        """How many there are here."""
        self.count = 0
        """How often it was asked for lately, here or not."""
        self.used = 0
        self.kind = 0
        self.place = -1
        """Index among the free leaves, or -1."""


class Nodes(dict[SequenceHash, Node]):
    """Nodes by name. `nodes[name]` makes that of a former block; so do `find` and `take`."""

    def __init__(self) -> None:
        self._former: Former | None = None
        self._slot_of: dict[SequenceHash, int] = {}
        """Former block whose node is not made yet → its place in the columns."""
        self.orphans: dict[SequenceHash, int] = {}
        """Parents that are not here, and how many children they have here."""

    def fill(self, former: Former) -> None:
        """Fill empty nodes with the blocks of a former life."""
        assert not self, f"{len(self)} blocks are here already"
        assert not self._slot_of, f"{len(self._slot_of)} blocks of another life are here"
        self._former, self._slot_of = former, former.slot_of
        self.orphans = dict(former.orphans)

    def has(self, name: SequenceHash) -> bool:
        """Tell whether a block is here."""
        return name in self or name in self._slot_of

    def find(self, name: SequenceHash) -> Node | None:
        """Return the node of a block, None if it is not here."""
        node = self.get(name)
        return self[name] if node is None and name in self._slot_of else node

    def take(self, name: SequenceHash) -> Node:
        """Remove the node of a block and return it; its children stay."""
        node = self[name]
        assert node.children >= 0, f"{name.hex()} leaves, with {node.children} children"
        del self[name]
        if node.children:
            self.orphans[name] = self.orphans.get(name, 0) + node.children
        return node

    def adopt(self, parent: SequenceHash) -> None:
        """Count a new child of a parent that is not here."""
        self.orphans[parent] = self.orphans.get(parent, 0) + 1

    def lose(self, parent: SequenceHash) -> None:
        """Count off a child that has left; its parent is not here."""
        left = self.orphans[parent] - 1
        assert left >= 0, f"{parent.hex()} has lost more children than it had"
        if left:
            self.orphans[parent] = left
        else:
            del self.orphans[parent]

    def check(self) -> None:
        """Assert every invariant; O(blocks), and makes all nodes."""
        for name in list(self._slot_of):
            assert self[name]
        children = Counter(node.parent for node in self.values())
        for name, node in self.items():
            assert node.children == children.pop(name, 0) - (node.parent == name)
        assert {name: n for name, n in self.orphans.items() if name not in self} == children

    def __missing__(self, name: SequenceHash) -> Node:
        slot = self._slot_of.pop(name)
        assert self._former is not None, f"{name.hex()} is of a former life that was dropped"
        node = self[name] = self._former.node(slot)
        if not self._slot_of:
            self._former = None
        return node


class Former:
    """The blocks of a former life, as if each was admitted in its turn and never used again."""

    def __init__(self, blocks: BlockColumns, sampled: NDArray[np.bool_]) -> None:
        assert len(sampled) == len(blocks), f"{len(sampled)} of {len(blocks)} blocks are judged"
        self.slot_of = blocks.slot_of.copy()
        self._row_of_slot = blocks.row_of_slot
        self._parents = blocks.parents
        self._sampled = sampled
        starts, lengths = blocks.runs()
        heads = blocks.parents[starts].tolist()
        above = self._rows_of(heads)
        above[above == starts] = -1  # A block is never before itself.
        known = zip(heads, above.tolist(), strict=True)
        self.orphans = Counter(parent for parent, row in known if row < 0)
        self._children = np.zeros(len(blocks), np.int32)
        self._children[:-1] += blocks.continues[1:]
        np.add.at(self._children, above[above >= 0], 1)
        parented = int(self._children.sum()) + self.orphans.total()
        assert parented == len(blocks), f"{len(blocks)} blocks are {parented} children"
        self._depths = _depths(starts, lengths, above)
        kinds = TURN_KIND[1] * DEPTH_KINDS + np.array(DEPTH_KIND, np.int32)
        self.kinds = kinds[np.minimum(self._depths, len(DEPTH_KIND) - 1)]
        leaves = np.flatnonzero(self._children == 0)
        self.leaves = [blocks.names[row] for row in leaves.tolist()]
        self._places = np.full(len(blocks), -1, np.int32)
        self._places[leaves] = np.arange(len(leaves))

    def _rows_of(self, names: list[SequenceHash]) -> NDArray[np.intp]:
        """Return the rows of blocks, -1 for those without a row."""
        slots = np.array([self.slot_of.get(name, -1) for name in names], np.intp)
        rows = np.full(len(names), -1)
        here = slots >= 0
        rows[here] = self._row_of_slot[slots[here]]
        return rows

    def node(self, slot: int) -> Node:
        """Make the node of the block in a slot."""
        row = int(self._row_of_slot[slot])
        assert row >= 0, f"slot {slot} held no block of the former life"
        node = Node(
            SequenceHash(self._parents[row].item()),
            turn=1,
            depth=int(self._depths[row]),
            sampled=bool(self._sampled[row]),
        )
        node.children = int(self._children[row])
        node.count = 1
        node.used = row + 1
        node.kind = int(self.kinds[row])
        node.place = int(self._places[row])
        return node


def _depths(
    starts: NDArray[np.intp], lengths: NDArray[np.intp], above: NDArray[np.intp]
) -> NDArray[np.int32]:
    """Return how many blocks are before each one. `above`: the row above each run of children, or
    -1."""
    runs = np.repeat(np.arange(len(starts)), lengths)
    offsets = np.arange(len(runs)) - np.repeat(starts, lengths)
    # A parent that came later was not known.
    behind = np.flatnonzero((above >= 0) & (above < starts))
    of_heads = [0] * len(starts)
    for run, parent, offset in zip(
        behind.tolist(),
        runs[above[behind]].tolist(),
        offsets[above[behind]].tolist(),
        strict=True,
    ):
        of_heads[run] = of_heads[parent] + offset + 1
    depths: NDArray[np.int32] = np.repeat(np.array(of_heads, np.int32), lengths) + offsets.astype(
        np.int32
    )
    return depths
