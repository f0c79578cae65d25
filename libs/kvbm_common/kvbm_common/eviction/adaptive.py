"""`adaptive`: LRU, or two orders with a protected part, whichever hits more on this load.

Free blocks that were used once are in one order, those that were used again in another. Both are
in the order of LRU, leaves before their parents. The *ways* differ in which order gives a victim:

    LRU         the order whose oldest block was freed the longest ago
    protected   the order of blocks used once. Blocks used again hold a part of the slots; beyond
                that part their oldest goes back to the others (segmented LRU, Karedla et al. 1994)
    remembered  as `protected`, and a block that comes back soon after it was evicted counts as
                used again (2Q, Johnson and Shasha 1994)

A `Contest` says which way is best, and how large the part is. It begins with LRU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import merge
from itertools import chain, islice
from operator import itemgetter

from kvbm_common.eviction.contest import Contest
from kvbm_common.eviction.lru import TOGETHER_LEAST, FreeOrder
from kvbm_common.eviction.recent_names import RecentNames
from kvbm_common.identity import SequenceHash
from kvbm_common.tier.block_columns import BlockColumns
from kvbm_common.tier.block_order import BlockOrder

BATCH_MAX = 64
"""Sampled uses that wait for the contest: no step of the tier runs more of them."""
LEAVE_MAX = 2
"""Blocks that go back to `_once` when one is freed: a smaller part is reached in steps."""


class Adaptive:
    """The eviction policy `adaptive`. The same calls give the same victims, in every process."""

    def __init__(self, slot_count: int = 0, contest: Contest | None = None) -> None:
        self._slot_count = slot_count
        self._former = FreeOrder()
        """Free blocks of a former life: they count as used once, and are older than all others."""
        self._once: BlockOrder[int] = BlockOrder()
        """Free blocks, and the run of frees in which each was freed."""
        self._again: BlockOrder[int] = BlockOrder()
        self._reused: set[SequenceHash] = set()
        """Blocks outside `_again` that go there when they are freed: they were used again."""
        self._run = 0
        self._run_is_again = False
        """Consecutive frees into one order are a run and share its number, which saves memory. In
        a run the order itself says which came first."""
        self._here = 0
        """Blocks, free or held."""
        self._departed = RecentNames()
        self._uses: list[SequenceHash] = []
        """Sampled blocks that were used since the last contest."""
        self.contest = contest or Contest(slot_count)
        self._sampled_below = self.contest.sampled_below
        self._sampled_byte = (self._sampled_below - 1 >> 16) + 1
        self._follow()

    def _follow(self) -> None:
        """Evict in the way that leads the contest."""
        way = self.contest.way
        self._is_lru = not way.protected
        self._remembers = way.remembers
        self._again_max = int((way.protected or 1.0) * self._slot_count)

    # --- what the tier tells ----------------------------------------------------------------

    def fill(self, former: BlockColumns) -> None:
        assert not len(self), f"{len(self)} blocks are here already"
        self._former.fill(former)
        self._here = len(former)

    def admit(self, block: SequenceHash, parent: SequenceHash) -> None:
        assert block not in self._once, f"{block.hex()} is here already"
        assert block not in self._again, f"{block.hex()} is here already, and was used again"
        self._once.add(block, self._run_of(again=False))
        self._come(block)

    def _come(self, block: SequenceHash) -> None:
        """Count a block that is here from now on."""
        self._here += 1
        if self._remembers and block in self._departed:
            self._reused.add(block)
        if block[-1] < self._sampled_byte:
            self._sample(block)

    def admit_all(self, blocks: Sequence[SequenceHash], parents: Sequence[SequenceHash]) -> None:
        count = len(self)
        assert len(parents) == len(blocks), f"{len(blocks)} blocks, {len(parents)} parents"
        self._run_of(again=False)
        for block in blocks:
            self._come(block)
        self.free_all(blocks[::-1])
        assert len(self) == count + len(blocks), f"{count} free blocks became {len(self)}"

    def touch(self, block: SequenceHash) -> None:
        self._reused.add(block)
        if block[-1] < self._sampled_byte:
            self._sample(block)

    def touch_all(self, blocks: Sequence[SequenceHash]) -> None:
        self._reused.update(blocks)
        below = self._sampled_byte
        for block in blocks:
            if block[-1] < below:
                self._sample(block)

    def hold(self, block: SequenceHash) -> None:
        if self._once.pop(block):
            return
        if self._again.pop(block):
            self._reused.add(block)
            return
        self._former.hold(block)

    def hold_all(self, blocks: Sequence[SequenceHash]) -> None:
        again, reused, count = self._again, self._reused, len(self)
        for block in blocks:
            if again.pop(block):  # The usual case: a block that a lookup finds was used before.
                reused.add(block)
            else:
                self.hold(block)
        assert len(self) == count - len(blocks), f"{count} free blocks became {len(self)}"

    def free(self, block: SequenceHash) -> None:
        assert block not in self._once, f"{block.hex()} is free already"
        if self._uses:
            self._compete()
        if block not in self._reused:
            self._once.add(block, self._run_of(again=False))
            return
        self._reused.remove(block)
        self._again.add(block, self._run_of(again=True))
        if len(self._again) > self._again_max:
            for _ in range(min(LEAVE_MAX, len(self._again) - self._again_max)):
                self._once.add(*self._again.pop_oldest())

    def free_all(self, blocks: Sequence[SequenceHash]) -> None:
        count = len(self)
        if len(blocks) >= TOGETHER_LEAST and self._reused.isdisjoint(blocks):
            if self._uses:
                self._compete()
            self._once.add_all(blocks, self._run_of(again=False))
        else:
            for block in blocks:
                self.free(block)
        assert len(self) == count + len(blocks), f"{count} free blocks became {len(self)}"

    def renew_all(self, blocks: Sequence[SequenceHash]) -> None:
        count = len(self)
        self.hold_all(blocks)
        self.free_all(blocks)
        assert len(self) == count, f"{count} free blocks became {len(self)}"

    def _run_of(self, *, again: bool) -> int:
        """Return the number of the run to which a block belongs that is freed now."""
        if again is not self._run_is_again:
            self._run += 1
            self._run_is_again = again
        return self._run

    def forget(self, block: SequenceHash) -> None:
        if not self._once.pop(block) and not self._again.pop(block):
            self._former.hold(block)
        self._reused.discard(block)
        self._departed.add(block, self._here)  # As many names are remembered as there are blocks.
        self._here -= 1

    def _sample(self, block: SequenceHash) -> None:
        """Have a block take part in the contest, if it is in the sample."""
        if int.from_bytes(block[-3:], "little") < self._sampled_below:
            self._uses.append(block)
            if len(self._uses) >= BATCH_MAX:
                self._compete()

    def _compete(self) -> None:
        """Use the sampled blocks in the contest, leaves first, as they are freed here."""
        uses = self._uses[::-1]
        self._uses.clear()
        if self.contest.used(uses):
            self._follow()

    # --- what the tier asks -----------------------------------------------------------------

    def victims(self, count: int) -> list[SequenceHash]:
        assert count >= 0, f"{count} victims"
        return list(islice(self._order(), count))

    def _order(self) -> Iterator[SequenceHash]:
        """Yield the free blocks, the first to leave first."""
        if not self._is_lru or not len(self._once) or not len(self._again):
            return chain(self._former, self._once, self._again)
        # A block that went back to `_once` stands after newer ones: the merge is nearly sorted.
        by_age = merge(self._once.items(), self._again.items(), key=itemgetter(1))
        return chain(self._former, map(itemgetter(0), by_age))

    def __len__(self) -> int:
        return len(self._once) + len(self._again) + len(self._former)

    def check(self) -> None:
        """Assert every invariant; O(blocks)."""
        self._once.check()
        self._again.check()
        assert self._once.has_none_of([*self._again]), "a block is in both orders"
        assert not any(name in self._former for name in (*self._once, *self._again))
        assert self._again.has_none_of(self._reused), "a block used again is so twice"
        assert self._here >= len(self), f"{len(self)} of {self._here} blocks are free"
        runs = [run for _, run in self._again.items()]
        assert runs == sorted(runs), f"the runs of {len(runs)} blocks are not in their order"
        assert len(self._uses) < BATCH_MAX, f"{len(self._uses)} uses wait"
        for miniature in self.contest.miniatures:
            miniature.check()
