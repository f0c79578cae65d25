"""Passes over the tiers' blocks: what is still to be published for each rank, in parts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

from kvbm_common.identity import SequenceHash

from kvbm_connectors.consolidator.core.block_books import LOOKS_PER_BLOCK
from kvbm_connectors.consolidator.core.rank_view import RankView

Names = Iterator[SequenceHash | None]
"""Blocks, each after its parent. None stands for a share of work that has found no block."""


class _Pass(NamedTuple):
    view: RankView
    names: deque[Names]
    """One after the other: all blocks of the tiers, then those that were put off."""


class TierPasses:
    """The passes of all ranks, each with its turn."""

    def __init__(self) -> None:
        self._passes: dict[tuple[str, int, str], _Pass] = {}
        """Engine, rank and namespace → its pass."""

    def __bool__(self) -> bool:
        return bool(self._passes)

    def begin(self, engine: str, view: RankView, names: Names) -> None:
        """Publish all blocks again for a rank, after the passes of others."""
        key = engine, view.rank, view.namespace
        self._passes.pop(key, None)
        self._passes[key] = _Pass(view, deque([names]))

    def put_off(self, engine: str, view: RankView, names: Names) -> None:
        """Publish these blocks, too, after all that are still to be published for the rank."""
        key = engine, view.rank, view.namespace
        found = self._passes.setdefault(key, _Pass(view, deque()))
        assert found.view is view, f"{engine}: another view of rank {view.rank}"
        found.names.append(names)

    def forget(self, engine: str) -> None:
        """Publish nothing more for an engine."""
        self._passes = {key: one for key, one in self._passes.items() if key[0] != engine}

    def take(self, count: int) -> tuple[str, RankView, list[SequenceHash | None]]:
        """Return the next blocks of the first pass; fewer than `count` end a part of it."""
        assert count > 0, f"{count} blocks of a pass"
        key, (view, names) = next(iter(self._passes.items()))
        some = list(islice(names[0], count))
        if len(some) < count:
            names.popleft()
        if not names:
            del self._passes[key]
        return key[0], view, some


def after_ancestors(
    late: dict[SequenceHash, SequenceHash],
    ancestors: Callable[
        [SequenceHash, SequenceHash], Iterable[tuple[SequenceHash, *tuple[Any, ...]]]
    ],
) -> Names:
    """Yield blocks that were put off, each after its ancestors that are still to be published.

    `ancestors` yields those of a block and its parent, the parent first.
    """
    given: set[SequenceHash] = set()
    for block, parent in late.items():
        names = [block]
        for at, *_ in ancestors(block, parent):
            if at in given:
                break
            names.append(at)
            if not len(names) % LOOKS_PER_BLOCK:
                yield None
        given.update(names)
        yield from reversed(names)
