"""Demotions of blocks that are not here yet: a request's last blocks come after its end's hint."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from kvbm_common.identity import SequenceHash
from kvbm_common.tier.slots import Block
from kvbm_common.wire.bounds import Usage

LATE_MAX = 65_536
"""Blocks that are awaited; beyond it the one that is awaited for the longest time is forgotten."""
LATE_MS = 60_000
"""The time for which a block is awaited, in milliseconds. Offers end after five seconds by default,
so few come later."""


class LateDemotions:
    """The awaited blocks, those first that are awaited for the longest time."""

    def __init__(self, counts: Counter[str]) -> None:
        self._counts = counts
        self._awaited: OrderedDict[SequenceHash, tuple[int, frozenset[bytes]]] = OrderedDict()
        """Block → until when it is awaited, and the namespaces of the engine that demotes it."""

    def __len__(self) -> int:
        return len(self._awaited)

    def usage(self) -> Usage:
        """Return how many blocks are awaited, and how many made room for later ones."""
        forgotten = self._counts["hint_demotions_forgotten.room"]
        assert len(self._awaited) <= LATE_MAX, f"{len(self._awaited)} blocks are awaited"
        return Usage(len(self._awaited), LATE_MAX, forgotten)

    def add(self, names: Sequence[SequenceHash], namespaces: frozenset[bytes], now_ms: int) -> None:
        """Remember blocks that are not here, to demote them when they come."""
        for name in names:
            self._awaited[name] = now_ms + LATE_MS, namespaces
            self._awaited.move_to_end(name)
        while len(self._awaited) > LATE_MAX:
            self._awaited.popitem(last=False)
            self._counts["hint_demotions_forgotten.room"] += 1
        assert len(self._awaited) <= LATE_MAX, f"{len(self._awaited)} blocks are awaited"

    def arrived(self, blocks: Iterable[Block], now_ms: int) -> list[SequenceHash]:
        """Return those of these blocks that were awaited, and await them no longer."""
        if not self._awaited:
            return []
        assert now_ms >= 0, f"blocks came at {now_ms} ms"
        found: list[SequenceHash] = []
        for block in blocks:
            until_ms, namespaces = self._awaited.pop(block.hash, (0, frozenset[bytes]()))
            if now_ms < until_ms and block.namespace in namespaces:
                found.append(block.hash)
        return found

    def forget(self, names: Iterable[SequenceHash]) -> None:
        """Forget blocks that are wanted again."""
        if self._awaited:
            for name in names:
                self._awaited.pop(name, None)

    def tick(self, now_ms: int) -> None:
        """Forget the blocks that were awaited for too long."""
        assert now_ms >= 0, f"it is {now_ms} ms"
        while self._awaited and next(iter(self._awaited.values()))[0] <= now_ms:
            self._awaited.popitem(last=False)
            self._counts["hint_demotions_forgotten.age"] += 1

    def check(self) -> None:
        """Assert every invariant; O(names)."""
        assert len(self._awaited) <= LATE_MAX, f"{len(self._awaited)} blocks are awaited"
        ends = [until_ms for until_ms, _ in self._awaited.values()]
        assert ends == sorted(ends), "a block is awaited longer than one that came later"
