"""Waiting lookups: the blocks on their way in, and the lookups that wait for each."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from kvbm_common.identity import SequenceHash

from kvbm_host_tier.core.findable import Findable

Waiter = tuple[int, int]
"""The number of a lookup, and the index of the block in its run."""


class WaitingLookups:
    """Each block that is on its way, with the lookups that wait for it."""

    def __init__(self, findable: Findable) -> None:
        self._waiters: dict[SequenceHash, list[Waiter]] = {}
        self._findable = findable

    def __contains__(self, name: SequenceHash) -> bool:
        return name in self._waiters

    @property
    def names(self) -> Collection[SequenceHash]:
        """Return the blocks that a lookup waits for."""
        return self._waiters.keys()

    def has_none_of(self, names: Iterable[SequenceHash]) -> bool:
        """Return whether no lookup waits for any of these blocks."""
        return self._waiters.keys().isdisjoint(names)

    def of(self, name: SequenceHash) -> Sequence[Waiter]:
        """Return the lookups that wait for a block, those included that were answered meanwhile."""
        waiters = self._waiters.get(name, ())
        assert waiters or name not in self._waiters, f"nothing waits for {name.hex()}"
        return waiters

    def add(self, name: SequenceHash, waiter: Waiter) -> None:
        """Have a lookup wait for a block."""
        assert min(waiter) >= 0, f"{waiter} waits for {name.hex()}"
        waiters = self._waiters.get(name)
        if waiters is None:
            self._waiters[name] = [waiter]
            self._findable.add((name,))
        else:
            waiters.append(waiter)

    def take(self, name: SequenceHash) -> list[Waiter]:
        """Remove and return the lookups that wait for a block, which is here or does not come."""
        waiters = self._waiters.pop(name, None)
        if waiters is None:
            return []
        assert waiters, f"nothing waits for {name.hex()}"
        self._findable.remove((name,))
        return waiters
