"""KV groups: the blocks of each group that a hit needs, and the largest hit that blocks allow.

A model with several kinds of attention keeps several KV caches, its groups. Each has blocks of its
own, with names of its own and a size of its own. A hit ends at a boundary, a number of tokens
after which the engine computes on. What it needs of a group depends on the kind of attention:

    prefix     every block before the boundary (full attention)
    window(n)  the last n blocks before the boundary (sliding window); one, where a block is the
               state of a recurrent layer
    chunk(n)   the blocks of the chunk of n tokens in which the boundary lies (chunked attention)

Blocks are counted from the first one that is asked for: what is before it is on the device, where
every group has what it needs up to there. Chunks are counted from the first token of the sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import lcm

import msgspec

from kvbm_common.identity import SequenceHash

GROUPS_MAX = 64
"""KV groups of one model: a handful."""
WINDOW_BLOCKS_MAX = 65_536
CHUNK_TOKENS_MAX = 1 << 30
LOOK_BLOCKS = 64
"""Blocks of a prefix that are looked at together: after the first that is missing, this many are
looked at in vain at most. For a window so many more are looked at, then twice as many each time."""


class GroupRun(msgspec.Struct, frozen=True, array_like=True):
    """The blocks of one group that a lookup asks for: `blocks` of `block_tokens` tokens each.

    `window_blocks` before a boundary are what a hit needs (`window`); both 0: all blocks before it.
    """

    block_tokens: int
    blocks: int
    window_blocks: int = 0
    chunk_tokens: int = 0
    """Tokens of a chunk, for the rule of that name; 0: another rule."""
    offset: int = 0
    """Tokens of the sequence before the first block that is asked for."""

    @property
    def is_prefix(self) -> bool:
        """Return whether a hit needs every block before its boundary."""
        return not self.window_blocks and not self.chunk_tokens

    def first_needed(self, tokens: int) -> int:
        """Return the index of the first block that a hit of so many tokens needs."""
        end, rest = divmod(tokens, self.block_tokens)
        assert rest == 0, f"{tokens} tokens are no boundary of {self}"
        if self.chunk_tokens:
            begin = (self.offset + tokens) // self.chunk_tokens * self.chunk_tokens - self.offset
            return max(0, begin) // self.block_tokens
        return max(0, end - self.window_blocks) if self.window_blocks else 0


@dataclass(frozen=True, slots=True)
class Reach:
    """The reach of blocks, in tokens from the first one that is asked for."""

    tokens: int
    """The largest boundary at which every group has what a hit needs."""
    shared: int
    """The boundary up to which every group that needs all blocks has them."""


Names = Sequence[Sequence[SequenceHash]]
"""The names of every group's blocks, in the order of the groups."""
Has = Callable[[Sequence[SequenceHash]], bytes]
"""Tells which of some blocks are there: a byte for each, 1 or 0. It is asked for many at once: a
long prompt has thousands."""


def has_each(has: Callable[[SequenceHash], bool]) -> Has:
    """Return a `Has` that asks `has` about each block."""
    return lambda names: bytes(map(has, names))


def split(groups: Iterable[GroupRun], names: Sequence[SequenceHash]) -> Names:
    """Return the names of each group's blocks, which come one group after the other."""
    found: list[Sequence[SequenceHash]] = []
    start = 0
    for group in groups:
        found.append(names[start : start + group.blocks])
        start += group.blocks
    assert start == len(names), f"{len(names)} names, and groups have {start}"
    return found


def indispensable(
    groups: Sequence[GroupRun], names: Sequence[SequenceHash]
) -> Sequence[SequenceHash]:
    """Return the names that every hit has: the first of each prefix."""
    if not groups:
        return names[:1]
    firsts: list[SequenceHash] = []
    start = 0
    for group in groups:
        if group.is_prefix and group.blocks:
            firsts.append(names[start])
        start += group.blocks
    return firsts


def boundary_tokens(groups: Iterable[GroupRun]) -> int:
    """Return the tokens between two boundaries: at each of them, blocks of all groups end."""
    step = lcm(*[group.block_tokens for group in groups])
    assert step > 0, f"a group of {groups} has blocks without tokens"
    return step


def largest_boundary(groups: Sequence[GroupRun]) -> int:
    """Return the largest boundary that is asked for, in tokens."""
    return _largest(groups, boundary_tokens(groups))


def _largest(groups: Sequence[GroupRun], step: int) -> int:
    assert groups, "a hit over no group has no boundary"
    return min([group.blocks * group.block_tokens for group in groups]) // step * step


def needed(groups: Sequence[GroupRun], tokens: int) -> list[range]:
    """Return, for each group, the indices of the blocks that a hit of so many tokens needs."""
    return [range(one.first_needed(tokens), tokens // one.block_tokens) for one in groups]


def needed_names(groups: Sequence[GroupRun], names: Names, tokens: int) -> list[SequenceHash]:
    """Return the names of the blocks that a hit of so many tokens needs, group after group."""
    chosen: list[SequenceHash] = []
    for found, places in zip(names, needed(groups, tokens), strict=True):
        chosen += found[places.start : places.stop]
    return chosen


def reach(
    groups: Sequence[GroupRun],
    names: Names,
    has: Has,
    *,
    most: int | None = None,
    shared: int = 0,
) -> Reach:
    """Return how far the blocks for which `has` is true reach, at most `most` tokens. Every prefix
    is known to have the first `shared` tokens.

    Each block is looked at once at most: those of a prefix from the front until one is missing,
    others from the back.
    """
    step = boundary_tokens(groups)
    tokens = _largest(groups, step)
    if most is not None:
        tokens = min(tokens, most // step * step)
    for group, found in zip(groups, names, strict=True):
        if group.is_prefix:
            tokens = min(tokens, _prefix(group, found, has, tokens, shared) // step * step)
    shared = tokens
    others = [
        _FoundBlocks(one, found, has, tokens // one.block_tokens)
        for one, found in zip(groups, names, strict=True)
        if not one.is_prefix
    ]
    at = agreed = 0
    while tokens and agreed < len(others):
        reached = others[at].boundary(tokens, step)
        agreed = agreed + 1 if reached == tokens else 1
        tokens, at = reached, (at + 1) % len(others)
    assert 0 <= tokens <= shared, f"{tokens} tokens, {shared} shared"
    assert not tokens % step, f"{tokens} tokens are no boundary of {groups}"
    return Reach(tokens, shared)


def _prefix(group: GroupRun, names: Sequence[SequenceHash], has: Has, most: int, known: int) -> int:
    """Return the tokens of the blocks before the first one that is missing; the first `known` of
    them are there."""
    end = most // group.block_tokens
    assert end <= len(names), f"{most} tokens of {len(names)} blocks"
    for start in range(known // group.block_tokens, end, LOOK_BLOCKS):
        gap = has(names[start : min(end, start + LOOK_BLOCKS)]).find(0)
        if gap >= 0:
            return (start + gap) * group.block_tokens
    return most


class _FoundBlocks:
    """The blocks of a group that is no prefix: which are there, looked up from the last one back.

    Byte 0 is the last block: `find` takes as long as what it searches, and `rfind` as often as long
    as a window has blocks.
    """

    def __init__(
        self, group: GroupRun, names: Sequence[SequenceHash], has: Has, count: int
    ) -> None:
        assert 0 <= count <= len(names), f"{count} of {len(names)} blocks"
        self._group, self._names, self._has = group, names, has
        self._window = b"\1" * group.window_blocks
        self._there = bytearray(count)
        self._looked = 0
        """Blocks at the end that have been looked at, or that no boundary needs any more."""

    def boundary(self, most: int, step: int) -> int:
        """Return the largest boundary of at most `most` tokens, a multiple of `step`, at which all
        is there that a hit needs."""
        group, there = self._group, self._there
        size, count = group.block_tokens, len(there)
        tokens = most
        while tokens:
            needed_from, needed_to = count - tokens // size, count - group.first_needed(tokens)
            self._looked = max(self._looked, needed_from)
            self._look(needed_to)
            gap = there.find(0, needed_from, needed_to)
            if gap < 0:
                return tokens
            # Every boundary after a missing block needs it, up to here.
            if group.chunk_tokens:
                before = count - 1 - there.rfind(0, needed_from, needed_to)
            else:
                before = self._before(gap + 1)
            assert before < count - gap, f"block {count - 1 - gap} is missing, {before} is after it"
            tokens = before * size // step * step
        return 0

    def _before(self, start: int) -> int:
        """Return how many leading blocks end with a whole window, or lack none: the most, without
        those before byte `start`."""
        there, count = self._there, len(self._there)
        assert 0 < start <= count, f"byte {start} of {count}"
        begin, more = start, LOOK_BLOCKS
        while True:
            found = there.find(self._window, begin, self._looked)
            if found >= 0:
                return count - found
            if self._looked == count:
                return count - 1 - max(there.rfind(0, start), start - 1)
            # A window may begin before the edge of what was looked at.
            begin = max(begin, self._looked - len(self._window) + 1)
            self._look(min(count, self._looked + more))
            more *= 2

    def _look(self, upto: int) -> None:
        looked, count = self._looked, len(self._there)
        assert 0 <= upto <= count, f"{upto} of {count} blocks"
        if upto > looked:
            found = self._has(self._names[count - upto : count - looked])
            self._there[looked:upto] = found[::-1]
            self._looked = upto
