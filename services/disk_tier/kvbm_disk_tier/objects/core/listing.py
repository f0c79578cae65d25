"""Listing: makes objects that other hosts, or our former lives, have stored ours to read.

A listing names every object of the store, range by range, a page at a time. Objects that are new
here take the free slots. Of each range the youngest of each tenant are kept, as many as are the
range's share of the capacity: what falls out is deleted at once, and what has no slot waits for the
range's end. When all ranges are listed, the slots are looked at, some at a time:

    a block that was here before the listing and was not named   is missing

A missing block is gone: another host has evicted it. But a store may err. If many are missing at
once, each counts as gone only when the next listing lacks it, too. If a part of a range could not
be read, no block of that range counts as missing.

Several hosts share a store without talking to each other, so whatever is deleted follows from the
store alone. Every host deletes the expired, and the oldest of the tenant that is furthest above its
share. Of two objects of one block it deletes the one with the greater name: two hosts may have
computed bytes that differ in the last digit.
"""

from __future__ import annotations

import heapq
from array import array
from collections import Counter
from collections.abc import Sequence
from enum import Enum

from kvbm_common.tier.machine import Machine
from kvbm_common.tier.slots import Block

from kvbm_disk_tier.core.inventory import Inventory
from kvbm_disk_tier.objects.core.messages import ListedBlock, ListingBegun
from kvbm_disk_tier.objects.core.ranges import WHOLE
from kvbm_disk_tier.objects.core.youngest import Entry, Youngest, order_of

NO_SLOT = 2**32 - 1
"""The slot number of an object that has no slot here."""
WAITING_MAX = 20_000
"""Objects that wait for the slots of others: about 9 MB."""
MISSING_MAX = 2
DOUBTED_MIN = 64
"""Up to this many missing blocks count as gone at once."""
DOUBTED_SHARE = 8
"""And up to one in so many of the compared blocks."""


class ListingState(Enum):
    """The states of a listing, from none to its end."""

    IDLE = "idle"
    RUNNING = "running"
    COMPARING = "comparing"
    JUDGED = "judged"


LISTING = Machine(
    "listing",
    {
        (None, "made"): ListingState.IDLE,
        (ListingState.IDLE, "begun"): ListingState.RUNNING,
        (ListingState.RUNNING, "begun"): ListingState.RUNNING,
        (ListingState.COMPARING, "begun"): ListingState.RUNNING,
        (ListingState.JUDGED, "begun"): ListingState.RUNNING,
        (ListingState.RUNNING, "page"): ListingState.RUNNING,
        (ListingState.RUNNING, "range"): ListingState.RUNNING,
        (ListingState.RUNNING, "compared"): ListingState.COMPARING,
        (ListingState.COMPARING, "compared"): ListingState.COMPARING,
        (ListingState.COMPARING, "ended"): ListingState.JUDGED,
        (ListingState.RUNNING, "ended"): ListingState.JUDGED,
        (ListingState.JUDGED, "lost"): ListingState.JUDGED,
    },
)


class Listing:
    """The comparison of the table with the store. One listing at a time."""

    def __init__(self, *, ttl_ms: int, inventory: Inventory, counts: Counter[str]) -> None:
        """Start before the first listing; objects older than `ttl_ms` are deleted, 0: never."""
        assert ttl_ms >= 0
        self._ttl_ms = ttl_ms
        self._inventory = inventory
        self._counts = counts
        self._state = LISTING.next(None, "made")
        self._ranges = WHOLE
        self._namespaces: frozenset[bytes] | None = None
        self._round = 0
        self._youngest: dict[int, Youngest] = {}
        """Range → the entries that are kept of it."""
        self._waiting: list[Entry] = []
        """A heap of objects without a slot; they get the slots of blocks that are gone."""
        self._listed_count = 0
        """Ranges that are listed to their end."""
        self._unread: set[int] = set()
        """Ranges in which something could not be read: nothing of them is missing."""
        self._named = array("I")
        """Slot → the last listing that has named its block."""
        self._missing = array("B")
        """Slot → listings in a row that have missed its block; no more than MISSING_MAX."""
        self._known = array("Q")
        """Slot → its generation when the slots were last looked at, plus one; 0: it was empty."""
        self._looked_for = self._missed = self._missed_again = 0
        self.doubted_count = 0
        """Blocks that the last listing lacked, and that the next one decides about."""
        self._gone_after = 1
        """A block is gone when so many listings in a row lack it."""

    @property
    def is_running(self) -> bool:
        """Tell whether pages of a listing may come."""
        return self._state is ListingState.RUNNING

    def begun(self, event: ListingBegun) -> None:
        """Begin to compare; a listing that has not ended is forgotten."""
        self._move("begun")
        self._round += 1
        self._ranges, self._namespaces = event.ranges, event.namespaces
        self._youngest.clear()
        self._waiting.clear()
        self._unread.clear()
        self._listed_count = 0
        slot_count = self._inventory.table.slot_count
        for column in (self._named, self._missing, self._known):
            column.frombytes(bytes(column.itemsize * (slot_count - len(column))))
        lengths = {len(self._named), len(self._missing), len(self._known)}
        assert lengths == {slot_count}, f"columns of {lengths} slots, the table has {slot_count}"
        self._looked_for = self._missed = self._missed_again = 0

    # --- pages ------------------------------------------------------------------------------

    def listed(self, objects: Sequence[ListedBlock], number: int, now_ms: int) -> None:
        """Take new objects of a page, as far as they fit; delete those too old or too many."""
        self._move("page")
        assert number < self._ranges.count, f"range {number} of {self._ranges.count}"
        wanted: list[Block] = []
        expired: list[Block] = []
        surplus: set[Block] = set()
        youngest = self._youngest_of(number)
        for found in objects:
            block, stored_ms = found.block, now_ms - found.age_ms
            if self._ttl_ms and found.age_ms > self._ttl_ms:
                expired.append(block)
            elif self._is_wanted(block, now_ms):
                wanted.append(block)
                too_much = youngest.add(block, stored_ms)
                if too_much is not None:
                    surplus.add(too_much)
        # First what leaves: its slots are for what comes, and what is too much is never announced.
        self._delete(expired, "expired", now_ms)
        self._delete(sorted(surplus, key=order_of), "surplus", now_ms)
        new: list[Block] = []
        for block in wanted:
            if block not in surplus:
                self._take(block, new)
        self._inventory.announce_listed(new, now_ms)

    def _youngest_of(self, number: int) -> Youngest:
        """Return what is kept of a range."""
        found = self._youngest.get(number)
        if found is None:
            table = self._inventory.table
            found = Youngest(self._ranges.share(table.slot_count), table.tenants)
            self._youngest[number] = found
        return found

    def _is_wanted(self, block: Block, now_ms: int) -> bool:
        """Tell whether an object may stay: not if a better one of the same block is here."""
        table = self._inventory.table
        slot = table.find(block.hash)
        if slot is None:
            return not table.is_staging(block.hash)
        known = table.block(slot)
        if known == block:
            self._named[slot] = self._round
            return True
        self._counts["object_duplicates"] += 1
        if order_of(block) < order_of(known):
            self._inventory.lose([(slot, known)], "duplicate", now_ms)
            return True
        self._named[slot] = self._round
        self._inventory.journal.removed([(NO_SLOT, block)])
        return False

    def _take(self, block: Block, new: list[Block]) -> None:
        """Give an object that is not here a slot, if one is free."""
        table = self._inventory.table
        if table.holds(block.hash) or table.is_staging(block.hash):
            return
        slot = table.stage(block.hash)
        if slot is not None:
            assert slot < len(self._named), f"slot {slot} of {block} was made since the listing"
            table.register(slot, block)
            self._named[slot] = self._round
            new.append(block)

    def _delete(self, blocks: Sequence[Block], reason: str, now_ms: int) -> None:
        """Delete objects, whether they have a slot or not."""
        table = self._inventory.table
        held: list[tuple[int, Block]] = []
        outside: list[tuple[int, Block]] = []
        for block in blocks:
            slot = table.find(block.hash)
            if slot is not None and table.committed(slot) == block:
                held.append((slot, block))
            else:  # It has no slot, or that of another object of this block, which stays.
                outside.append((NO_SLOT, block))
        self._inventory.lose(held, reason, now_ms)
        self._inventory.journal.removed(outside)
        self._counts[f"evictions.{reason}"] += len(outside)

    def range_listed(self, number: int, now_ms: int, *, is_whole: bool = True) -> None:
        """Give the free slots to objects of a listed range, youngest first."""
        self._move("range")
        if not is_whole:
            self._unread.add(number)
        self._listed_count += 1
        assert self._listed_count <= self._ranges.count, f"range {number} was listed before"
        youngest = self._youngest.pop(number, None)
        for entry in self._fill(youngest.entries() if youngest else [], now_ms):
            heapq.heappush(self._waiting, entry)
            if len(self._waiting) > WAITING_MAX:
                heapq.heappop(self._waiting)
                self._counts["dropped.listed_no_room"] += 1

    def _fill(self, entries: list[Entry], now_ms: int) -> list[Entry]:
        """Give the free slots to objects, youngest first; returns those that got none."""
        table = self._inventory.table
        absent = [e for e in entries if not (table.holds(e[1]) or table.is_staging(e[1]))]
        free = table.reset_count
        if free:
            absent.sort(reverse=True)
        new: list[Block] = []
        for *_, block in absent[:free]:
            self._take(block, new)
        assert len(new) <= free, f"{len(new)} objects took {free} free slots"
        self._inventory.announce_listed(new, now_ms)
        return absent[free:]

    # --- the comparison ---------------------------------------------------------------------

    def compared(self, first: int, count: int) -> None:
        """Look at some slots, for blocks that were looked for and not named."""
        assert self._listed_count == self._ranges.count, "not every range is listed"
        self._move("compared")
        table = self._inventory.table
        for slot in range(first, min(first + count, len(self._known))):
            block = table.committed(slot)
            if block is None or not self._was_looked_for(slot, block):
                self._missing[slot] = 0
            elif self._named[slot] == self._round:
                self._looked_for += 1
                self._missing[slot] = 0
            else:
                self._looked_for += 1
                self._missed += 1
                self._missed_again += self._missing[slot] > 0
                self._missing[slot] = min(self._missing[slot] + 1, MISSING_MAX)
            self._known[slot] = 0 if block is None else table.generation(slot) + 1

    def _was_looked_for(self, slot: int, block: Block) -> bool:
        """Tell whether a block was here when the slots were last looked at, and had to be named."""
        if self._known[slot] != self._inventory.table.generation(slot) + 1:
            return False
        if self._unread and self._ranges.of(block.hash) in self._unread:
            return False
        # It was there before the folders were listed, so its namespace had one if it still is.
        return self._namespaces is None or block.namespace in self._namespaces

    def ended(self) -> None:
        """Decide on missing blocks: if they are many, the next listing has to lack them, too."""
        self._move("ended")
        seen = (self._missed_again, self._missed, self._looked_for)
        assert sorted(seen) == list(seen), f"missed again, missed, looked for: {seen}"
        self._counts["listings"] += 1
        most = max(DOUBTED_MIN, self._looked_for // DOUBTED_SHARE)
        self._gone_after = 1 if self._missed <= most else 2
        is_doubted = self._gone_after > 1
        self.doubted_count = self._missed - self._missed_again if is_doubted else 0
        assert self.doubted_count >= 0, f"{self.doubted_count} blocks are in doubt: {seen}"
        self._counts["listings_doubted"] += self.doubted_count > 0

    def lose_gone(self, first: int, count: int, now_ms: int) -> None:
        """Lose the blocks of some slots that are gone."""
        self._move("lost")
        assert 0 < self._gone_after <= MISSING_MAX, f"{self._gone_after} listings must miss a block"
        table = self._inventory.table
        gone: list[tuple[int, Block]] = []
        for slot in range(first, min(first + count, len(self._known))):
            block = table.committed(slot)
            # In another generation it was stored again since the listing began.
            is_same = self._known[slot] == table.generation(slot) + 1
            if block is not None and is_same and self._missing[slot] >= self._gone_after:
                gone.append((slot, block))
        self._inventory.lose(gone, "gone", now_ms)
        if self._waiting and self._inventory.table.reset_count:
            self._waiting = self._fill(self._waiting, now_ms)
            heapq.heapify(self._waiting)

    def _move(self, event: str) -> None:
        self._state = LISTING.next(self._state, event)

    def check(self) -> None:
        """Assert every invariant of the listing."""
        assert self.is_running or not self._youngest, "a range is open, and no listing runs"
        for youngest in self._youngest.values():
            youngest.check()
        assert self._missed_again <= self._missed <= self._looked_for
        assert self._listed_count <= self._ranges.count
        assert len(self._waiting) <= WAITING_MAX
        assert len(self._unread) <= self._listed_count
        assert len(self._named) == len(self._missing) == len(self._known)
