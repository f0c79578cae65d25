"""Committed pages: those that the host tier's committed table lists, found without a question.

SGLang asks whether pages exist, and reads them later. This process maps the committed table: for
listed pages SGLang gets its answer at once, while the lookup that leases them is on its way. If one
has gone meanwhile, the read fails. A page that is not listed may be in a lower tier or on another
host: then the host tier is asked.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvbm_common.identity import SequenceHash
from kvbm_common.memory.arena import ArenaUnavailable
from kvbm_common.memory.committed_table import CommittedTableReader
from kvbm_common.wire.local import Welcome


class CommittedPages:
    """The committed table of the host tier's present life. Not thread-safe."""

    def __init__(self) -> None:
        self._table: CommittedTableReader | None = None

    def which(
        self, names: Sequence[SequenceHash], welcome: Welcome | None, *, epoch: int
    ) -> list[bool] | None:
        """Return for each page whether it is listed; None where the host tier of `epoch` has no
        list."""
        table = self._present(welcome, epoch)
        return None if table is None else [table.has_all([name]) for name in names]

    def covers(self, names: Sequence[SequenceHash], welcome: Welcome | None, *, epoch: int) -> bool:
        """Return whether all of these pages are listed."""
        table = self._present(welcome, epoch)
        return table is not None and table.has_all(names)

    def _present(self, welcome: Welcome | None, epoch: int) -> CommittedTableReader | None:
        if welcome is None or welcome.epoch != epoch or not epoch:
            return None
        if self._table is None or self._table.epoch != epoch:
            self.close()
            try:
                self._table = CommittedTableReader(welcome.arena_path, epoch)
            except ArenaUnavailable:  # Nothing was stored yet, or it could not be made.
                return None
        return self._table

    def close(self) -> None:
        """Unmap the table, if mapped."""
        if self._table is not None:
            self._table.close()
            self._table = None
