"""The diary: what a core did lately, bounded, so that an assertion can tell a block's story."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from kvbm_common.identity import SequenceHash

DIARY_ENTRIES_MAX = 20_000
"""About 3 MB: minutes of a busy tier, enough for the story of any block in flight."""


@dataclass(frozen=True, slots=True)
class _Entry:
    now_ms: int
    what: str
    block: SequenceHash


class Diary:
    """A bounded log of (when, what, which block), newest last."""

    def __init__(self, entries_max: int = DIARY_ENTRIES_MAX) -> None:
        self._entries: deque[_Entry] = deque(maxlen=entries_max)

    def note(self, now_ms: int, what: str, block: SequenceHash) -> None:
        """Remember that `what` happened to `block`."""
        self._entries.append(_Entry(now_ms, what, block))

    def entries(self, block: SequenceHash) -> list[tuple[int, str]]:
        """All that is remembered of one block, (when in ms, what), oldest first."""
        return [(entry.now_ms, entry.what) for entry in self._entries if entry.block == block]

    def story(self, block: SequenceHash) -> list[str]:
        """The same as text."""
        return [f"{now_ms} ms {what}" for now_ms, what in self.entries(block)]
