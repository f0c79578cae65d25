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
from collections import Counter
from collections.abc import Sequence
from enum import Enum

from kvbm_common.identity import SequenceHash
from kvbm_common.tier.machine import Machine
from kvbm_common.tier.slots import Block

from kvbm_disk_tier.core.inventory import Inventory
from kvbm_disk_tier.core.journal_writer import JournalWriter
from kvbm_disk_tier.objects.core.messages import ListedBlock

NO_SLOT = 2**32 - 1
"""Of an object that has no slot here."""
WAITING_MAX = 100_000
"""Objects that wait for a slot during a listing: about 40 MB."""


class ListingState(Enum):
    """Whether a listing is under way."""

    IDLE = "idle"
    RUNNING = "running"


LISTING = Machine(
    "listing",
    {
        (None, "made"): ListingState.IDLE,
        (ListingState.IDLE, "begun"): ListingState.RUNNING,
        (ListingState.RUNNING, "begun"): ListingState.RUNNING,
        (ListingState.RUNNING, "page"): ListingState.RUNNING,
        (ListingState.RUNNING, "complete"): ListingState.IDLE,
        (ListingState.RUNNING, "failed"): ListingState.IDLE,
    },
)


class Listing:
    """The table and the bucket, compared. One listing at a time."""

    def __init__(
        self, *, ttl_ms: int, inventory: Inventory, journal: JournalWriter, counts: Counter[str]
    ) -> None:
        """Start before the first listing; objects older than `ttl_ms` are deleted, 0: never."""
        assert ttl_ms >= 0
        self._ttl_ms = ttl_ms
        self._inventory = inventory
        self._journal = journal
        self._counts = counts
        self._state = LISTING.next(None, "made")
        self._expected: dict[SequenceHash, int] = {}
        """Blocks that were here when the listing began, with the generation of their slot."""
        self._stored_ms = array("q")
        """When the block in each slot was stored, on our clock; may be below zero."""
        self._waiting: list[tuple[int, SequenceHash, Block]] = []
        """A heap, oldest first."""
        self._named = 0

    @property
    def is_running(self) -> bool:
        """Tell whether a listing is under way."""
        return self._state is ListingState.RUNNING

    def begun(self, now_ms: int) -> None:
        """Remember what the listing that begins has to name."""
        table = self._inventory.table
        self._move("begun")
        self._named = 0
        self._waiting.clear()
        self._stored_ms = array("q", [now_ms]) * table.slot_count
        assert len(self._stored_ms) == table.slot_count
        self._expected = table.generations()

    def listed(self, objects: Sequence[ListedBlock], now_ms: int) -> None:
        """Take what is new on a page, and fits."""
        self._move("page")
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
        self._inventory.announce_listed(new)
        self._expire(expired)

    def _is_known(self, block: Block, stored_ms: int) -> bool:
        assert self.is_running, f"{block.hash.hex()} is listed outside of a listing"
        table = self._inventory.table
        slot = table.find(block.hash)
        if slot is None:
            return table.is_staging(block.hash)
        self._expected.pop(block.hash, None)
        known = table.block(slot)
        if known != block:
            self._counts["object_duplicates"] += 1
            self._named -= 1
            if _order(block) < _order(known):
                self._inventory.lose([(slot, known)], "duplicate")
                return False
            self._journal.removed([(NO_SLOT, block)])
            return True
        self._stored_ms[slot] = stored_ms
        return True

    def _take(self, block: Block, stored_ms: int, new: list[Block]) -> None:
        assert self._inventory.table.find(block.hash) is None, "it has a slot"
        slot = self._inventory.table.stage(block.hash)
        if slot is not None:
            self._inventory.table.register(slot, block)
            self._stored_ms[slot] = stored_ms
            new.append(block)
            return
        heapq.heappush(self._waiting, (stored_ms, block.hash, block))
        if len(self._waiting) > WAITING_MAX:
            heapq.heappop(self._waiting)
            assert len(self._waiting) == WAITING_MAX
            self._counts["dropped.listed_no_room"] += 1

    def _expire(self, expired: Sequence[Block]) -> None:
        assert self._ttl_ms or not expired, "objects have no end"
        table = self._inventory.table
        here = [(table.find(block.hash), block) for block in expired]
        held = [(slot, block) for slot, block in here if slot is not None]
        self._inventory.lose(held, "expired")
        self._journal.removed([(NO_SLOT, block) for slot, block in here if slot is None])
        self._counts["evictions.expired"] += len(here) - len(held)

    def ended(self, *, complete: bool, now_ms: int) -> None:
        """Compare what a complete listing has named with the table; forget any other one."""
        assert self._named >= 0
        self._move("complete" if complete else "failed")
        if complete:
            self._counts["listings"] += 1
            self._lose_gone()
            self._delete_oldest(self._named - self._inventory.table.slot_count)
            self._fill()
        else:
            self._counts["listings_failed"] += 1
        self._expected.clear()
        self._waiting.clear()

    def _lose_gone(self) -> None:
        table = self._inventory.table
        gone: list[tuple[int, Block]] = []
        for name, generation in self._expected.items():
            slot = table.find(name)
            # In another generation it has been stored again, behind the listing's back.
            if slot is not None and table.generation(slot) == generation:
                gone.append((slot, table.block(slot)))
        self._inventory.lose(gone, "gone")

    def _delete_oldest(self, surplus: int) -> None:
        """Delete the oldest of a bucket that holds too much: every host deletes the same."""
        if surplus <= 0:
            return
        table = self._inventory.table
        ages: list[tuple[int, SequenceHash, Block]] = list(self._waiting)
        for block in table.blocks():
            slot = table.find(block.hash)
            assert slot is not None
            ages.append((self._stored_ms[slot], block.hash, block))
        oldest = heapq.nsmallest(surplus, ages, key=lambda entry: entry[:2])
        assert len(oldest) <= surplus
        doomed = {name for _, name, _ in oldest}
        here = [(table.find(name), block) for _, name, block in oldest]
        self._inventory.lose([(slot, block) for slot, block in here if slot is not None], "surplus")
        outside = [(NO_SLOT, block) for slot, block in here if slot is None]
        self._journal.removed(outside)
        self._counts["evictions.surplus"] += len(outside)
        self._waiting = [entry for entry in self._waiting if entry[1] not in doomed]

    def _fill(self) -> None:
        """Give the free slots to what waits, youngest first."""
        new: list[Block] = []
        table = self._inventory.table
        for stored_ms, name, block in sorted(self._waiting, reverse=True):
            if not table.reset_count:
                self._counts["dropped.listed_no_room"] += 1
            elif table.find(name) is None and not table.is_staging(name):
                self._take(block, stored_ms, new)
        assert len(new) <= table.slot_count
        self._inventory.announce_listed(new)

    def _move(self, event: str) -> None:
        self._state = LISTING.next(self._state, event)

    def check(self) -> None:
        """Assert every invariant of the listing."""
        assert len(self._waiting) <= WAITING_MAX
        assert self.is_running or not self._expected
        assert self.is_running or not self._waiting


def _order(block: Block) -> tuple[bytes, str, str, int]:
    """Return what orders objects as their names do.

    Bytes and parts are written in decimal, without leading zeros.
    """
    return (block.parent, str(block.bytes), str(block.part_count), block.checksum)
