"""The blocks of one holder as segments, so that a long run costs as much as a short one.

A *segment* is a piece of a chain, its names back to back: each block's parent is the one before it,
the first one's is written down. Every block held is in exactly one segment.

    head                                  tail
    ┌────┬────┬────┬────┬────┬────┬────┬────┐
    │ 0  │ 1  │ 2  │ 3  │ 4  │ 5  │ 6  │ 7  │      `_heads`: 0 and 12, `_tails`: 7 and 13
    └────┴────┴────┴────┴────┴────┴────┴────┘
                     │   ┌────┬────┐
                     └──►│ 12 │ 13 │               `_children`: 3 → {12}
                         └────┴────┘

A name stands for everything before it. So a block has one parent, and is either a head or right
behind its parent in one segment; a question is answered by the segment whose head it begins with,
then by the one whose head comes next; and if block i of a question is block i of a segment, so are
all before it: the end of a run is a binary search.

Events extend or shorten chains at their ends, which is two lookups, however many blocks there are.
Only what happens in the middle (a branch, a removal, a question that does not begin with a first
block) must find a block's segment: that is a listing (`_listed`) which lags behind. It is brought
up to date piece by piece (`list_some`), and, when it is needed, at once: 0.3 µs for each block.

What was tried: a dict from block to parent, with holes and leaves, takes 0.2 µs a block for each
event and 100 bytes; one dict from block to a mask of all holders takes half as long again.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise

from kvbm_common.identity import HASH_BYTES, SequenceHash, unpack_hashes
from kvbm_common.wire.events import Tier

from kvbm_index.image import SegmentImage
from kvbm_index.listing import Listing

ALL = 1 << 32
"""More blocks than there can be."""

HolderTuple = tuple[str, str, Tier, int, int]
"""A `Holder` before it has a name: equal to it, and a third of the time to make."""


class Segment:
    """A piece of a chain."""

    __slots__ = ("blocks", "listed", "parent", "rooted")

    def __init__(self, parent: bytes, blocks: bytes | bytearray, *, rooted: bool) -> None:
        self.parent = parent
        self.blocks = bytearray(blocks)
        self.rooted = rooted
        """The parent is the root of a namespace: not a block."""
        self.listed = 0
        """So many bytes of `blocks` are in `_listed`."""

    @property
    def head(self) -> bytes:
        """The first block."""
        return bytes(self.blocks[:HASH_BYTES])

    @property
    def tail(self) -> bytes:
        """The last block."""
        return bytes(self.blocks[-HASH_BYTES:])

    def common(self, asked: Sequence[bytes], start: int) -> int:
        """How many blocks of `asked`, from `start` on, are here; the first one is the head."""
        blocks = self.blocks
        length = min(len(blocks) // HASH_BYTES, len(asked) - start)
        if blocks.startswith(asked[start + length - 1], (length - 1) * HASH_BYTES):
            return length

        def differs(at: int) -> bool:
            return not blocks.startswith(asked[start + at], at * HASH_BYTES)

        return bisect_left(range(length), True, key=differs)


class Chains:
    """What one holder has. Truthy as long as that is something.

    A broken source may name a block twice, or two parents of one. No answer about it is right
    then, but nothing fails: entries of `_heads`, `_tails` and `_children` may be missing.
    """

    __slots__ = ("_children", "_count", "_heads", "_listed", "_tails", "_unlisted")

    def __init__(self) -> None:
        self._heads: dict[bytes, Segment] = {}
        self._tails: dict[bytes, Segment] = {}
        self._children: dict[bytes, set[bytes]] = {}
        """Heads by parent, whether that is held or not; without those behind a root."""
        self._count = 0
        """Bytes of all names."""
        self._listed: Listing[Segment] = Listing()
        self._unlisted: set[Segment] = set()

    def __len__(self) -> int:
        return self._count // HASH_BYTES

    def __contains__(self, block: bytes) -> bool:
        if block in self._heads or block in self._listed:
            return True
        return bool(self._unlisted) and self._segment_of(block) is not None

    def begins_with(self, block: bytes) -> bool:
        """Whether a block is held and first in its segment, as the first of a namespace must be."""
        return block in self._heads

    def __iter__(self) -> Iterator[SequenceHash]:
        return chain.from_iterable(unpack_hashes(one.blocks) for one in self._heads.values())

    def starts(self) -> Iterator[bytes]:
        """The first blocks of namespaces."""
        return (head for head, segment in self._heads.items() if segment.rooted)

    @property
    def segment_count(self) -> int:
        """Pieces of chains: a question walks from one to the next."""
        return len(self._heads)

    def images(self) -> list[SegmentImage]:
        """Every segment."""
        return [
            SegmentImage(one.parent, bytes(one.blocks), one.rooted) for one in self._heads.values()
        ]

    def load(self, images: Sequence[SegmentImage]) -> None:
        """The segments of an empty holder."""
        assert not self._heads, "an image is loaded first"
        for image in images:
            self._begin(image.parent, image.blocks, rooted=image.rooted)

    # ---- stored ------------------------------------------------------------------------------

    def add(self, parent: bytes, run: bytes, *, rooted: bool) -> None:
        """A run of blocks, back to back, behind its parent (`rooted`: a namespace's root).

        No block can be held before its parent is mentioned without being a head: so what is new
        behind a tail is new altogether, unless somebody's parent is among it.
        """
        if not run:
            return
        first, several = run[:HASH_BYTES], len(run) > HASH_BYTES
        if first in self._heads:
            if several:
                self._add_singly(parent, run, rooted=rooted)
        elif several and self._children and self._has_parents(run[:-HASH_BYTES]):
            self._add_singly(parent, run, rooted=rooted)
        elif (before := self._tails.get(parent)) is not None:
            self._extend(before, run, parent)
        elif rooted or (above := self._find(parent)) is None:
            self._begin(parent, run, rooted=rooted)
            self._join(run[-HASH_BYTES:])
        elif not above[0].blocks.startswith(first, above[1] + HASH_BYTES):
            self._begin(parent, run, rooted=False)
            self._join(run[-HASH_BYTES:])
        elif several:
            self._add_singly(parent, run, rooted=False)

    def _has_parents(self, run: bytes) -> bool:
        return not self._children.keys().isdisjoint(unpack_hashes(run))

    def _add_singly(self, parent: bytes, run: bytes, *, rooted: bool) -> None:
        """Some of these may be held."""
        for block in unpack_hashes(run):
            self.add(parent, block, rooted=rooted)
            parent, rooted = block, False

    def _extend(self, segment: Segment, run: bytes, tail: bytes) -> None:
        new_tail = run[-HASH_BYTES:]
        self._tails.pop(tail, None)
        self._tails[new_tail] = segment
        blocks = segment.blocks
        if segment.listed == len(blocks):
            self._unlisted.add(segment)
        blocks += run
        self._count += len(run)
        if self._children:
            self._join(new_tail)

    def _begin(self, parent: bytes, run: bytes | bytearray, *, rooted: bool) -> Segment:
        segment = Segment(parent, run, rooted=rooted)
        self._count += len(run)
        self._unlisted.add(segment)
        self._tails[segment.tail] = segment
        self._name_head(segment)
        return segment

    def _join(self, tail: bytes) -> None:
        """A hole has healed: what was behind it becomes one segment with what is before it."""
        heads = self._children.get(tail)
        if heads is None or len(heads) != 1:
            return
        before, behind = self._tails[tail], self._heads.get(next(iter(heads)))
        if behind is None or behind is before:
            return  # The source is broken: see `Chains`.
        del self._tails[tail]
        self._forget_head(behind)
        self._unlist(behind, 0)
        self._unlisted.discard(behind)
        self._unlisted.add(before)
        before.blocks += behind.blocks
        self._tails[behind.tail] = before

    # ---- removed -----------------------------------------------------------------------------

    def discard(self, packed: bytes) -> None:
        """These, back to back in any order, are gone; what is not held is passed over."""
        if not packed:
            return
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
        """Engines evict from the leaf on; of several chains, whole ends first."""
        turned = b"".join(reversed(blocks))
        one = self._tails.get(blocks[0])
        if one is not None and one.blocks.endswith(turned):
            self._cut_end(one, len(turned))
            return
        gone = set(blocks)
        for block in blocks:
            if block in gone and (one := self._tails.get(block)):
                self._cut_end(one, _count_behind(one.blocks, gone))
            elif block in gone and (one := self._heads.get(block)):
                self._cut_front(one, _count_before(one.blocks, gone))
        # From the root on, the last is the end of a chain by the time that its turn comes.
        for block in reversed(blocks):
            if block in gone:
                self.discard(block)

    def _discard_inner(self, block: bytes) -> None:
        found = self._find(block)
        if found is not None:
            segment, at = found
            end = at + HASH_BYTES
            inner = end < len(segment.blocks)  # Always, unless the source is broken.
            self._cut_end(self._split(segment, end) if inner else segment, HASH_BYTES)

    def _cut_end(self, segment: Segment, count: int) -> None:
        """The last so many bytes are gone."""
        blocks = segment.blocks
        if count == len(blocks):
            self._end(segment)
            return
        self._count -= count
        self._tails.pop(bytes(blocks[-HASH_BYTES:]), None)
        rest = len(blocks) - count
        if segment.listed > rest:
            self._unlist(segment, rest)
        del blocks[rest:]
        self._tails[bytes(blocks[-HASH_BYTES:])] = segment
        if segment.listed == rest:
            self._unlisted.discard(segment)

    def _cut_front(self, segment: Segment, count: int) -> None:
        """The first so many bytes are gone; what is left has lost its parent."""
        blocks = segment.blocks
        if count == len(blocks):
            self._end(segment)
            return
        self._count -= count
        self._forget_head(segment)
        listed = min(count, segment.listed)
        self._listed.drop(unpack_hashes(blocks[:listed]))
        segment.listed -= listed
        segment.parent = bytes(blocks[count - HASH_BYTES : count])
        segment.rooted = False
        del blocks[:count]
        self._name_head(segment)
        if segment.listed == len(blocks):
            self._unlisted.discard(segment)

    def _end(self, segment: Segment) -> None:
        self._count -= len(segment.blocks)
        self._forget_head(segment)
        self._tails.pop(segment.tail, None)
        self._unlist(segment, 0)
        self._unlisted.discard(segment)

    def _split(self, segment: Segment, at: int) -> Segment:
        """Make two of one; returns the first. The smaller part is moved."""
        blocks = segment.blocks
        assert 0 < at < len(blocks), "both have something"
        parent = bytes(blocks[at - HASH_BYTES : at])
        if 2 * at > len(blocks):
            self._unlist(segment, at)
            self._tails.pop(segment.tail, None)
            self._count -= len(blocks) - at
            self._begin(parent, blocks[at:], rooted=False)
            del blocks[at:]
            self._tails[segment.tail] = segment
            return segment
        above, rooted, front = segment.parent, segment.rooted, blocks[:at]
        self._cut_front(segment, at)
        return self._begin(above, front, rooted=rooted)

    def shed(self) -> int:
        """Let go of a part of what is held; only for what nobody asks any more.

        Returns how many blocks' worth of work it was; what is left is falsy when all has gone.
        """
        if self._listed:
            return 1 + self._listed.shed()
        count = 1 + len(self._heads)
        self._heads, self._tails, self._children, self._unlisted = {}, {}, {}, set()
        self._count = 0
        return count

    # ---- heads and lists ---------------------------------------------------------------------

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
        found = self._listed.get(block)
        if found is None and self._unlisted:
            self._list()
            found = self._listed.get(block)
        return found

    def _find(self, block: bytes) -> tuple[Segment, int] | None:
        """The segment of a block, and its offset there in bytes."""
        segment = self._segment_of(block)
        if segment is None:
            return None
        at = segment.blocks.find(block)
        while at >= 0 and at % HASH_BYTES:
            at = segment.blocks.find(block, at + 1)
        return (segment, at) if at >= 0 else None

    def _list(self) -> None:
        self.list_some(ALL)

    def list_some(self, room: int) -> int:
        """Bring the list up to date by at most so many blocks; returns how many are left of it."""
        while self._unlisted and room > 0:
            segment = self._unlisted.pop()
            start, end = segment.listed, segment.listed + room * HASH_BYTES
            fresh = unpack_hashes(segment.blocks[start:end])
            self._listed.set(fresh, segment)
            segment.listed += len(fresh) * HASH_BYTES
            room -= len(fresh)
            if segment.listed < len(segment.blocks):
                self._unlisted.add(segment)
        return room

    def _unlist(self, segment: Segment, start: int) -> None:
        """No block from this byte on is listed."""
        if segment.listed > start:
            self._listed.drop(unpack_hashes(segment.blocks[start : segment.listed]))
            segment.listed = start

    # ---- questions ---------------------------------------------------------------------------

    def run_length(self, asked: Sequence[bytes]) -> int:
        """How many of `asked`, from the first on, are held without a hole.

        `asked` is a chain: each one's parent is the one before it.
        """
        return self._run_from(asked, 0)

    def ranges(self, asked: Sequence[bytes]) -> list[tuple[int, int]]:
        """Which parts of a chain are held, each without a hole: first and behind the last."""
        end = self._run_from(asked, 0)
        found = [(0, end)] if end else []
        for at in [at for at, block in enumerate(asked) if block in self._heads]:
            if at >= end:
                end = at + self._walk(asked, at)
                found.append((at, end))
        return found

    def _run_from(self, asked: Sequence[bytes], start: int) -> int:
        if start >= len(asked):
            return 0
        if asked[start] in self._heads:
            return self._walk(asked, start)
        found = self._find(asked[start])
        if found is None:
            return 0
        segment, at = found
        rest = Segment(segment.parent, segment.blocks[at:], rooted=False)
        length = rest.common(asked, start)
        return length + self._walk(asked, start + length)

    def _walk(self, asked: Sequence[bytes], start: int) -> int:
        """How many are held from a head on, over all segments on the way."""
        at, heads = start, self._heads
        while at < len(asked) and (segment := heads.get(asked[at])) is not None:
            at += segment.common(asked, at)
        return at - start

    def check(self) -> None:
        """Every invariant, O(n)."""
        held = list(self)
        assert len(held) == len(set(held)) == len(self), "every block is in one segment"
        assert all(one.head == head for head, one in self._heads.items())
        assert {one.tail: one for one in self._heads.values()} == self._tails
        children: dict[bytes, set[bytes]] = {}
        listed: dict[bytes, Segment] = {}
        behind: dict[bytes, bytes] = {}
        for one in self._heads.values():
            names = unpack_hashes(one.blocks)
            listed |= dict.fromkeys(names[: one.listed // HASH_BYTES], one)
            behind |= dict(pairwise(names))
            if not one.rooted:
                children.setdefault(one.parent, set()).add(one.head)
            assert (one.listed < len(one.blocks)) == (one in self._unlisted)
        assert children == self._children, "children are heads by parent"
        assert listed == {block: self._listed.get(block) for block in self._listed}, (
            "what is listed is where the list says"
        )
        assert self._unlisted <= set(self._heads.values())
        assert all(behind.get(one.parent) != head for head, one in self._heads.items())


def _count_behind(blocks: bytearray, gone: set[bytes]) -> int:
    """How many bytes of the end are blocks of `gone`; these are taken out of it."""
    end = len(blocks)
    while end and (block := bytes(blocks[end - HASH_BYTES : end])) in gone:
        gone.remove(block)
        end -= HASH_BYTES
    return len(blocks) - end


def _count_before(blocks: bytearray, gone: set[bytes]) -> int:
    """How many bytes of the beginning are blocks of `gone`; these are taken out of it."""
    start = 0
    while start < len(blocks) and (block := bytes(blocks[start : start + HASH_BYTES])) in gone:
        gone.remove(block)
        start += HASH_BYTES
    return start
