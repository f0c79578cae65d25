"""The diary: what a core did lately, bounded, so that an assertion can tell a block's story."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from kvbm_common.identity import SequenceHash
from kvbm_common.wire.bounds import Usage

DIARY_ENTRIES_MAX = 20_000
"""Blocks. About 3 MB: minutes of a busy tier, enough for the story of any block in flight."""


class _Entry(NamedTuple):
    now_ms: int
    what: str
    blocks: Sequence[SequenceHash]
    slots: Sequence[int]

    def told_of(self, block: SequenceHash) -> str:
        assert block in self.blocks, f"{self.what!r} is not about {block.hex()}"
        if not self.slots:
            return self.what
        return self.what.replace("{slot}", str(self.slots[self.blocks.index(block)]))


class Diary:
    """A bounded log of (when, what, which blocks), newest last."""

    def __init__(self, entries_max: int = DIARY_ENTRIES_MAX) -> None:
        assert entries_max > 0, f"a diary of {entries_max} blocks"
        self._entries: deque[_Entry] = deque()
        self._entries_max = entries_max
        self._blocks = self._forgotten = 0

    def __len__(self) -> int:
        """Return how many entries there are."""
        return len(self._entries)

    def usage(self) -> Usage:
        """Return how full the diary is. It tells no reach: minutes suffice for a story."""
        assert self._blocks <= self._entries_max, f"{self._blocks} blocks are in the diary"
        return Usage(self._blocks, self._entries_max, self._forgotten)

    def note(self, now_ms: int, what: str, block: SequenceHash) -> None:
        """Remember that `what` happened to `block`."""
        self.note_all(now_ms, what, (block,))

    def note_all(
        self, now_ms: int, what: str, blocks: Sequence[SequenceHash], slots: Sequence[int] = ()
    ) -> None:
        """Remember that `what` happened to all of these, and `{slot}` in it is the slot of each.

        Neither sequence may change any more.
        """
        if not blocks:
            return
        assert len(slots) in (0, len(blocks)), f"{what}: {len(blocks)} blocks in {len(slots)} slots"
        self._entries.append(_Entry(now_ms, what, blocks, slots))
        self._blocks += len(blocks)
        while self._blocks > self._entries_max:
            forgotten = len(self._entries.popleft().blocks)
            self._blocks -= forgotten
            self._forgotten += forgotten
        assert self._blocks >= 0, f"{what}: another entry has changed since it was made"

    def entries(self, block: SequenceHash) -> list[tuple[int, str]]:
        """Return all that is remembered of one block, (when in ms, what), oldest first."""
        return [
            (entry.now_ms, entry.told_of(block)) for entry in self._entries if block in entry.blocks
        ]

    def story(self, block: SequenceHash) -> list[str]:
        """Return all that is remembered of one block, a text per entry, oldest first."""
        return [f"{now_ms} ms {what}" for now_ms, what in self.entries(block)]
