"""Succession of policies: blocks of replaced policies leave first, in the order of each.

A tier of a million blocks could hand them all over in seconds only. So a block stays with the
policy that it came to until it is used again, and then it is admitted to the policy in force:

    former policies, oldest first            in force
    [ 1 2 3 ] [ 4 5 ]                        [ 6 7 ]         victims: 1 2 3 4 5 6 7
       └── 2 is used ──────────────────────────► [ 6 7 2 ]            1 3 4 5 6 7 2

The table knows which policy has which block, and tells that one. This object answers for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvbm_common.identity import SequenceHash
from kvbm_common.tier.block_columns import BlockColumns

if TYPE_CHECKING:
    from kvbm_common.eviction import EvictionPolicy


class Succession:
    """The policy in force, and those before it that still have free blocks."""

    def __init__(self, policy: EvictionPolicy, former: EvictionPolicy) -> None:
        """Let `policy`, which is new, take over from `former`."""
        assert len(policy) == 0, "a policy that knows blocks is no new one"
        self.policy = policy
        before = [*former.formers, former.policy] if isinstance(former, Succession) else [former]
        self.formers: list[EvictionPolicy] = [one for one in before if len(one)]
        """The policies before, oldest first."""

    def knows(self, policy: EvictionPolicy) -> bool:
        """Tell whether free blocks of a policy are among those that this one answers for."""
        inner = policy.policy if isinstance(policy, Succession) else policy
        return inner is self.policy or any(inner is one for one in self.formers)

    # --- what the tier tells: all of it is about blocks of the policy in force --------------------

    def fill(self, former: BlockColumns) -> None:
        self.policy.fill(former)

    def admit(self, block: SequenceHash, parent: SequenceHash) -> None:
        self.policy.admit(block, parent)

    def admit_all(self, blocks: Sequence[SequenceHash], parents: Sequence[SequenceHash]) -> None:
        assert len(parents) == len(blocks), f"{len(blocks)} blocks, {len(parents)} parents"
        self.policy.admit_all(blocks, parents)

    def hold(self, block: SequenceHash) -> None:
        self.policy.hold(block)

    def free(self, block: SequenceHash) -> None:
        self.policy.free(block)

    def touch(self, block: SequenceHash) -> None:
        self.policy.touch(block)

    def touch_all(self, blocks: Sequence[SequenceHash]) -> None:
        self.policy.touch_all(blocks)

    def hold_all(self, blocks: Sequence[SequenceHash]) -> None:
        self.policy.hold_all(blocks)

    def free_all(self, blocks: Sequence[SequenceHash]) -> None:
        self.policy.free_all(blocks)

    def renew_all(self, blocks: Sequence[SequenceHash]) -> None:
        self.policy.renew_all(blocks)

    def forget(self, block: SequenceHash) -> None:
        self.policy.forget(block)

    # --- what the tier asks: of all of them -------------------------------------------------------

    def victims(self, count: int) -> list[SequenceHash]:
        assert count >= 0, f"{count} victims"
        self.formers = [one for one in self.formers if len(one)]
        found: list[SequenceHash] = []
        for one in (*self.formers, self.policy):
            if len(found) == count:
                break
            found += one.victims(count - len(found))
        assert len(found) <= count, f"{len(found)} victims, {count} were wanted"
        return found

    def __len__(self) -> int:
        return len(self.policy) + sum(map(len, self.formers))
