"""Chains: the blocks of one holder as segments, so that a long run costs as much as a short one.

A *segment* is a stretch of consecutive blocks: their 16-byte names back to back. Each block's
parent is the block before it; only the first one's parent is stored. Every block that is held is in
exactly one segment. Here the segment of 0 begins a namespace, and the segment of 12 hangs on 3:

    head                                  tail
    ┌────┬────┬────┬────┬────┬────┬────┬────┐
    │ 0  │ 1  │ 2  │ 3  │ 4  │ 5  │ 6  │ 7  │      `_heads`: 0 and 12, `_tails`: 7 and 13
    └────┴────┴────┴────┴────┴────┴────┴────┘
                     │   ┌────┬────┐
                     └──►│ 12 │ 13 │               `_children`: 3 → {12}
                         └────┴────┘

A name stands for its whole prefix. Therefore:

1. A block has one parent.
2. A block is a head, or it is directly after its parent.
3. If block i of a question is block i of a segment, all before it agree: the end of a run is a
   binary search.

Events extend or shorten chains at their ends, which is two dict lookups (`_heads`, `_tails`),
however many blocks there are. Only what happens in the middle (a branch, a removal, a question
that does not begin with a first block) has to find a block's segment. The table for that,
`_segment_by_block`, lags behind: `index_some` brings it up to date piece by piece, or a question
does at once, at 0.3 µs a block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from itertools import pairwise

from kvbm_common.identity import HASH_BYTES, SequenceHash, unpack_hashes
from kvbm_common.tier.block_lookup import BlockLookup

from kvbm_index.core.image import SegmentImage
from kvbm_index.core.segments import Segment, take_from_end, take_from_front

NO_LIMIT = 1 << 32
"""A number of blocks that no chain has."""


class Chains:
    """All segments of one holder. False when it holds nothing.

    A broken source may name a block twice, or give one block two parents. No answer about it is
    right then, but nothing fails: entries of `_heads`, `_tails` and `_children` may be missing.
    """

    __slots__ = ("_bytes", "_children", "_heads", "_segment_by_block", "_tails", "_unindexed")

    def __init__(self) -> None:
        self._heads: dict[bytes, Segment] = {}
        self._tails: dict[bytes, Segment] = {}
        self._children: dict[bytes, set[bytes]] = {}
        """Parent → heads after it. The parent need not be held. Rooted heads are left out."""
        self._bytes = 0
        """Bytes of all names."""
        self._segment_by_block: BlockLookup[Segment] = BlockLookup()
        self._unindexed: set[Segment] = set()

    def __len__(self) -> int:
        return self._bytes // HASH_BYTES

    def __contains__(self, block: bytes) -> bool:
        if block in self._heads or block in self._segment_by_block:
            return True
        return bool(self._unindexed) and self._segment_of(block) is not None

    def among(self, blocks: Set[bytes]) -> Set[bytes]:
        """Return those of some blocks that are held."""
        self.index_some(NO_LIMIT)
        return self._segment_by_block.among(blocks)

    def begins_with(self, block: bytes) -> bool:
        """Return whether a block is the first of its segment. A namespace's first always is."""
        return block in self._heads

    def __iter__(self) -> Iterator[SequenceHash]:
        return iter(unpack_hashes(self.names()))

    def names(self) -> bytes:
        """Return the names of all blocks, back to back; 10 ms for a million in short segments."""
        return b"".join([one.blocks for one in self._heads.values()])

    def starts(self) -> Iterator[bytes]:
        """Return the first blocks of namespaces."""
        return (head for head, segment in self._heads.items() if segment.rooted)

    def images(self) -> list[SegmentImage]:
        """Return every segment there is."""
        return [
            SegmentImage(one.parent, bytes(one.blocks), one.rooted) for one in self._heads.values()
        ]

    def load(self, images: Sequence[SegmentImage]) -> None:
        """Fill an empty holder from an image."""
        assert not self._heads, "the holder is not empty"
        for image in images:
            self._begin(image.parent, image.blocks, rooted=image.rooted)

    def add(self, parent: bytes, run: bytes, *, rooted: bool) -> None:
        """Hold a run of blocks, back to back, after its parent (`rooted`: a namespace's root).

        After a tail, no block of the run can be held yet, unless a held block has its parent
        inside the run. Such a block is a head, and its parent is in `_children`: only then is the
        run added block by block.
        """
        if not run:
            return
        assert not len(run) % HASH_BYTES, f"a run of {len(run)} bytes after {parent.hex()}"
        first, several = run[:HASH_BYTES], len(run) > HASH_BYTES
        if first in self._heads:  # A known head: the rest may be new.
            if several:
                self._add_singly(parent, run, rooted=rooted)
        elif several and self._children and self._has_parents(run[:-HASH_BYTES]):  # Closes a hole.
            self._add_singly(parent, run, rooted=rooted)
        elif (before := self._tails.get(parent)) is not None:  # Extends a segment.
            self._extend(before, run, parent)
        elif rooted or (above := self._find(parent)) is None:  # A new segment.
            self._begin(parent, run, rooted=rooted)
            self._join(run[-HASH_BYTES:])
        elif not above[0].blocks.startswith(first, above[1] + HASH_BYTES):  # A new branch.
            self._begin(parent, run, rooted=False)
            self._join(run[-HASH_BYTES:])
        elif several:  # Its first block is held in the middle of a segment: the rest may be new.
            self._add_singly(parent, run, rooted=False)

    def _has_parents(self, run: bytes) -> bool:
        """Tell whether a head hangs on a block of this run."""
        return not self._children.keys().isdisjoint(unpack_hashes(run))

    def _add_singly(self, parent: bytes, run: bytes, *, rooted: bool) -> None:
        """Add a run block by block, because some of it may be held."""
        assert len(run) > HASH_BYTES, "one block is added as one"
        for block in unpack_hashes(run):
            self.add(parent, block, rooted=rooted)
            parent, rooted = block, False

    def _extend(self, segment: Segment, run: bytes, tail: bytes) -> None:
        new_tail = run[-HASH_BYTES:]
        self._tails.pop(tail, None)
        self._tails[new_tail] = segment
        blocks = segment.blocks
        assert segment.indexed <= len(blocks), f"{segment.indexed} of {len(blocks)} bytes indexed"
        if segment.indexed == len(blocks):
            self._unindexed.add(segment)
        blocks += run
        self._bytes += len(run)
        if self._children:
            self._join(new_tail)

    def _begin(self, parent: bytes, run: bytes | bytearray, *, rooted: bool) -> Segment:
        segment = Segment(parent, run, rooted=rooted)
        self._bytes += len(run)
        self._unindexed.add(segment)
        self._tails[segment.tail] = segment
        self._name_head(segment)
        return segment

    def _join(self, tail: bytes) -> None:
        """Join the segment that waited for `tail` to it. Several are branches, and stay."""
        heads = self._children.get(tail)
        if heads is None or len(heads) != 1:
            return
        before, after = self._tails[tail], self._heads.get(next(iter(heads)))
        if after is None or after is before:
            return  # The source is broken: see `Chains`.
        del self._tails[tail]
        self._forget_head(after)
        self._unindex(after, 0)
        self._unindexed.discard(after)
        self._unindexed.add(before)
        before.blocks += after.blocks
        self._tails[after.tail] = before

    # ---- removed -----------------------------------------------------------------------------

    def discard(self, packed: bytes) -> None:
        """Drop these blocks, back to back in any order; what is not held is passed over."""
        if not packed:
            return
        assert not len(packed) % HASH_BYTES, f"{len(packed)} bytes of names"
        first, last = packed[:HASH_BYTES], packed[-HASH_BYTES:]
        if (one := self._tails.get(last)) and one.blocks.endswith(packed):
            self._cut_end(one, len(packed))
        elif (one := self._heads.get(first)) and one.blocks.startswith(packed):
            self._cut_front(one, len(packed))
        elif len(packed) == HASH_BYTES:
            self._discard_inner(packed)
        else:
            self._discard_others(unpack_hashes(packed))

    def _discard_others(self, blocks: Sequence[bytes]) -> None:
        """Drop blocks of several chains. Engines name the leaf first: try the reversed order as
        the end of a chain, then ends, then fronts."""
        assert len(blocks) > 1, "one block is dropped as one"
        turned = b"".join(reversed(blocks))
        one = self._tails.get(blocks[0])
        if one is not None and one.blocks.endswith(turned):
            self._cut_end(one, len(turned))
            return
        gone = set(blocks)
        for block in blocks:
            if block in gone and (one := self._tails.get(block)):
                self._cut_end(one, take_from_end(one.blocks, gone))
            elif block in gone and (one := self._heads.get(block)):
                self._cut_front(one, take_from_front(one.blocks, gone))
        # What is left was named root first: from the back, each is a tail when its turn comes.
        for block in reversed(blocks):
            if block in gone:
                self.discard(block)

    def _discard_inner(self, block: bytes) -> None:
        if (found := self._find(block)) is not None:
            segment, end = found[0], found[1] + HASH_BYTES
            inner = end < len(segment.blocks)  # Always, unless the source is broken.
            self._cut_end(self._split(segment, end) if inner else segment, HASH_BYTES)

    def _cut_end(self, segment: Segment, count: int) -> None:
        """Drop the last `count` bytes of a segment."""
        blocks = segment.blocks
        assert 0 < count <= len(blocks), f"the last {count} of {len(blocks)} bytes"
        if count == len(blocks):
            self._end(segment)
            return
        self._bytes -= count
        self._tails.pop(bytes(blocks[-HASH_BYTES:]), None)
        rest = len(blocks) - count
        if segment.indexed > rest:
            self._unindex(segment, rest)
        del blocks[rest:]
        self._tails[bytes(blocks[-HASH_BYTES:])] = segment
        if segment.indexed == rest:
            self._unindexed.discard(segment)

    def _cut_front(self, segment: Segment, count: int) -> None:
        """Drop the first `count` bytes of a segment; the rest hangs on a block that is gone."""
        blocks = segment.blocks
        assert 0 < count <= len(blocks), f"the first {count} of {len(blocks)} bytes"
        if count == len(blocks):
            self._end(segment)
            return
        self._bytes -= count
        self._forget_head(segment)
        indexed = min(count, segment.indexed)
        self._segment_by_block.drop(unpack_hashes(blocks[:indexed]))
        segment.indexed -= indexed
        segment.parent = bytes(blocks[count - HASH_BYTES : count])
        segment.rooted = False
        del blocks[:count]
        self._name_head(segment)
        if segment.indexed == len(blocks):
            self._unindexed.discard(segment)

    def _end(self, segment: Segment) -> None:
        self._bytes -= len(segment.blocks)
        self._forget_head(segment)
        self._tails.pop(segment.tail, None)
        self._unindex(segment, 0)
        self._unindexed.discard(segment)

    def _split(self, segment: Segment, at: int) -> Segment:
        """Make two segments of one and return the first. The smaller part is moved."""
        blocks = segment.blocks
        assert 0 < at < len(blocks), "both have something"
        parent = bytes(blocks[at - HASH_BYTES : at])
        if 2 * at > len(blocks):
            self._unindex(segment, at)
            self._tails.pop(segment.tail, None)
            self._bytes -= len(blocks) - at
            self._begin(parent, blocks[at:], rooted=False)
            del blocks[at:]
            self._tails[segment.tail] = segment
            return segment
        above, rooted, front = segment.parent, segment.rooted, blocks[:at]
        self._cut_front(segment, at)
        return self._begin(above, front, rooted=rooted)

    def shed(self) -> int:
        """Free a part of a holder that no question reaches any more.

        Returns how many blocks' worth of work it was. The holder is false when all has gone.
        """
        if self._segment_by_block:
            return 1 + self._segment_by_block.shed()
        count = 1 + len(self._heads)
        self._heads, self._tails, self._children, self._unindexed = {}, {}, {}, set()
        self._bytes = 0
        return count

    # ---- heads and the table of segments ------------------------------------------------------

    def _name_head(self, segment: Segment) -> None:
        head = segment.head
        self._heads[head] = segment
        if not segment.rooted:
            self._children.setdefault(segment.parent, set()).add(head)

    def _forget_head(self, segment: Segment) -> None:
        head = segment.head
        self._heads.pop(head, None)
        if not segment.rooted:
            siblings = self._children.get(segment.parent, set())
            siblings.discard(head)
            if not siblings:
                self._children.pop(segment.parent, None)

    def _segment_of(self, block: bytes) -> Segment | None:
        """Return the segment of a block; a table that lags is brought up to date first."""
        if (found := self._segment_by_block.get(block)) is None and self._unindexed:
            self.index_some(NO_LIMIT)
            found = self._segment_by_block.get(block)
        return found

    def _find(self, block: bytes) -> tuple[Segment, int] | None:
        """Return the segment of a block, and its offset there in bytes."""
        segment = self._segment_of(block)
        at = -1 if segment is None else segment.find(block)
        return None if segment is None or at < 0 else (segment, at)

    def index_some(self, room: int) -> int:
        """Bring the table up to date by at most `room` blocks; returns what is left of `room`."""
        while self._unindexed and room > 0:
            segment = self._unindexed.pop()
            start, end = segment.indexed, segment.indexed + room * HASH_BYTES
            fresh = unpack_hashes(segment.blocks[start:end])
            assert fresh, f"all {start} bytes of a segment are in the table already"
            self._segment_by_block.set(fresh, segment)
            segment.indexed += len(fresh) * HASH_BYTES
            room -= len(fresh)
            if segment.indexed < len(segment.blocks):
                self._unindexed.add(segment)
        return room

    def _unindex(self, segment: Segment, start: int) -> None:
        """Take the blocks from this byte on out of the table."""
        if segment.indexed > start:
            self._segment_by_block.drop(unpack_hashes(segment.blocks[start : segment.indexed]))
            segment.indexed = start

    # ---- questions ---------------------------------------------------------------------------

    def run_length(self, asked: Sequence[bytes]) -> int:
        """Return how many of `asked`, from the first on, are held without a hole.

        `asked` is a chain: each block's parent is the one before it.
        """
        if not asked:
            return 0
        if asked[0] in self._heads:
            return self._walk(asked, 0)
        if (found := self._find(asked[0])) is None:
            return 0
        segment, at = found
        # A copy that begins at the block asked for: `common` compares from a head on.
        rest = Segment(segment.parent, segment.blocks[at:], rooted=False)
        length = rest.common(asked, 0)
        return length + self._walk(asked, length)

    def ranges(self, asked: Sequence[bytes]) -> list[tuple[int, int]]:
        """Return the parts of a chain that are held, each without a hole, as (first, end)."""
        end = self.run_length(asked)
        found = [(0, end)] if end else []
        for at in [at for at in range(end, len(asked)) if asked[at] in self._heads]:
            if at >= end:
                end = at + self._walk(asked, at)
                found.append((at, end))
        return found

    def _walk(self, asked: Sequence[bytes], start: int) -> int:
        """Return how many are held from a head on, over all segments on the way."""
        at, heads = start, self._heads
        while at < len(asked) and (segment := heads.get(asked[at])) is not None:
            at += segment.common(asked, at)
        return at - start

    def check(self) -> None:
        """Assert every invariant, in O(n)."""
        held = list(self)
        assert len(held) == len(set(held)) == len(self), "every block is in one segment"
        assert all(one.head == head for head, one in self._heads.items())
        assert {one.tail: one for one in self._heads.values()} == self._tails
        children: dict[bytes, set[bytes]] = {}
        indexed: dict[bytes, Segment] = {}
        child_of: dict[bytes, bytes] = {}
        for one in self._heads.values():
            names = unpack_hashes(one.blocks)
            indexed |= dict.fromkeys(names[: one.indexed // HASH_BYTES], one)
            child_of |= dict(pairwise(names))
            if not one.rooted:
                children.setdefault(one.parent, set()).add(one.head)
            assert (one.indexed < len(one.blocks)) == (one in self._unindexed)
        assert children == self._children, "children are heads by parent"
        table = self._segment_by_block
        assert indexed == {block: table.get(block) for block in table}, "its segment"
        assert self._unindexed <= set(self._heads.values())
        assert all(child_of.get(one.parent) != head for head, one in self._heads.items())
