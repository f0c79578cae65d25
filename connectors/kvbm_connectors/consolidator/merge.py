"""The merger: the changes of one batch as few drafts of events as their order allows.

Removals and stores of different blocks may change places, so a batch becomes one removal followed
by one store per group. Only a block that is stored and then removed in the same batch ends the
draft: its removal must come after its store.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvbm_common.announcer import EVENT_BLOCKS_MAX
from kvbm_common.identity import SequenceHash
from kvbm_common.wire.events import Run

from kvbm_connectors.consolidator.view import BlockRun


@dataclass(frozen=True, slots=True)
class StoredDraft:
    """A store without its number."""

    group: int
    namespace: str
    runs: list[Run]


@dataclass(frozen=True, slots=True)
class RemovedDraft:
    """A removal without its number."""

    group: int
    namespace: str
    hashes: list[str]


@dataclass(frozen=True, slots=True)
class ClearedDraft:
    """The rank holds nothing any more."""

    reason: str


Draft = StoredDraft | RemovedDraft | ClearedDraft


@dataclass(slots=True)
class _Open:
    """What is gathered of one group."""

    namespace: str
    removed: list[SequenceHash] = field(default_factory=list)
    runs: list[BlockRun] = field(default_factory=list)
    stored: set[SequenceHash] = field(default_factory=set)


class Merger:
    """Gathers changes in the order in which they happened."""

    def __init__(self, blocks_max: int = EVENT_BLOCKS_MAX) -> None:
        self._blocks_max = blocks_max
        self._open: dict[int, _Open] = {}
        self._drafts: list[Draft] = []

    def stored(self, group: int, namespace: str, runs: Sequence[BlockRun]) -> None:
        """These blocks are new."""
        opened = self._open_of(group, namespace)
        for parent, hashes in runs:
            opened.stored.update(hashes)
            if opened.runs and opened.runs[-1][1][-1] == parent:
                opened.runs[-1][1].extend(hashes)
            else:
                opened.runs.append((parent, list(hashes)))

    def removed(self, group: int, namespace: str, hashes: Sequence[SequenceHash]) -> None:
        """These blocks are gone."""
        if not self._open_of(group, namespace).stored.isdisjoint(hashes):
            self._close(group)
        self._open_of(group, namespace).removed.extend(hashes)

    def cleared(self, reason: str) -> None:
        """Everything is gone: what was gathered before need not be said."""
        self._open.clear()
        self._drafts = [ClearedDraft(reason)]

    def take(self) -> list[Draft]:
        """All drafts, in order; the merger is empty then."""
        for group in list(self._open):
            self._close(group)
        drafts, self._drafts = self._drafts, []
        return drafts

    def _open_of(self, group: int, namespace: str) -> _Open:
        return self._open.setdefault(group, _Open(namespace))

    def _close(self, group: int) -> None:
        opened = self._open.pop(group)
        for start in range(0, len(opened.removed), self._blocks_max):
            hashes = [block.hex() for block in opened.removed[start : start + self._blocks_max]]
            self._drafts.append(RemovedDraft(group, opened.namespace, hashes))
        for runs in _cut(opened.runs, self._blocks_max):
            self._drafts.append(StoredDraft(group, opened.namespace, runs))


def _cut(runs: list[BlockRun], blocks_max: int) -> Iterator[list[Run]]:
    """Runs in portions of at most `blocks_max` blocks; a longer run is cut."""
    portion: list[Run] = []
    room = blocks_max
    for run_parent, hashes in runs:
        parent, start = run_parent, 0
        while start < len(hashes):
            part = hashes[start : start + room]
            portion.append(Run(parent=parent.hex(), hashes=[block.hex() for block in part]))
            start += len(part)
            room -= len(part)
            parent = part[-1]
            if room == 0:
                yield portion
                portion, room = [], blocks_max
    if portion:
        yield portion
