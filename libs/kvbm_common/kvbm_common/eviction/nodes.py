"""Nodes: the prefix policy's record of each block that is in the tier.

Of the blocks of a former life it knows columns, and makes a node of one when it is asked for: a
million nodes would take longer than all the rest of a restart.
"""

from __future__ import annotations

from collections import Counter

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvbm_common.identity import SequenceHash
from kvbm_common.tier.block_columns import BlockColumns
from kvbm_common.tier.block_lookup import BlockLookup

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


class Node(msgspec.Struct, gc=False, eq=False):
    """The record of a block that is in the tier; the garbage collector looks at none of a
    million."""

    parent: SequenceHash
    turn: int
    depth: int
    sampled: bool
    children: int = 0
    """The number of its children that are in the tier."""
    count: int = 0
    """The number of times that it was asked for lately, in the tier or not."""
    used: int = 0
    kind: int = 0
    place: int = -1
    """Index among the free leaves, or -1."""


class Nodes:
    """Nodes by name; that of a former block is made when it is asked for."""

    def __init__(self) -> None:
        self._made: BlockLookup[Node] = BlockLookup()
        self._former: Former | None = None
        self._slot_of: dict[SequenceHash, int] = {}
        """Former block whose node is not made yet → its place in the columns."""
        self.orphans: dict[SequenceHash, int] = {}
        """Parents that are not here, and how many children they have here."""
        self.get = self._made.get
        """Returns the node of a block, or None if it is not here or not made yet."""

    def __len__(self) -> int:
        return len(self._made) + len(self._slot_of)

    def fill(self, former: Former) -> None:
        """Fill empty nodes with the blocks of a former life."""
        assert not len(self), f"{len(self)} blocks are here already"
        self._former, self._slot_of = former, former.slot_of
        self.orphans = dict(former.orphans)

    def has(self, name: SequenceHash) -> bool:
        """Tell whether a block is here."""
        return name in self._made or name in self._slot_of

    def find(self, name: SequenceHash) -> Node | None:
        """Return the node of a block, None if it is not here."""
        node = self.get(name)
        return self._make(name) if node is None and name in self._slot_of else node

    def __getitem__(self, name: SequenceHash) -> Node:
        return self.get(name) or self._make(name)

    def add(self, name: SequenceHash, node: Node) -> None:
        """Add the node of a block that has come."""
        assert node.turn > 0, f"{name.hex()} is of turn {node.turn}"
        assert node.depth >= 0, f"{name.hex()} is {node.depth} deep"
        self._made.set((name,), node)

    def take(self, name: SequenceHash) -> Node:
        """Remove the node of a block and return it; its children stay."""
        node = self[name]
        assert node.children >= 0, f"{name.hex()} leaves, with {node.children} children"
        self._made.pop(name)
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

    def check(self) -> dict[SequenceHash, Node]:
        """Assert every invariant; O(blocks). Makes all nodes, and returns them."""
        for name in list(self._slot_of):
            self._make(name)
        nodes = {SequenceHash(name): self[SequenceHash(name)] for name in self._made}
        children = Counter(node.parent for node in nodes.values())
        for name, node in nodes.items():
            assert node.children == children.pop(name, 0) - (node.parent == name)
        assert {name: n for name, n in self.orphans.items() if name not in nodes} == children
        return nodes

    def _make(self, name: SequenceHash) -> Node:
        """Make the node of a former block; raises KeyError if it is not here."""
        slot = self._slot_of.pop(name)
        assert self._former is not None, f"{name.hex()} is of a former life that was dropped"
        node = self._former.node(slot)
        self._made.set((name,), node)
        if not self._slot_of:
            self._former = None
        return node


class Former:
    """The blocks of a former life, as if each was admitted in its turn and never used again."""

    def __init__(self, blocks: BlockColumns, sampled: NDArray[np.bool_]) -> None:
        assert len(sampled) == len(blocks), f"{len(sampled)} of {len(blocks)} blocks are judged"
        self.slot_of = dict(zip(blocks.names, blocks.slots.tolist(), strict=True))
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
    known = np.flatnonzero((above >= 0) & (above < starts))
    of_heads = [0] * len(starts)
    for run, parent, offset in zip(
        known.tolist(),
        runs[above[known]].tolist(),
        offsets[above[known]].tolist(),
        strict=True,
    ):
        of_heads[run] = of_heads[parent] + offset + 1
    depths: NDArray[np.int32] = np.repeat(np.array(of_heads, np.int32), lengths) + offsets.astype(
        np.int32
    )
    return depths
