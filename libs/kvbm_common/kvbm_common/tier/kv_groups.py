"""KV groups: the blocks of each group that a hit needs, and the longest hit that blocks allow.

A model with several kinds of attention keeps several KV caches, its groups. Each has blocks of its
own, with names of its own. A hit ends at a boundary, a number of tokens behind which the engine
computes on. What it needs of a group depends on the kind of attention:

    window 0    every block before the boundary (full attention)
    window n    the last n blocks before the boundary (sliding window)

Blocks are counted from the first one that is asked for: what is before it is on the device, where
every group has what it needs up to there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from math import lcm

import msgspec

from kvbm_common.identity import SequenceHash

WINDOW_BLOCKS_MAX = 65_536


class GroupRun(msgspec.Struct, frozen=True, array_like=True):
    """The blocks of one group that a lookup asks for: `blocks` of `block_tokens` tokens each.

    `window` is how many blocks before a boundary a hit needs; 0: all of them.
    """

    block_tokens: int
    blocks: int
    window: int = 0


@dataclass(frozen=True, slots=True)
class Reach:
    """How far blocks reach, in tokens from the first one that is asked for."""

    tokens: int
    """The largest boundary at which every group has what a hit needs."""
    shared: int
    """The boundary up to which every group without a window has all blocks."""


Names = Sequence[Sequence[SequenceHash]]
"""The names of every group's blocks, in the order of the groups."""


def split(groups: Iterable[GroupRun], names: Sequence[SequenceHash]) -> Names:
    """Return the names of each group's blocks, which come one group after the other."""
    rest = iter(names)
    found = [list(islice(rest, group.blocks)) for group in groups]
    assert next(rest, None) is None, f"{len(names)} names are more than {groups} have"
    return found


def step_tokens(groups: Iterable[GroupRun]) -> int:
    """Return the tokens between two boundaries: at each of them, blocks of all groups end."""
    return lcm(*(group.block_tokens for group in groups))


def longest(groups: Sequence[GroupRun]) -> int:
    """Return the largest boundary that is asked for, in tokens."""
    step = step_tokens(groups)
    return min(group.blocks * group.block_tokens for group in groups) // step * step


def needed(groups: Sequence[GroupRun], tokens: int) -> list[range]:
    """Return, for each group, the places of the blocks that a hit of so many tokens needs."""
    assert tokens % step_tokens(groups) == 0, f"{tokens} tokens are no boundary of {groups}"
    ranges: list[range] = []
    for group in groups:
        end = tokens // group.block_tokens
        ranges.append(range(max(0, end - group.window) if group.window else 0, end))
    return ranges


def needed_names(groups: Sequence[GroupRun], names: Names, tokens: int) -> list[SequenceHash]:
    """Return the names of the blocks that a hit of so many tokens needs, group after group."""
    chosen: list[SequenceHash] = []
    for found, places in zip(names, needed(groups, tokens), strict=True):
        chosen += found[places.start : places.stop]
    return chosen


def reach(
    groups: Sequence[GroupRun],
    names: Names,
    has: Callable[[SequenceHash], bool],
    *,
    most: int | None = None,
) -> Reach:
    """Return how far the blocks for which `has` is true reach, at most `most` tokens.

    Each block is looked at once at most: full groups from the front until one is missing, windows
    from the back.
    """
    step = step_tokens(groups)
    tokens = longest(groups) if most is None else min(most, longest(groups))
    for group, found in zip(groups, names, strict=True):
        if not group.window:
            tokens = min(tokens, _prefix(group, found, has, tokens) // step * step)
    shared = tokens
    windows = [(one, found) for one, found in zip(groups, names, strict=True) if one.window]
    # The first block of each window's group from which on all up to the boundary are known.
    known = [tokens // group.block_tokens for group, _ in windows]
    at = 0
    agreed = 0
    while tokens and agreed < len(windows):
        group, found = windows[at]
        end = tokens // group.block_tokens
        gap, known[at] = _gap(group, found, has, end, min(known[at], end))
        if gap is None:
            agreed += 1
        else:
            tokens, agreed = gap * group.block_tokens // step * step, 0
        at = (at + 1) % len(windows)
    return Reach(tokens, shared)


def _prefix(
    group: GroupRun, names: Sequence[SequenceHash], has: Callable[[SequenceHash], bool], most: int
) -> int:
    """Return the tokens of the blocks before the first one that is missing."""
    for place in range(most // group.block_tokens):
        if not has(names[place]):
            return place * group.block_tokens
    return most


def _gap(
    group: GroupRun,
    names: Sequence[SequenceHash],
    has: Callable[[SequenceHash], bool],
    end: int,
    known: int,
) -> tuple[int | None, int]:
    """Return the last missing block in the window before `end`, and from where on all are there.

    The blocks from `known` to `end` were found before.
    """
    for place in range(known - 1, max(0, end - group.window) - 1, -1):
        if not has(names[place]):
            return place, place
    return None, min(known, max(0, end - group.window))
