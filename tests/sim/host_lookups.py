"""What lookups must find: blocks of their engine alone, and the largest hit of those that are here.

While there are faults, what may come from elsewhere is the host tier's affair. At rest, blocks of
the lower tiers are as good as those that are here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from kvbm_common.identity import SequenceHash, unpack_hashes
from kvbm_common.tier.slots import Block
from kvbm_common.wire.local import Found, Lookup

from tests.sim.invariants import check_found, require
from tests.sim.kv_groups import ALONE, Group, Rule, needed

if TYPE_CHECKING:
    from tests.sim.engine_node import EngineNode
    from tests.sim.host_tier import HostTier

NOT_BROUGHT = ("no_room", "corrupt")
"""Answers for these reasons have at rest what is here, and not all that is below."""
REFUSALS = ("busy",)
"""Answers for these reasons have nothing, whatever is here."""


@dataclass(frozen=True, slots=True)
class Question:
    """A lookup, as the simulation reads it."""

    rules: Sequence[Rule]
    names: Sequence[Sequence[SequenceHash]]
    """Of each KV group, those from token `first` on."""
    first: int = 0
    """Tokens that the device has."""
    step: int = 1
    """Tokens between two boundaries."""

    @classmethod
    def of(cls, lookup: Lookup, groups: Sequence[Group], step: int) -> Question:
        """Cut the names of a lookup into those of its groups; without any, a block is a token."""
        names = unpack_hashes(lookup.hashes)
        if not lookup.groups:
            return cls(ALONE, [names])
        cut: list[list[SequenceHash]] = []
        for run in lookup.groups:
            cut.append(names[: run.blocks])
            names = names[run.blocks :]
        require(not names and len(cut) == len(groups), f"{lookup.request} is cut into {len(cut)}")
        return cls([one.rule for one in groups], cut, lookup.groups[0].offset, step)

    def boundary(self, here: Collection[SequenceHash]) -> int:
        """Return how many tokens a hit has at most, if these blocks are here."""
        pairs = list(zip(self.rules, self.names, strict=True))
        tokens = self.most
        while not all(self._are_here(rule, names, here, tokens) for rule, names in pairs):
            tokens -= self.step
        return tokens

    @property
    def most(self) -> int:
        """Return how many tokens a hit has at most."""
        pairs = zip(self.rules, self.names, strict=True)
        tokens = min(len(names) * rule.block_tokens for rule, names in pairs)
        return tokens // self.step * self.step

    def _are_here(
        self, rule: Rule, names: Sequence[SequenceHash], here: Collection[SequenceHash], tokens: int
    ) -> bool:
        before = self.first // rule.block_tokens
        wanted = needed(rule, self.first + tokens)
        return all(names[index - before] in here for index in wanted if index >= before)


class Had(NamedTuple):
    """The blocks of a lookup that were there when it came."""

    here: Mapping[SequenceHash, int]
    """Block → slot. A pinned one that is discarded and comes back has another slot."""
    below: frozenset[SequenceHash]
    """At rest, those of the lower tiers."""


class HostLookups:
    """The open lookups of one life of a host tier, each with what was here when it came."""

    def __init__(self, tier: HostTier) -> None:
        self._tier = tier
        self._open: dict[tuple[bytes, int], tuple[Question, Had]] = {}

    def asked(self, connection: bytes, lookup: Lookup) -> None:
        """Remember what is here of a lookup that comes."""
        engine = self._engine(connection)
        question = Question.of(lookup, engine.groups, engine.boundary_tokens)
        wanted, own = frozenset(chain.from_iterable(question.names)), _digests(engine)
        here = {
            block.hash: slot
            for slot, block in self._blocks().items()
            if block.hash in wanted and block.namespace in own
        }
        below = self._below(own) & wanted if self._tier.world.is_resting else frozenset()
        had = Had(here, below)
        self._open[connection, lookup.lookup] = question, had

    def answered(self, connection: bytes, found: Found) -> None:
        """Require that an answer has blocks of the engine alone, and reaches as far as blocks do
        that have been here since the lookup came."""
        engine = self._engine(connection)
        blocks = self._blocks()
        given = [blocks[slot] for slot in found.slots if slot in blocks]
        check_found(given, engine.namespaces, engine.name)
        question, had = self._open.pop((connection, found.lookup))
        if found.reason in REFUSALS:
            return
        if not self._tier.world.is_resting or found.reason in NOT_BROUGHT:
            own = _digests(engine)
            stayed = ((name, blocks.get(slot)) for name, slot in had.here.items())
            expected = frozenset(
                name for name, block in stayed
                if block is not None and block.hash == name and block.namespace in own
            )  # fmt: skip
        else:
            self._tier.world.marks["lookup at rest"] += 1
            expected = had.below.union(had.here)
        tokens = len(found.slots) if question.rules is ALONE else found.boundary
        least = question.boundary(expected)
        text = f"{engine.name} is given {tokens} tokens ({found.reason or 'all'}), {least} are here"
        require(tokens >= least, text)

    def _engine(self, connection: bytes) -> EngineNode:
        return self._tier.host.engines[connection.decode().split(":")[0]]

    def _blocks(self) -> Mapping[int, Block]:
        return self._tier.core.view.blocks()

    def _below(self, own: Collection[bytes]) -> frozenset[SequenceHash]:
        """Return the blocks that the lower tiers have in some namespaces."""
        tables = [lower.core.inventory.table for lower in self._tier.host.lower]
        blocks = chain.from_iterable(table.blocks() for table in tables)
        return frozenset(block.hash for block in blocks if block.namespace in own)

    def forget(self) -> None:
        """Forget the open lookups: their engines have left, and get no answer."""
        self._open.clear()

    def check_idle(self) -> None:
        """Require that every lookup is answered."""
        numbers = sorted(number for _, number in self._open)
        require(not numbers, f"{self._tier.name} has not answered lookups {numbers}")


def _digests(engine: EngineNode) -> frozenset[bytes]:
    return frozenset(namespace.digest for namespace in engine.namespaces)
