"""Batch merger: turns the changes of one batch into as few drafts of events as their order allows.

Removals and stores of different blocks may change places, so a batch becomes one removal followed
by one store per group. Only a block that is stored and then removed in the same batch ends the
draft: its removal must come after its store.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from kvbm_common.identity import SequenceHash
from kvbm_common.tier.announcer import EVENT_BLOCKS_MAX
from kvbm_common.wire.raw_events import RawRun

from kvbm_connectors.consolidator.core.held_blocks import Held, HeldBlocks


@dataclass(frozen=True, slots=True)
class StoredDraft:
    """A store without its number."""

    group: int
    namespace: str
    runs: list[RawRun]
    held: Held
    """All that the rank holds in this group, with the changes of drafts after this one."""


@dataclass(frozen=True, slots=True)
class RemovedDraft:
    """A removal without its number."""

    group: int
    namespace: str
    hashes: list[SequenceHash]


@dataclass(frozen=True, slots=True)
class ClearedDraft:
    """The rank holds nothing any more."""

    reason: str


Draft = StoredDraft | RemovedDraft | ClearedDraft


def blocks_of(drafts: Iterable[Draft]) -> set[SequenceHash]:
    """Return the blocks that drafts store or remove."""
    found: set[SequenceHash] = set()
    for draft in drafts:
        match draft:
            case StoredDraft():
                found.update(*(run for _, run in draft.runs))
            case RemovedDraft():
                found.update(draft.hashes)
    return found


@dataclass(slots=True)
class _Open:
    """The stored and removed blocks gathered of one group."""

    namespace: str
    held: Held
    removed: list[SequenceHash] = field(default_factory=list)
    runs: list[RawRun] = field(default_factory=list)
    stored: set[SequenceHash] = field(default_factory=set)
    """The blocks of `runs`, with which removals are compared; filled when the first one comes."""
    uncompared: list[list[SequenceHash]] = field(default_factory=list)
    """Blocks that are in `runs` and not in `stored` yet."""


class BatchMerger:
    """Gathers changes in the order in which they happened."""

    def __init__(self) -> None:
        self._open: dict[int, _Open] = {}
        self._drafts: list[Draft] = []

    def stored(self, group: int, held_blocks: HeldBlocks, runs: Sequence[RawRun]) -> None:
        """Gather blocks that are new in a group."""
        opened = self._open_of(group, held_blocks)
        for parent, hashes in runs:
            opened.uncompared.append(hashes)
            if opened.runs and opened.runs[-1][1][-1] == parent:
                opened.runs[-1][1].extend(hashes)
            else:
                opened.runs.append((parent, list(hashes)))

    def removed(self, group: int, held_blocks: HeldBlocks, hashes: Sequence[SequenceHash]) -> None:
        """Gather blocks that are gone from a group. If one was stored in this batch, begin a new
        draft."""
        assert hashes, f"group {group} removes nothing"
        opened = self._open_of(group, held_blocks)
        opened.stored.update(*opened.uncompared)
        opened.uncompared.clear()
        if not opened.stored.isdisjoint(hashes):
            self._close(group)
            opened = self._open_of(group, held_blocks)
        opened.removed.extend(hashes)

    def cleared(self, reason: str) -> None:
        """Drop what was gathered before, which need not be published: everything is gone."""
        assert reason, "all is cleared for a reason"
        self._open.clear()
        self._drafts = [ClearedDraft(reason)]

    def take(self) -> list[Draft]:
        """Return all drafts, in order, and leave the merger empty."""
        for group in list(self._open):
            self._close(group)
        assert not self._open, f"groups {list(self._open)} are not closed"
        drafts, self._drafts = self._drafts, []
        return drafts

    def _open_of(self, group: int, held_blocks: HeldBlocks) -> _Open:
        opened = self._open.get(group)
        if opened is None:
            opened = self._open[group] = _Open(held_blocks.namespace_hex, held_blocks.held)
        assert opened.held is held_blocks.held, f"group {group} has other held blocks"
        return opened

    def _close(self, group: int) -> None:
        opened = self._open.pop(group)
        for start in range(0, len(opened.removed), EVENT_BLOCKS_MAX):
            gone = opened.removed[start : start + EVENT_BLOCKS_MAX]
            self._drafts.append(RemovedDraft(group, opened.namespace, gone))
        for portion in _cut(opened.runs):
            assert portion, f"an event of group {group} stores no block"
            self._drafts.append(StoredDraft(group, opened.namespace, portion, opened.held))


def _cut(runs: list[RawRun]) -> Iterator[list[RawRun]]:
    """Yield the runs in portions for one event each; a longer run is cut."""
    portion: list[RawRun] = []
    room = EVENT_BLOCKS_MAX
    for run_parent, hashes in runs:
        parent, start = run_parent, 0
        while start < len(hashes):
            part = hashes[start : start + room]
            assert 0 < len(part) <= room, f"{len(part)} blocks, with room for {room}"
            portion.append((parent, part))
            start += len(part)
            room -= len(part)
            parent = part[-1]
            if room == 0:
                yield portion
                portion, room = [], EVENT_BLOCKS_MAX
    if portion:
        yield portion
