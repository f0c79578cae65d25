"""The journal's writer: numbers the records, and has a journal that grew too long rewritten."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from kvbm_common.tier.diary import Diary
from kvbm_common.tier.slots import Block

from kvbm_disk_tier.core.effects import AppendJournal, RewriteJournal
from kvbm_disk_tier.core.journal import RECORD_BYTES, Operation, Record, Replay
from kvbm_disk_tier.core.outbox import Outbox

JOURNAL_RECORDS_MIN = 65_536
"""8 MiB: a journal shorter than that is not worth a rewrite."""


class JournalWriter:
    """The records of one store, in order.

    A bucket has no journal: its medium takes a record of a removed block as an order to delete the
    object, and nothing is counted here.
    """

    def __init__(
        self, *, has_file: bool, records_per_slot: int, outbox: Outbox, diary: Diary,
        counts: Counter[str],
    ) -> None:  # fmt: skip
        assert records_per_slot >= 0
        self.record_count = 0
        """Records in the file."""
        self.longest = JOURNAL_RECORDS_MIN
        """A file with more records is rewritten."""
        self._has_file = has_file
        self._records_per_slot = records_per_slot
        self._outbox = outbox
        self._diary = diary
        self._counts = counts
        self._order = 1

    def opened(self, replay: Replay, slot_count: int) -> None:
        """Go on behind the journal of the store that was opened."""
        assert replay.next_order > 0
        assert slot_count > 0, "a store has slots"
        self._order = replay.next_order
        self.record_count = replay.records
        self.longest = max(JOURNAL_RECORDS_MIN, self._records_per_slot * slot_count)
        self._counts["journal_damaged_records"] += replay.damaged

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

    def rewrite(self, live: Iterable[tuple[int | None, Block]]) -> None:
        """Replace the journal by records of what is live."""
        assert self._has_file, "there is no journal to rewrite"
        records = self._records(Operation.COMMITTED, live)
        self.record_count = len(records)
        self._counts["bytes.journal"] += len(records) * RECORD_BYTES
        self._outbox.emit(RewriteJournal(records))

    def _records(
        self, operation: Operation, entries: Iterable[tuple[int | None, Block]]
    ) -> tuple[Record, ...]:
        records: list[Record] = []
        for slot, block in entries:
            assert slot is not None, self._diary.story(block.hash)
            self._order += 1
            records.append(Record(operation, self._order, slot, block))
        return tuple(records)

    def _append(self, write_id: int | None, records: tuple[Record, ...]) -> None:
        self._outbox.emit(AppendJournal(write_id, records))
        if self._has_file:
            self.record_count += len(records)
            self._counts["bytes.journal"] += len(records) * RECORD_BYTES
