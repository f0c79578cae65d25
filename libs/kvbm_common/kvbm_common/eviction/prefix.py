"""`prefix`: leaves first, the least worth of them, as learned from what comes back.

A tier's blocks are a forest: a block is of use only after its parent. So only a block without
children here may leave, and of those the one whose worth (see `returns`) is least. Blocks are told
apart by the turn of their conversation and by their depth:

    turn    how many requests led here: one more than the parent's when the parent was asked for
            more often than this block, plus how often the block itself has come back
    depth   blocks before it

A shared system prompt comes back all the time and is of a late turn; the first question of a
conversation is of turn 2 or so, and comes back less often than the fifth.

Of many leaves only a few dozen are looked at, and the worst of them is followed towards its root as
long as nothing looked at is worse. While LRU does better (see `duel`), its order is used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from itertools import islice

import numpy as np

from kvbm_common.eviction.duel import Duel
from kvbm_common.eviction.lru import FreeOrder
from kvbm_common.eviction.nodes import (
    DEPTH_KIND,
    DEPTH_KINDS,
    KINDS,
    TURN_KIND,
    Former,
    Node,
    Nodes,
)
from kvbm_common.eviction.one_by_one import OneByOne
from kvbm_common.eviction.reuse_curves import ReuseCurves, bucket_of
from kvbm_common.eviction.sketch import SPREAD, WORD, Sketch, mix, mixed
from kvbm_common.identity import SequenceHash
from kvbm_common.tier.block_columns import BlockColumns

LOOKED_AT = 32
"""Leaves that are looked at before one of them is chosen."""
CHOSEN_PER_LOOK = 2
TURN_MAX = 255

Rank = tuple[float, int, int, SequenceHash]


class PrefixPolicy(OneByOne):
    """Eviction that knows prefixes. The same calls give the same victims, in every process."""

    def __init__(self, slot_count: int = 0) -> None:
        self._nodes = Nodes()
        self._made = self._nodes.get
        self._free = FreeOrder()
        self._leaves: list[SequenceHash] = []
        self._now = 0
        self._draw = SPREAD
        self._sketch = Sketch(slot_count)
        self.returns = ReuseCurves(KINDS, slot_count)
        self.duel = Duel(slot_count)

    # --- what the tier tells ----------------------------------------------------------------

    def fill(self, former: BlockColumns) -> None:
        """Take in the blocks of a former life, as if each was used once: how often is not known.
        That none has come back is no lesson."""
        assert self._now == 0, f"{self._now} uses were seen before the former life"
        words = mixed(former.hashes)
        self._sketch.fill(words)
        in_duel = self.duel.all_sampled(words)
        known = Former(former, in_duel)
        self._nodes.fill(known)
        self._leaves = known.leaves
        self._free.fill(former)
        self._now = len(former)
        waited = np.flatnonzero(self.returns.samples(words)).tolist()
        uses = ((former.names[row], int(known.kinds[row]), row + 1) for row in waited)
        self.returns.fill(uses, self._now)
        sampled = np.flatnonzero(in_duel)
        for row in sampled.tolist():
            self.duel.used(former.names[row], hit=False, again=False)
        for name in former.leaves_first_of(sampled):
            self.duel.freed(name)

    def admit(self, block: SequenceHash, parent: SequenceHash) -> None:
        node = self._come(block, parent)
        self._free.free(block)
        if not node.children:
            self._uncover(block, node)

    def admit_all(self, blocks: Sequence[SequenceHash], parents: Sequence[SequenceHash]) -> None:
        assert len(parents) == len(blocks), f"{len(blocks)} blocks, {len(parents)} parents"
        for block, parent in zip(blocks, parents, strict=True):
            self._come(block, parent)
        self.free_all(blocks[::-1])

    def _come(self, block: SequenceHash, parent: SequenceHash) -> Node:
        """Make the node of a block that has come, and is not free yet."""
        assert not self._nodes.has(block), f"{block.hex()} is here already"
        word = mix(block)
        count = self._sketch.add(word)
        above = self._nodes.find(parent)
        turn, depth = 1, 0
        if above is not None:
            turn = min(above.turn + (above.count > count), TURN_MAX)
            depth = above.depth + 1
        node = Node(parent, turn=turn, depth=depth, sampled=self.duel.samples(word))
        node.children = self._nodes.orphans.pop(block, 0)
        self._nodes.add(block, node)
        if above is None:
            self._nodes.adopt(parent)
        else:
            above.children += 1
            if above.place >= 0:
                self._cover(above)
        self._used(block, node, word, count)
        if node.sampled:
            self.duel.used(block, hit=False, again=count > 1)
        return node

    def touch(self, block: SequenceHash) -> None:
        node = self._made(block) or self._nodes[block]
        word = mix(block)
        self._used(block, node, word, self._sketch.add(word))
        if node.sampled:
            self.duel.used(block, hit=True, again=True)

    def hold(self, block: SequenceHash) -> None:
        self._free.hold(block)
        self._is_held(block)

    def hold_all(self, blocks: Sequence[SequenceHash]) -> None:
        count = len(self._free)
        self._free.hold_all(blocks)
        assert len(self._free) == count - len(blocks), f"{count} blocks became {len(self._free)}"
        for block in blocks:
            self._is_held(block)

    def _is_held(self, block: SequenceHash) -> None:
        node = self._made(block) or self._nodes[block]
        if node.place >= 0:
            self._cover(node)

    def free(self, block: SequenceHash) -> None:
        self._free.free(block)
        self._is_free(block)

    def free_all(self, blocks: Sequence[SequenceHash]) -> None:
        count = len(self._free)
        self._free.free_some(blocks)
        assert len(self._free) == count + len(blocks), f"{count} blocks became {len(self._free)}"
        for block in blocks:
            self._is_free(block)

    def _is_free(self, block: SequenceHash) -> None:
        node = self._made(block) or self._nodes[block]
        if node.sampled:
            self.duel.freed(block)
        if not node.children:
            self._uncover(block, node)

    def forget(self, block: SequenceHash) -> None:
        self._free.hold(block)
        node = self._nodes.take(block)
        if node.place >= 0:
            self._cover(node)
        if node.sampled:
            self.duel.forgot(block)
        self._draw = self._draw * SPREAD + 1 & WORD
        above = self._nodes.find(node.parent)
        if above is None:
            self._nodes.lose(node.parent)
            return
        above.children -= 1
        assert above.children >= 0, f"{block.hex()} was no child of {node.parent.hex()}"
        if not above.children and node.parent in self._free:
            self._uncover(node.parent, above)

    def _used(self, block: SequenceHash, node: Node, word: int, count: int) -> None:
        assert count > 0, f"{block.hex()} is used, and was asked for {count} times"
        self._now = node.used = self._now + 1
        node.count = count
        turn = min(node.turn + count - 1, len(TURN_KIND) - 1)
        depth = min(node.depth, len(DEPTH_KIND) - 1)
        node.kind = TURN_KIND[turn] * DEPTH_KINDS + DEPTH_KIND[depth]
        self.returns.used(block, word, node.kind, self._now)

    def _uncover(self, block: SequenceHash, node: Node) -> None:
        """Add a free block without children here to the leaves."""
        assert node.place < 0, f"{block.hex()} is a free leaf already, at {node.place}"
        node.place = len(self._leaves)
        self._leaves.append(block)

    def _cover(self, node: Node) -> None:
        """Remove a node that is no free leaf any more from the leaves."""
        count = len(self._leaves)
        assert 0 <= node.place < count, (
            f"a child of {node.parent.hex()} is at {node.place} of {count} leaves"
        )
        last = self._leaves.pop()
        if node.place < len(self._leaves):
            self._leaves[node.place] = last
            (self._made(last) or self._nodes[last]).place = node.place
        node.place = -1

    # --- what the tier asks -----------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._free)

    def victims(self, count: int) -> list[SequenceHash]:
        chosen = _Chosen(self._nodes, self._free, count)
        if self.duel.follows_lru:
            chosen.take_in_order()
        else:
            self._take_worst(chosen)
        if not chosen.full:
            chosen.take_rest()  # Their children are held.
        assert len(chosen.names) == chosen.count, f"{len(chosen.names)} of {chosen.count} victims"
        return list(chosen.names)

    def _take_worst(self, chosen: _Chosen) -> None:
        leaves = self._leaves
        few = len(leaves) <= max(LOOKED_AT, 2 * chosen.count)
        looked_at = min(LOOKED_AT, len(leaves) // 2)
        uncovered: list[Rank] = []
        draw = self._draw
        while not chosen.full:
            looked = dict.fromkeys(leaves) if few else {}
            while not few and len(looked) < looked_at:
                draw = draw * SPREAD + 1 & WORD
                looked[leaves[(draw >> 32) * len(leaves) >> 32]] = None
            heap = [self._rank(name) for name in looked if name not in chosen.names] + uncovered
            heapify(heap)
            uncovered = self._follow(heap, chosen, len(leaves) + 1 if few else CHOSEN_PER_LOOK)
            if few:
                return

    def _follow(self, heap: list[Rank], chosen: _Chosen, leaf_count: int) -> list[Rank]:
        """Take the worst, and parents as they are uncovered; returns those not taken."""
        uncovered: dict[SequenceHash, Rank] = {}
        while heap and leaf_count and not chosen.full:
            name = heappop(heap)[3]
            leaf_count -= uncovered.pop(name, None) is None
            parent = chosen.take(name)
            if parent is not None:
                rank = uncovered[parent] = self._rank(parent)
                heappush(heap, rank)
        return list(uncovered.values())

    def _rank(self, name: SequenceHash) -> Rank:
        node = self._nodes[name]
        worth = self.returns.worth[node.kind][bucket_of(self._now - node.used)]
        return worth, node.used, -node.depth, name

    def check(self) -> None:
        """Assert every invariant; O(blocks)."""
        for place, name in enumerate(self._leaves):
            assert self._nodes[name].place == place
        leaves = {name for name in self._free if not self._nodes[name].children}
        assert set(self._leaves) == leaves
        for name, node in self._nodes.check().items():
            assert (node.place >= 0) == (name in leaves)


class _Chosen:
    """Victims being chosen, leaves first."""

    def __init__(self, nodes: Nodes, free: FreeOrder, count: int) -> None:
        assert count >= 0, f"{count} victims are asked for"
        self.count = min(count, len(free))
        self.names: dict[SequenceHash, None] = {}
        self._nodes = nodes
        self._free = free
        self._left: dict[SequenceHash, int] = {}
        """Block that loses children → how many it has left."""

    @property
    def full(self) -> bool:
        """As many as were asked for."""
        return len(self.names) >= self.count

    def take(self, name: SequenceHash) -> SequenceHash | None:
        """Take one; returns its parent when that is a free leaf now."""
        assert name not in self.names, f"{name.hex()} is chosen twice"
        self.names[name] = None
        parent = self._nodes[name].parent
        if parent not in self._free:
            return None
        left = self._left[parent] = self._children(parent) - 1
        return parent if left == 0 else None

    def _children(self, name: SequenceHash) -> int:
        left = self._left.get(name)
        return self._nodes[name].children if left is None else left

    def take_in_order(self) -> None:
        """Take blocks as LRU does, in the order of their freeing, but children before parents."""
        passed: set[SequenceHash] = set()
        for name in self._free:
            if self.full:
                return
            if self._children(name):
                passed.add(name)
                continue
            parent = self.take(name)
            while parent in passed and not self.full:
                parent = self.take(parent)

    def take_rest(self) -> None:
        """Take the free blocks that have a held block after them; still children first."""
        rest = [name for name in self._free if name not in self.names]
        before = Counter(self._nodes[name].parent for name in rest)
        ready = [name for name in rest if not before[name]]
        for name in ready:
            if self.full:
                return
            self.names[name] = None
            parent = self._nodes[name].parent
            before[parent] -= 1
            if not before[parent] and parent in self._free:
                ready.append(parent)
        # Blocks that an engine says are before each other have no end to begin at.
        circle = (name for name in rest if name not in self.names)
        self.names.update(dict.fromkeys(islice(circle, self.count - len(self.names))))
