"""Eviction: which block leaves when a tier needs room, behind one small interface.

A policy sees names, never slots or bytes. It may only choose among blocks that are *free*: a held
block (pinned by a lease, or staged) is never a victim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from kvbm_common.errors import KvbmError
from kvbm_common.eviction.adaptive import Adaptive
from kvbm_common.eviction.lfu import Lfu
from kvbm_common.eviction.lru import Lru
from kvbm_common.eviction.prefix import PrefixPolicy
from kvbm_common.identity import SequenceHash
from kvbm_common.tier.block_columns import BlockColumns

__all__ = [
    "POLICIES",
    "Adaptive",
    "EvictionPolicy",
    "Lfu",
    "Lru",
    "PrefixPolicy",
    "UnknownPolicy",
    "make_policy",
]


class UnknownPolicy(KvbmError):
    """There is no eviction policy of that name."""

    code = "unknown_policy"


class EvictionPolicy(Protocol):
    """The calls by which a tier informs its policy, and the one by which it asks for a victim.

    Every block is `admit`ted (or filled in) once and `forget`ten once; in between `hold` and `free`
    alternate, beginning with `free` being the state after `admit`, and it may be `touch`ed at any
    time. Only touches are uses: a block is also held to be copied to another tier.
    """

    def fill(self, former: BlockColumns) -> None:
        """Fill an empty policy with the blocks of a former life, a million within a second.

        The result is as if each was admitted in their order, and then freed leaves first.
        """

    def admit(self, block: SequenceHash, parent: SequenceHash) -> None:
        """Add a block that was committed; it is free."""

    def admit_all(self, blocks: Sequence[SequenceHash], parents: Sequence[SequenceHash]) -> None:
        """Add blocks that were committed together, in their order; then free them leaves first."""

    def hold(self, block: SequenceHash) -> None:
        """Mark a free block as in use: it is no victim."""

    def free(self, block: SequenceHash) -> None:
        """Mark a held block as no longer in use. Chains are freed leaves first."""

    def touch(self, block: SequenceHash) -> None:
        """Count a use: a lookup or read found the block, free or held."""

    def touch_all(self, blocks: Sequence[SequenceHash]) -> None:
        """Count a use of each of these blocks, in their order."""

    def hold_all(self, blocks: Sequence[SequenceHash]) -> None:
        """Mark free blocks as in use, in their order."""

    def free_all(self, blocks: Sequence[SequenceHash]) -> None:
        """Mark held blocks as no longer in use, in their order."""

    def renew_all(self, blocks: Sequence[SequenceHash]) -> None:
        """Let free blocks leave as if they were freed now, in their order; that is no use."""

    def forget(self, block: SequenceHash) -> None:
        """Forget a free block that has left the tier."""

    def victims(self, count: int) -> list[SequenceHash]:
        """Return up to `count` free blocks to evict, worst first. Changes nothing."""

    def __len__(self) -> int:
        """Return how many blocks are free."""


POLICIES: dict[str, Callable[[int], EvictionPolicy]] = {
    "lru": lambda _slot_count: Lru(),
    "lfu": lambda _slot_count: Lfu(),
    "prefix": PrefixPolicy,
    "adaptive": Adaptive,
}


def make_policy(name: str, slot_count: int = 0) -> EvictionPolicy:
    """Make the policy of that name for a tier of so many slots.

    Raises UnknownPolicy, which lists the names there are.
    """
    try:
        make = POLICIES[name]
    except KeyError:
        known = ", ".join(sorted(POLICIES))
        raise UnknownPolicy(f"no eviction policy {name!r}; there are: {known}") from None
    assert slot_count >= 0, f"policy {name} for {slot_count} slots"
    policy = make(slot_count)
    assert len(policy) == 0, f"a new policy {name} has {len(policy)} free blocks"
    return policy
