"""Blocks on their way in, and the lookups that wait for each: a further lookup may join them."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from kvbm_common.identity import SequenceHash

from kvbm_host_tier.core.findable import Findable

Place = tuple[int, int]
"""A lookup, and the index in its run."""


class Waiting:
    """Block → the places that wait for it."""

    def __init__(self, findable: Findable) -> None:
        self._places: dict[SequenceHash, list[Place]] = {}
        self._findable = findable

    def __contains__(self, name: SequenceHash) -> bool:
        return name in self._places

    @property
    def names(self) -> Collection[SequenceHash]:
        """Return the blocks that a lookup waits for."""
        return self._places.keys()

    def has_none_of(self, names: Iterable[SequenceHash]) -> bool:
        """Return whether no lookup waits for any of these blocks."""
        return self._places.keys().isdisjoint(names)

    def add(self, name: SequenceHash, place: Place) -> None:
        """Have a lookup wait for a block."""
        assert min(place) >= 0, f"{place} waits for {name.hex()}"
        places = self._places.get(name)
        if places is None:
            self._places[name] = [place]
            self._findable.add((name,))
        else:
            places.append(place)

    def take(self, name: SequenceHash) -> list[Place]:
        """Return the places that have waited for a block, which is here or does not come."""
        places = self._places.pop(name, None)
        if places is None:
            return []
        assert places, f"nothing waits for {name.hex()}"
        self._findable.remove((name,))
        return places
