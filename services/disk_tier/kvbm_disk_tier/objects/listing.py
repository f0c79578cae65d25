"""The listing: what other hosts, and our former lives, have stored becomes ours to read.

A listing names every object of the bucket, in the order of the names, a page at a time. Objects
that are new here take the free slots; while there are none they wait, the youngest ones only. At
the end of a complete listing

    what was here when it began and was not named       is gone: others have evicted it
    what is more than the capacity                      is deleted, oldest first
    what waits                                          takes the slots that are free now

Several hosts share a bucket without talking to each other, so whatever is deleted follows from the
bucket alone: everybody deletes the oldest, the expired, and of two objects of one block the one
with the greater name (two hosts may have computed bytes that differ in the last digit).
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Sequence

from kvbm_common.identity import SequenceHash
from kvbm_common.slots import Block

from kvbm_disk_tier.objects.messages import ListedBlock
from kvbm_disk_tier.tier import Tier

NO_SLOT = 2**32 - 1
"""Of an object that has no slot here."""
WAITING_MAX = 100_000
"""Objects that wait for a slot during a listing: about 40 MB."""


class Listing:
    """The table and the bucket, compared. One listing at a time."""

    def __init__(self, tier: Tier, *, ttl_ms: int = 0) -> None:
        """`ttl_ms`: objects older than that are deleted; 0: none is."""
        self._tier = tier
        self._ttl_ms = ttl_ms
        self._expected: dict[SequenceHash, int] = {}
        """Blocks that were here when the listing began, with the generation of their slot."""
        self._stored_ms = array("q")
        """When the block in each slot was stored, on our clock; may be below zero."""
        self._waiting: list[tuple[int, SequenceHash, Block]] = []
        """A heap, oldest first."""
        self._named = 0
        self.is_running = False

    def begun(self, now_ms: int) -> None:
        """A listing begins: remember what it has to name."""
        table = self._tier.table
        self.is_running = True
        self._named = 0
        self._waiting.clear()
        self._stored_ms = array("q", [now_ms]) * table.slot_count
        self._expected = table.generations()

    def listed(self, objects: Sequence[ListedBlock], now_ms: int) -> None:
        """A page: take what is new and fits."""
        new: list[Block] = []
        expired: list[Block] = []
        for found in objects:
            stored_ms = now_ms - found.age_ms
            if self._ttl_ms and found.age_ms > self._ttl_ms:
                expired.append(found.block)
            elif self._is_known(found.block, stored_ms):
                self._named += 1
            else:
                self._named += 1
                self._take(found.block, stored_ms, new)
        self._announce(new, now_ms)
        self._expire(expired)

    def _is_known(self, block: Block, stored_ms: int) -> bool:
        table = self._tier.table
        slot = table.find(block.hash)
        if slot is None:
            return table.is_staging(block.hash)
        self._expected.pop(block.hash, None)
        known = table.block(slot)
        if known != block:
            self._tier.counts["object_duplicates"] += 1
            self._named -= 1
            if _order(block) < _order(known):
                self._tier.lose([(slot, known)], "duplicate")
                return False
            self._tier.journal_removed([(NO_SLOT, block)])
            return True
        self._stored_ms[slot] = stored_ms
        return True

    def _take(self, block: Block, stored_ms: int, new: list[Block]) -> None:
        slot = self._tier.table.stage(block.hash)
        if slot is not None:
            self._tier.table.register(slot, block)
            self._stored_ms[slot] = stored_ms
            new.append(block)
            return
        heapq.heappush(self._waiting, (stored_ms, block.hash, block))
        if len(self._waiting) > WAITING_MAX:
            heapq.heappop(self._waiting)
            self._tier.counts["dropped.listed_no_room"] += 1

    def _announce(self, new: Sequence[Block], now_ms: int) -> None:
        for block in new:
            self._tier.diary.note(now_ms, "listed", block.hash)
        self._tier.counts["listed_blocks"] += len(new)
        self._tier.announce_stored(new)

    def _expire(self, expired: Sequence[Block]) -> None:
        table = self._tier.table
        here = [(table.find(block.hash), block) for block in expired]
        held = [(slot, block) for slot, block in here if slot is not None]
        self._tier.lose(held, "expired")
        self._tier.journal_removed([(NO_SLOT, block) for slot, block in here if slot is None])
        self._tier.counts["evictions.expired"] += len(here) - len(held)

    def ended(self, *, complete: bool, now_ms: int) -> None:
        """The listing is over."""
        self.is_running = False
        if complete:
            self._tier.counts["listings"] += 1
            self._lose_gone()
            self._delete_oldest(self._named - self._tier.table.slot_count)
            self._fill(now_ms)
        else:
            self._tier.counts["listings_failed"] += 1
        self._expected.clear()
        self._waiting.clear()

    def _lose_gone(self) -> None:
        table = self._tier.table
        gone: list[tuple[int, Block]] = []
        for name, generation in self._expected.items():
            slot = table.find(name)
            # In another generation it has been stored anew, behind the listing's back.
            if slot is not None and table.generation(slot) == generation:
                gone.append((slot, table.block(slot)))
        self._tier.lose(gone, "gone")

    def _delete_oldest(self, surplus: int) -> None:
        """The bucket holds more than it may: everybody deletes the same."""
        if surplus <= 0:
            return
        table = self._tier.table
        ages: list[tuple[int, SequenceHash, Block]] = list(self._waiting)
        for block in table.blocks():
            slot = table.find(block.hash)
            assert slot is not None
            ages.append((self._stored_ms[slot], block.hash, block))
        oldest = heapq.nsmallest(surplus, ages, key=lambda entry: entry[:2])
        doomed = {name for _, name, _ in oldest}
        here = [(table.find(name), block) for _, name, block in oldest]
        self._tier.lose([(slot, block) for slot, block in here if slot is not None], "surplus")
        outside = [(NO_SLOT, block) for slot, block in here if slot is None]
        self._tier.journal_removed(outside)
        self._tier.counts["evictions.surplus"] += len(outside)
        self._waiting = [entry for entry in self._waiting if entry[1] not in doomed]

    def _fill(self, now_ms: int) -> None:
        """What waits takes the free slots, youngest first."""
        new: list[Block] = []
        for stored_ms, name, block in sorted(self._waiting, reverse=True):
            if not self._tier.table.counts()["reset"]:
                self._tier.counts["dropped.listed_no_room"] += 1
            elif self._tier.table.find(name) is None and not self._tier.table.is_staging(name):
                self._take(block, stored_ms, new)
        self._announce(new, now_ms)

    def check(self) -> None:
        """Assert every invariant."""
        assert len(self._waiting) <= WAITING_MAX
        assert self.is_running or not self._expected
        assert self.is_running or not self._waiting


def _order(block: Block) -> tuple[bytes, str, int]:
    """As the names are ordered: the bytes are written in decimal, without leading zeros."""
    return (block.parent, str(block.bytes), block.checksum)
