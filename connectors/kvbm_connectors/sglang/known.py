"""Known pages: those in this host's memory, so that a question need not wait for an answer.

SGLang asks whether pages exist, and reads them later. The host tier lists what it holds in a
roster that this process maps: of listed pages the question is answered at once, while the lookup
that leases them is on its way. Whether they are still there, the read will tell. What is not listed
may be below or on another host: only an answer tells that.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvbm_common.identity import SequenceHash
from kvbm_common.memory.arena import ArenaUnavailable
from kvbm_common.memory.committed_table import CommittedTableReader
from kvbm_common.wire.local import Welcome


class Known:
    """The roster of the host tier's present life. Not thread-safe."""

    def __init__(self) -> None:
        self._roster: CommittedTableReader | None = None

    def which(
        self, names: Sequence[SequenceHash], welcome: Welcome | None, *, epoch: int
    ) -> list[bool]:
        """Return for each page whether it is listed; False for all where the host tier of `epoch`
        lists nothing."""
        roster = self._present(welcome, epoch)
        return [roster is not None and roster.has_all([name]) for name in names]

    def covers(self, names: Sequence[SequenceHash], welcome: Welcome | None, *, epoch: int) -> bool:
        """Return whether all of these pages are listed."""
        roster = self._present(welcome, epoch)
        return roster is not None and roster.has_all(names)

    def _present(self, welcome: Welcome | None, epoch: int) -> CommittedTableReader | None:
        if welcome is None or welcome.epoch != epoch or not epoch:
            return None
        if self._roster is None or self._roster.epoch != epoch:
            self.close()
            try:
                self._roster = CommittedTableReader(welcome.arena_path, epoch)
            except ArenaUnavailable:  # Nothing was stored yet, or it could not be made.
                return None
        return self._roster

    def close(self) -> None:
        """Unmap the table, if mapped."""
        if self._roster is not None:
            self._roster.close()
            self._roster = None
