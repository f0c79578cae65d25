"""The journal's records, in order, and the rewrite that shortens the journal while it is in use.

A rewrite visits the slots, some in each step, and writes their blocks into a new file. Records that
are appended meanwhile go into both files. Each record has an *order*, a growing number. The record
with the highest order of a place is valid, wherever it stands in the file: a block may come or go
before or after the rewrite visits its slot.

    due ──► first part: blocks being committed, and the first slots ──► … ──► last part: the new
            file replaces the old one            any part fails ──► the old file stays in use
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable

from kvbm_common.tier.blocks import Block
from kvbm_common.tier.diary import Diary
from kvbm_common.tier.layout import Layout
from kvbm_common.tier.slots import SlotTable
from kvbm_common.wire.bounds import Usage

from kvbm_disk_tier.core.effects import AppendJournal, RewriteJournal
from kvbm_disk_tier.core.journal import RECORD_BYTES, Operation, Record, Replay
from kvbm_disk_tier.core.limits import Means
from kvbm_disk_tier.core.messages import JournalRewritten

Entries = list[tuple[int, Block]]
"""Slots and the blocks in them."""
JOURNAL_RECORDS_MIN = 65_536
"""8 MiB: a shorter journal is not rewritten."""
JOURNAL_SHARE = 16
"""A small store's journal is not rewritten before it takes 1/16 of the store's bytes."""
REWRITE_PAUSE_MS = 5_000
"""Pause before a failed rewrite is tried again."""


def journal_records_max(slot_count: int, slot_bytes: int, records_per_slot: int) -> int:
    """Return how many records a journal may have before it is rewritten."""
    assert slot_count > 0, "a store has slots"
    worth = min(JOURNAL_RECORDS_MIN, slot_count * slot_bytes // JOURNAL_SHARE // RECORD_BYTES)
    return max(worth, records_per_slot * slot_count)


class JournalWriter:
    """The records of one store, in order.

    A bucket has no journal: its medium takes a record of a removed block as an order to delete the
    object, and nothing is counted here.
    """

    def __init__(
        self, *, has_file: bool, place: Callable[[int], int], diary: Diary, means: Means
    ) -> None:
        """Start without records; `place` returns where a slot of the store begins."""
        assert means.limits.journal_records_per_slot >= 0, means.limits
        self.record_count = 0
        """Records in the file."""
        self.longest = JOURNAL_RECORDS_MIN
        """A file with more records is rewritten."""
        self._shortest = 0
        """Records that the last rewrite wrote; the file cannot be shorter."""
        self._rewrite_from_ms: int | None = 0
        """The time from which a rewrite may begin; None: one is under way."""
        self._next_slot = self._part_records = self._next_records = 0
        """State of the rewrite under way: its next slot, the records of its parts, and all records
        of the new file, those appended meanwhile included."""
        self._part_in_flight = False
        self._is_wrong = False
        """The file is to be rewritten: it lists blocks that are gone, or a rewrite has failed."""
        self._lacks_removals = False
        """The file in use lists blocks that are gone."""
        self._due_since_ms: int | None = None
        self.due_ms = 0
        """The time for which a rewrite has been due without success, as of the last tick."""
        self._has_file = has_file
        self._place = place
        self._diary = diary
        self._limits, self._counts, self._emit = means.limits, means.counts, means.emit
        self._order = 1
        self.removal_order = 0
        """The order of the last record of a removed block in this life; 0: there was none."""
        self._order_of = array("Q")
        """Slot → the order of the record of the block in it."""
        self._former_order = 0
        """The highest order that `restored` has given to a block of a former life."""

    def opened(self, replay: Replay, layout: Layout) -> None:
        """Append to the journal of the store that was opened, after its last record."""
        assert replay.next_order > 0
        assert layout.slot_count > 0, "a store has slots"
        self._order = replay.next_order
        self._order_of, self._former_order = array("Q"), 0
        self.record_count = replay.records
        per_slot = self._limits.journal_records_per_slot
        self.longest = journal_records_max(layout.slot_count, layout.slot_bytes, per_slot)
        self._set_longest(len(replay.blocks))
        self._rewrite_from_ms, self._part_in_flight, self._is_wrong = 0, False, False
        self._shortest, self._lacks_removals = 0, False
        self._counts["journal_damaged_records"] += replay.damaged

    def restored(self, slots: Iterable[int]) -> None:
        """Give the blocks of a former life their orders, oldest block first.

        No rewrite begins before all of them have one. The orders differ from those in the file:
        they count from 1. They stay below the orders of this life, since each block had a record.
        """
        for slot in slots:
            self._former_order += 1
            self._set_order(slot, self._former_order)
        assert self._former_order <= self._order, f"{self._former_order} blocks had {self._order}"

    def committed(self, write_id: int, entries: Iterable[tuple[int, Block]]) -> None:
        """Record that these slots hold these blocks; ends in Journaled or JournalFailed."""
        records = self._records(Operation.COMMITTED, entries)
        assert records, f"write {write_id} commits nothing"
        self._append(write_id, records)

    def removed(self, entries: Iterable[tuple[int | None, Block]]) -> None:
        """Record that these blocks have left these slots.

        Nothing waits for the record: if it is lost, the checksum reveals the stale entry.
        """
        records = self._records(Operation.REMOVED, entries)
        if records:
            self.removal_order = records[-1].order
            self._append(None, records)

    def usage(self) -> Usage:
        """Return the journal's records, of those that it may have before it is rewritten."""
        return Usage(self.record_count, max(self.longest, self._shortest))

    def not_removed(self) -> None:
        """Note that records of removed blocks were lost: a rewrite is due, without the blocks."""
        self._is_wrong = self._lacks_removals = self._has_file

    @property
    def problem(self) -> str:
        """The reason why removed blocks may come back with the next start; empty: they do not."""
        text = "the journal lacks records of removed blocks until it is rewritten; ask again then"
        return text if self._lacks_removals else ""

    # --- the rewrite ------------------------------------------------------------------------

    def advance(self, table: SlotTable, committing: Callable[[], Entries], now_ms: int) -> None:
        """Begin a rewrite that is due, or write the next part of the one under way.

        `committing` returns the blocks whose records are being appended: the table lacks them yet.
        """
        is_due = self._is_due(now_ms)
        is_first = self._rewrite_from_ms is not None
        if self._part_in_flight or table.folded_count or (is_first and not is_due):
            return
        entries: Entries = []
        if is_first:
            entries = committing()
            self._rewrite_from_ms, self._is_wrong = None, False
            self._next_slot = self._part_records = self._next_records = 0
        end = min(self._next_slot + self._limits.rewritten_slots_max, table.slots_made)
        entries += table.found_in(range(self._next_slot, end))
        self._next_slot = end
        records = tuple(
            Record(Operation.COMMITTED, self._order_of[slot], self._place(slot), block)
            for slot, block in entries
        )
        self._part_records += len(records)
        self._next_records += len(records)
        self._counts["bytes.journal"] += len(records) * RECORD_BYTES
        self._part_in_flight = True
        self._emit(RewriteJournal(records, is_first=is_first, is_last=end == table.slots_made))

    def _is_due(self, now_ms: int) -> bool:
        """Tell whether a rewrite is to begin now."""
        wanted = self._is_wrong or self.record_count > max(self.longest, self._shortest)
        if not wanted and self._rewrite_from_ms is not None:
            self._due_since_ms = None
        elif self._due_since_ms is None:
            self._due_since_ms = now_ms
        self.due_ms = 0 if self._due_since_ms is None else now_ms - self._due_since_ms
        assert self.due_ms >= 0, (
            f"a rewrite is due since {self._due_since_ms} ms, after now ({now_ms} ms)"
        )
        from_ms = self._rewrite_from_ms
        return wanted and from_ms is not None and now_ms >= from_ms

    def dropped(self) -> None:
        """Give up the rewrite under way: another store takes the place of this one."""
        self._rewrite_from_ms, self._part_in_flight, self._is_wrong = 0, False, False
        self.record_count, self._shortest, self._lacks_removals = 0, 0, False

    def part_written(self) -> None:
        """Note that a part is written: the next one may follow."""
        self._part_in_flight = False

    def rewritten(self, event: JournalRewritten, now_ms: int) -> None:
        """Note how a rewrite has ended; after a failure the old file is still in use."""
        if self._rewrite_from_ms is not None:
            return  # It belongs to a store that has been replaced.
        self._part_in_flight = False
        if event.failure:
            self._rewrite_from_ms, self._is_wrong = now_ms + REWRITE_PAUSE_MS, True
            return
        self._rewrite_from_ms = 0
        self._lacks_removals = self._is_wrong  # More records may have been lost meanwhile.
        self.record_count = self._shortest = self._next_records
        self._set_longest(self._part_records)

    def _set_longest(self, block_count: int) -> None:
        """Raise the limit for a store of many small blocks: it may have more blocks than slots."""
        self.longest = max(self.longest, self._limits.journal_records_per_slot * block_count)

    # --- records ----------------------------------------------------------------------------

    def _records(
        self, operation: Operation, entries: Iterable[tuple[int | None, Block]]
    ) -> tuple[Record, ...]:
        records: list[Record] = []
        for slot, block in entries:
            assert slot is not None, self._diary.story(block.hash)
            self._order += 1
            if self._has_file and operation is Operation.COMMITTED:
                self._set_order(slot, self._order)
            # An object is found by its name: it has a slot number here, and no place.
            place = self._place(slot) if self._has_file else slot
            records.append(Record(operation, self._order, place, block))
        return tuple(records)

    def _set_order(self, slot: int, order: int) -> None:
        if slot >= len(self._order_of):
            self._order_of.frombytes(bytes(8 * (slot + 1 - len(self._order_of))))
        self._order_of[slot] = order

    def _append(self, write_id: int | None, records: tuple[Record, ...]) -> None:
        self._emit(AppendJournal(write_id, records))
        if self._has_file:
            self.record_count += len(records)
            if self._rewrite_from_ms is None:
                self._next_records += len(records)
            self._counts["bytes.journal"] += len(records) * RECORD_BYTES
