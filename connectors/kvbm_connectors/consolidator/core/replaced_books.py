"""Replaced books: what a tier has gained and lost at once is announced in parts.

A snapshot, or the end of a life, replaces the books of a tier. Until the part that has a block's
change, listeners know it as the book before had it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

from kvbm_common.identity import SequenceHash
from kvbm_common.wire.events import Tier

from kvbm_connectors.consolidator.core.block_books import (
    Blocks,
    Discarded,
    Pairs,
    listed,
    parents_before_children,
)


@dataclass(frozen=True, slots=True)
class Change:
    """The blocks of one namespace that one source has gained and lost."""

    source: str
    tier: Tier
    namespace: str
    stored: Pairs
    removed: list[SequenceHash]


@dataclass(frozen=True, slots=True)
class _Unannounced:
    """Blocks of a source in a namespace that it may have lost or gained, not announced yet."""

    source: str
    tier: Tier
    namespace: str
    names: Iterator[SequenceHash | None]
    before: Blocks
    """The blocks that the source had until then: listeners know them."""


class ReplacedBooks:
    """The books of all tiers of a host that were replaced, in the order in which that was done."""

    def __init__(self) -> None:
        self._batches: deque[_Unannounced] = deque()
        self.discarded = Discarded()
        """Books that were announced whole."""

    def __bool__(self) -> bool:
        return bool(self._batches)

    def add(self, source: str, tier: Tier, namespace: str, *, before: Blocks, now: Blocks) -> None:
        """Note that a source has another book: first what it has gained is announced."""
        assert before is not now, f"{source} has the same book"
        for names in (parents_before_children([now]), listed(before)):
            self._batches.append(_Unannounced(source, tier, namespace, names, before))

    def of(self, namespace: str) -> list[Blocks]:
        """Return the books of a namespace that are not announced whole, each once or twice."""
        return [batch.before for batch in self._batches if batch.namespace == namespace]

    def announce(self, count: int, book_of: Callable[[str, str], Blocks]) -> list[Change]:
        """Return the next changes, after a look at `count` blocks; `book_of` returns the book that
        a source has of a namespace now."""
        assert count > 0, f"a look at {count} blocks"
        changes: list[Change] = []
        left = count
        while self._batches and left:
            batch = self._batches[0]
            looked_at = list(islice(batch.names, left))
            if len(looked_at) < left:
                self._batches.popleft()
                if not any(one.before is batch.before for one in self._batches):
                    self.discarded.add(batch.before)
            left -= len(looked_at)
            names = [name for name in looked_at if name is not None]
            parents = book_of(batch.source, batch.namespace).get_all(names)
            known = list(zip(names, parents, strict=True))
            new = [(n, p) for n, p in known if p is not None and n not in batch.before]
            gone = [n for n, p in known if p is None and n in batch.before]
            if new or gone:
                changes.append(Change(batch.source, batch.tier, batch.namespace, new, gone))
        announced = sum(len(change.stored) + len(change.removed) for change in changes)
        assert announced <= count, f"{announced} blocks in a step"
        return changes
