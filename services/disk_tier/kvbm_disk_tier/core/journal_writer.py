"""The journal's records, in order, and its rewrite: in parts, beside everything else.

A rewrite goes over the slots, some in each step, and writes what they hold into another file. What
is appended meanwhile goes into both. A record keeps its order, so that the newest one of a place
counts, whichever came into the file first: a block may come or go before its slot's turn or after.

    due ──► first part: what is being committed, and the first slots ──► … ──► last part: the files
            change places                                  any part fails ──► the old file stays
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable

from kvbm_common.tier.blocks import Block
from kvbm_common.tier.diary import Diary
from kvbm_common.tier.layout import Layout
from kvbm_common.tier.slots import SlotTable
from kvbm_common.wire.bounds import Fill

from kvbm_disk_tier.core.effects import AppendJournal, RewriteJournal
from kvbm_disk_tier.core.journal import RECORD_BYTES, Operation, Record, Replay
from kvbm_disk_tier.core.limits import Means
from kvbm_disk_tier.core.messages import JournalRewritten

Entries = list[tuple[int, Block]]
"""Slots and the blocks in them."""
JOURNAL_RECORDS_MIN = 65_536
"""8 MiB: a journal shorter than that is not worth a rewrite."""
JOURNAL_SHARE = 16
"""Of a small store the journal takes no more than one part of so many, if that is enough."""
REWRITE_PAUSE_MS = 5_000
"""Until a rewrite that has failed is tried again."""


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
        """Records that the last rewrite has written."""
        self._rewrite_from_ms: int | None = 0
        """When a rewrite may begin; None: one is under way."""
        self._next_slot = self._part_records = self._next_records = 0
        """Of the rewrite under way: the slot that it goes on with, records of its parts, and those
        of the file that it writes."""
        self._part_flies = False
        self._is_wrong = False
        """Blocks were removed, and the file does not say so."""
        self._due_since_ms: int | None = None
        self.due_ms = 0
        """How long a rewrite is wanted and has not ended well, as of the last tick."""
        self._has_file = has_file
        self._place = place
        self._diary = diary
        self._limits, self._counts, self._emit = means.limits, means.counts, means.emit
        self._order = 1
        self._order_of = array("Q")
        """By slot, the order of the record of the block in it."""
        self._former_order = 0
        """That of the last block of a former life whose slot is in `_order_of`."""

    def opened(self, replay: Replay, layout: Layout) -> None:
        """Go on behind the journal of the store that was opened."""
        assert replay.next_order > 0
        assert layout.slot_count > 0, "a store has slots"
        self._order = replay.next_order
        self._order_of, self._former_order = array("Q"), 0
        self.record_count = replay.records
        per_slot = self._limits.journal_records_per_slot
        self.longest = journal_records_max(layout.slot_count, layout.slot_bytes, per_slot)
        self._set_longest(len(replay.blocks))
        self._rewrite_from_ms, self._part_flies, self._is_wrong = 0, False, False
        self._shortest = 0
        self._counts["journal_damaged_records"] += replay.damaged

    def restored(self, slots: Iterable[int]) -> None:
        """Note the slots of a former life's blocks, oldest first; before all of these are noted,
        nothing is rewritten.

        Their orders are not those of the file: they count from 1, and stay below those of this
        life, since each of them had a record of its own.
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
        """Record that these slots hold these blocks no more.

        Nothing waits for it: the checksum finds what a lost record leaves behind.
        """
        records = self._records(Operation.REMOVED, entries)
        if records:
            self._append(None, records)

    def fill(self) -> Fill:
        """Return how long the journal is; above its size it waits for a rewrite."""
        return Fill(self.record_count, max(self.longest, self._shortest))

    def not_removed(self) -> None:
        """Note that records of removed blocks were lost: a rewrite leaves the blocks out."""
        self._is_wrong = self._has_file

    # --- the rewrite ------------------------------------------------------------------------

    def advance(self, table: SlotTable, committing: Callable[[], Entries], now_ms: int) -> None:
        """Begin a rewrite that is due, or write the next part of the one under way.

        `committing` returns what is being appended, and not in the table yet.
        """
        is_due = self._is_due(now_ms)
        is_first = self._rewrite_from_ms is not None
        if self._part_flies or table.folded_count or (is_first and not is_due):
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
        self._part_flies = True
        self._emit(RewriteJournal(records, is_first=is_first, is_last=end == table.slots_made))

    def _is_due(self, now_ms: int) -> bool:
        """Tell whether a rewrite is to begin now."""
        wanted = self._is_wrong or self.record_count > max(self.longest, self._shortest)
        if not wanted and self._rewrite_from_ms is not None:
            self._due_since_ms = None
        elif self._due_since_ms is None:
            self._due_since_ms = now_ms
        self.due_ms = 0 if self._due_since_ms is None else now_ms - self._due_since_ms
        assert self.due_ms >= 0, f"due since {self._due_since_ms} ms, and it is {now_ms} ms"
        from_ms = self._rewrite_from_ms
        return wanted and from_ms is not None and now_ms >= from_ms

    def dropped(self) -> None:
        """Give up the rewrite under way: another store takes the place of this one."""
        self._rewrite_from_ms, self._part_flies, self._is_wrong = 0, False, False
        self.record_count = self._shortest = 0

    def part_written(self) -> None:
        """Note that a part is written: the next one may follow, if that store is still here."""
        self._part_flies = False

    def rewritten(self, event: JournalRewritten, now_ms: int) -> None:
        """Note how a rewrite has ended; after a failure the long file is still there."""
        if self._rewrite_from_ms is not None:
            return  # Of a store that is gone.
        self._part_flies = False
        if event.failure:
            self._rewrite_from_ms, self._is_wrong = now_ms + REWRITE_PAUSE_MS, True
            return
        self._rewrite_from_ms = 0
        self.record_count = self._shortest = self._next_records
        self._set_longest(self._part_records)

    def _set_longest(self, block_count: int) -> None:
        """Let the journal grow to a multiple of so many blocks: small ones are more than slots."""
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
            # In a bucket the name says where a block is: an object may have no slot here.
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
