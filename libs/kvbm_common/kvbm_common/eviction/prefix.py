"""`prefix`: leaves first, the least worth of them, as learned from what comes back.

A tier's blocks are a forest: a block is of use only behind its parent. So only a block without
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

from collections import Counter, OrderedDict
from heapq import heapify, heappop, heappush

from kvbm_common.eviction.duel import Duel
from kvbm_common.eviction.returns import Returns, bucket_of
from kvbm_common.eviction.sketch import SPREAD, WORD, Sketch, mix
from kvbm_common.identity import SequenceHash

LOOKED_AT = 32
"""Leaves that are looked at before one of them is chosen."""
CHOSEN_PER_LOOK = 2
TURN_ENDS = (1, 2, 3, 5, 9)
"""Turns up to each are of one kind, and all beyond the last."""
DEPTH_ENDS = (3, 15, 63)
DEPTH_KINDS = len(DEPTH_ENDS) + 1
KINDS = (len(TURN_ENDS) + 1) * DEPTH_KINDS
TURN_MAX = 255


def _kinds(ends: tuple[int, ...]) -> list[int]:
    return [sum(value > end for end in ends) for value in range(ends[-1] + 2)]


TURN_KIND = _kinds(TURN_ENDS)
DEPTH_KIND = _kinds(DEPTH_ENDS)


class Node:
    """What is known of a block that is here."""

    __slots__ = ("count", "depth", "kind", "parent", "place", "sampled", "turn", "used")

    def __init__(self, parent: SequenceHash, *, turn: int, depth: int, sampled: bool) -> None:
        self.parent = parent
        self.turn = turn
        self.depth = depth
        self.sampled = sampled
        self.count = 0
        """How often it was asked for lately, here or not."""
        self.used = 0
        self.kind = 0
        self.place = -1
        """Index among the free leaves, or -1."""


Rank = tuple[float, int, int, SequenceHash]


class PrefixPolicy:
    """Eviction that knows prefixes. The same calls give the same victims, in every process."""

    def __init__(self, slot_count: int = 0) -> None:
        self._nodes: dict[SequenceHash, Node] = {}
        self._children: dict[SequenceHash, int] = {}
        self._free: OrderedDict[SequenceHash, None] = OrderedDict()
        self._leaves: list[SequenceHash] = []
        self._now = 0
        self._draw = SPREAD
        self._sketch = Sketch(slot_count)
        self.returns = Returns(KINDS, slot_count)
        self.duel = Duel(slot_count)

    # --- what the tier tells ----------------------------------------------------------------

    def admit(self, block: SequenceHash, parent: SequenceHash) -> None:
        assert block not in self._nodes
        word = mix(block)
        count = self._sketch.add(word)
        above = self._nodes.get(parent)
        turn, depth = 1, 0
        if above is not None:
            turn = min(above.turn + (above.count > count), TURN_MAX)
            depth = above.depth + 1
        node = Node(parent, turn=turn, depth=depth, sampled=self.duel.samples(word))
        self._nodes[block] = node
        self._children[parent] = self._children.get(parent, 0) + 1
        if above is not None and above.place >= 0:
            self._cover(above)
        self._free[block] = None
        if block not in self._children:
            self._uncover(block, node)
        self._used(block, node, word, count)
        if node.sampled:
            self.duel.used(block, hit=False, again=count > 1)

    def touch(self, block: SequenceHash) -> None:
        node = self._nodes[block]
        word = mix(block)
        self._used(block, node, word, self._sketch.add(word))
        if node.sampled:
            self.duel.used(block, hit=True, again=True)

    def hold(self, block: SequenceHash) -> None:
        del self._free[block]
        node = self._nodes[block]
        if node.place >= 0:
            self._cover(node)

    def free(self, block: SequenceHash) -> None:
        assert block not in self._free
        self._free[block] = None
        node = self._nodes[block]
        if node.sampled:
            self.duel.freed(block)
        if block not in self._children:
            self._uncover(block, node)

    def forget(self, block: SequenceHash) -> None:
        del self._free[block]
        node = self._nodes.pop(block)
        if node.place >= 0:
            self._cover(node)
        if node.sampled:
            self.duel.forgot(block)
        self._draw = self._draw * SPREAD + 1 & WORD
        left = self._children[node.parent] - 1
        if left:
            self._children[node.parent] = left
            return
        del self._children[node.parent]
        above = self._nodes.get(node.parent)
        if above is not None and node.parent in self._free:
            self._uncover(node.parent, above)

    def _used(self, block: SequenceHash, node: Node, word: int, count: int) -> None:
        self._now = node.used = self._now + 1
        node.count = count
        turn = min(node.turn + count - 1, len(TURN_KIND) - 1)
        depth = min(node.depth, len(DEPTH_KIND) - 1)
        node.kind = TURN_KIND[turn] * DEPTH_KINDS + DEPTH_KIND[depth]
        self.returns.used(block, word, node.kind, self._now)

    def _uncover(self, block: SequenceHash, node: Node) -> None:
        """A free block without children here: a leaf."""
        node.place = len(self._leaves)
        self._leaves.append(block)

    def _cover(self, node: Node) -> None:
        """No free leaf any more."""
        last = self._leaves.pop()
        if node.place < len(self._leaves):
            self._leaves[node.place] = last
            self._nodes[last].place = node.place
        node.place = -1

    # --- what the tier asks -----------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._free)

    def victims(self, count: int) -> list[SequenceHash]:
        chosen = _Chosen(self._nodes, self._free, self._children, count)
        if self.duel.follows_lru:
            chosen.take_in_order()
        else:
            self._take_worst(chosen)
        if not chosen.full:
            chosen.take_rest()  # Their children are held.
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
        leaves = {name for name in self._free if name not in self._children}
        assert set(self._leaves) == leaves
        assert sum(self._children.values()) == len(self._nodes)
        for name, node in self._nodes.items():
            assert self._children[node.parent] > 0
            assert (node.place >= 0) == (name in leaves)


class _Chosen:
    """Victims being chosen, leaves first."""

    def __init__(
        self,
        nodes: dict[SequenceHash, Node],
        free: OrderedDict[SequenceHash, None],
        children: dict[SequenceHash, int],
        count: int,
    ) -> None:
        self.count = min(count, len(free))
        self.names: dict[SequenceHash, None] = {}
        self._nodes = nodes
        self._free = free
        self._children = children
        self._left: dict[SequenceHash, int] = {}

    @property
    def full(self) -> bool:
        """As many as were asked for."""
        return len(self.names) >= self.count

    def take(self, name: SequenceHash) -> SequenceHash | None:
        """Take one; returns its parent when that is a free leaf now."""
        self.names[name] = None
        parent = self._nodes[name].parent
        left = self._left.get(parent, self._children[parent]) - 1
        self._left[parent] = left
        return parent if left == 0 and parent in self._free else None

    def take_in_order(self) -> None:
        """LRU: in the order in which they were freed, but no parent before its children."""
        passed: set[SequenceHash] = set()
        for name in self._free:
            if self.full:
                return
            if self._left.get(name, self._children.get(name, 0)):
                passed.add(name)
                continue
            parent = self.take(name)
            while parent in passed and not self.full:
                parent = self.take(parent)

    def take_rest(self) -> None:
        """Whatever is free, and of which something behind it is held; still children first."""
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
