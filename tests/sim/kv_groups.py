"""KV groups of the simulation's plain engines; their rules share no code with the product's."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from kvbm_common.identity import Hasher, Namespace
from kvbm_common.tier.kv_groups import GroupRun


@dataclass(frozen=True, slots=True)
class Rule:
    """The rule of one KV group: tokens of its blocks, and what a hit needs."""

    name: str
    block_tokens: int = 1
    window_blocks: int = 0
    """Blocks before a boundary."""
    chunk_tokens: int = 0
    """Tokens of a chunk."""


FULL = Rule("full")
ALONE = (FULL,)
GROUPINGS: tuple[tuple[Rule, ...], ...] = (
    (FULL, Rule("window", window_blocks=3)),
    (FULL, Rule("wide window", block_tokens=2, window_blocks=2)),
    (FULL, Rule("state", block_tokens=2, window_blocks=1)),
    (FULL, Rule("chunk", chunk_tokens=4)),
    (FULL, Rule("full of two", block_tokens=2)),
    (FULL, Rule("window", window_blocks=2), Rule("state", block_tokens=3, window_blocks=1)),
    (Rule("window", window_blocks=2),),
)


@dataclass(frozen=True, slots=True)
class Group:
    """One KV group of an engine."""

    rule: Rule
    hasher: Hasher

    @property
    def size(self) -> int:
        """Return the tokens of a block."""
        return self.rule.block_tokens

    @property
    def number(self) -> int:
        """Return its number in the engine."""
        return self.hasher.namespace.group

    @property
    def has_holes(self) -> bool:
        """Return whether a hit leaves blocks out."""
        return bool(self.rule.window_blocks or self.rule.chunk_tokens)

    def floor(self, tokens: int) -> int:
        """Return the tokens of full blocks."""
        return tokens // self.size * self.size

    def needed(self, boundary: int) -> Sequence[int]:
        """Return the indices of the blocks that computing on from a boundary reads, in order."""
        return needed(self.rule, boundary)

    def run(self, first: int, end: int) -> GroupRun:
        """Return what a lookup for the tokens from `first` to `end` says of the group."""
        rule, count = self.rule, (end - first) // self.size
        return GroupRun(self.size, count, rule.window_blocks, rule.chunk_tokens, first)


def groups_of(namespace: Namespace, rules: Sequence[Rule]) -> tuple[Group, ...]:
    """Return the groups of an engine; `namespace` is the first one's."""
    sized = [
        msgspec.structs.replace(namespace, group=number, block_tokens=rule.block_tokens)
        for number, rule in enumerate(rules)
    ]
    return tuple(Group(rule, Hasher(one)) for rule, one in zip(rules, sized, strict=True))


@functools.cache
def needed(rule: Rule, boundary: int) -> Sequence[int]:
    """Return the indices of the blocks that computing on from a boundary reads, in order."""
    return [i for i in range(boundary // rule.block_tokens) if needs(rule, i, boundary)]


def needs(rule: Rule, index: int, boundary: int) -> bool:
    """Tell of a block before a boundary whether it is in a window of n blocks, or in the chunk of
    the next token, or anywhere."""
    if rule.window_blocks:
        return (index + 1) * rule.block_tokens > boundary - rule.window_blocks * rule.block_tokens
    if rule.chunk_tokens:
        return index * rule.block_tokens // rule.chunk_tokens == boundary // rule.chunk_tokens
    return True
