"""Writer of the committed table: lists each announced block before its event is published."""

from __future__ import annotations

import logging
from typing import assert_never

from kvbm_common.identity import hashes_from_hex
from kvbm_common.memory.arena import ArenaNoSpace, ArenaUnavailable
from kvbm_common.memory.committed_table import CommittedTable
from kvbm_common.runtime.metrics import Metrics
from kvbm_common.wire.events import Cleared, Event, Removed, Stored

from kvbm_host_tier.core.view import HostTierView

SMALL_BLOCK_BYTES = 64 * 1024
"""The table has room for an arena full of blocks of this size, or of the first ones if smaller."""

log = logging.getLogger(__name__)


class CommittedTableWriter:
    """The owner of one arena's table. The first block creates it: then the slot size is known."""

    def __init__(self, view: HostTierView, counters: Metrics) -> None:
        self._view = view
        self._table: CommittedTable | None = None
        self._has_failed = False
        self._unlisted = counters.counter(
            "kvbm_roster_unlisted_total",
            "Blocks that the roster had no room for: engines ask for them.",
        )

    def follow(self, event: Event) -> None:
        """Update the table after an event: blocks come and go."""
        match event:
            case Stored(runs=runs):
                table = self._table or self._make()
                if table is not None:
                    names = (name for run in runs for name in hashes_from_hex(run.hashes))
                    self._unlisted.inc(table.add(names))
            case Removed(hashes=hashes):
                if self._table is not None:
                    self._table.remove(hashes_from_hex(hashes))
            case Cleared():
                if self._table is not None:
                    self._table.clear()
            case _:
                assert_never(event)

    def _make(self) -> CommittedTable | None:
        """Create the table, or return None if that has failed: then engines ask."""
        if self._has_failed:
            return None
        view = self._view
        try:
            layout = view.layout
            assert layout is not None, "blocks are announced before the arena is cut"
            # Smaller blocks may come later; a table that they overflow is still a hint.
            slot_count = layout.total_bytes // min(layout.slot_bytes, SMALL_BLOCK_BYTES)
            self._table = CommittedTable.create(
                view.arena.path, slot_count=slot_count, epoch=view.epoch
            )
        except (ArenaNoSpace, ArenaUnavailable) as error:
            log.warning("no committed table: engines ask for every block: %s", error)
            self._has_failed = True
        return self._table

    def close(self) -> None:
        """Unlink the table's file."""
        if self._table is not None:
            self._table.close()
            self._table = None
