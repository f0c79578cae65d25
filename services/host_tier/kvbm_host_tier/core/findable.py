"""The findable names: what a lookup may find now, told to the filter that engines read.

A name is findable as often as it is committed here, known to be below, or on its way for a lookup.
Those who keep such names tell of each that comes and goes. At the end of a step all of it leaves
as one effect, in front of the others: an engine that hears of a block finds its name in the filter.

The filter is complete unless blocks of peers can be had, which are listed nowhere here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from kvbm_common.identity import SequenceHash

CAPACITY_LEAST = 4_096
"""Names that a filter has room for at least: 48 KiB."""
GROWTH = 2


@dataclass(frozen=True, slots=True)
class MakeFilter:
    """Make a filter with these names, and end the one before it."""

    generation: int
    """Counts the filters of this life."""
    capacity: int
    names: tuple[SequenceHash, ...]


@dataclass(frozen=True, slots=True)
class NamesChanged:
    """Write into the filter what came, and then what left."""

    came: tuple[SequenceHash, ...]
    left: tuple[SequenceHash, ...]


@dataclass(frozen=True, slots=True)
class SwitchFilter:
    """Say whether a name that is not in the filter cannot be found."""

    is_complete: bool


FilterEffect = MakeFilter | NamesChanged | SwitchFilter


class Findable:
    """The changes of the present step, and what the filter is made for."""

    def __init__(self, *, wanted: bool) -> None:
        """Follow names if a filter is `wanted`; `sources` must be set before the first step."""
        self._wanted = wanted
        self.sources: Callable[[], Iterable[Collection[SequenceHash]]] = tuple
        """Returns the names that each keeper has now."""
        self.count = 0
        """The names that were findable after the last step."""
        self.generation = 0
        """The present filter's; 0: no filter was made."""
        self._capacity = 0
        self._came: list[SequenceHash] = []
        self._left: list[SequenceHash] = []
        self._is_due = False
        """A filter is to be made at the end of this step."""
        self._is_complete = False

    def come(self, names: Iterable[SequenceHash]) -> None:
        """Note names that can be found from this step on."""
        if self._wanted:
            self._came.extend(names)

    def go(self, names: Iterable[SequenceHash]) -> None:
        """Note names that one of their keepers has no more."""
        if self._wanted:
            self._left.extend(names)

    def lay_out(self, slot_count: int) -> None:
        """Have the first filter made: the arena has slots now."""
        assert slot_count > 0, "an arena without slots"
        assert not self.generation, "the arena is cut once"
        self._make(max(CAPACITY_LEAST, slot_count + GROWTH * self.count))

    def tick(self) -> None:
        """Have a larger filter made where names have outgrown it: until then it errs more often."""
        if self.generation and self.count > self._capacity:
            self._make(GROWTH * self.count)

    def _make(self, capacity: int) -> None:
        assert capacity > self._capacity, f"{capacity} names after {self._capacity}"
        if self._wanted:
            self.generation, self._capacity, self._is_due = self.generation + 1, capacity, True

    def settle(self, *, is_complete: bool) -> list[FilterEffect]:
        """Return what has to be written before anything else of this step is done."""
        came, left = self._came, self._left
        if not (came or left or self._is_due or is_complete is not self._is_complete):
            return []
        self.count += len(came) - len(left)
        assert self.count >= 0, f"{self.count} names can be found"
        self._came, self._left = [], []
        if not self.generation:
            return []
        effects: list[FilterEffect] = []
        if self._is_due:
            self._is_due, self._is_complete = False, False
            names = tuple(name for source in self.sources() for name in source)
            assert len(names) == self.count, f"{self.count} names are known, {len(names)} kept"
            effects.append(MakeFilter(self.generation, self._capacity, names))
        elif came or left:
            effects.append(NamesChanged(tuple(came), tuple(left)))
        if is_complete is not self._is_complete:
            self._is_complete = is_complete
            effects.append(SwitchFilter(is_complete))
        return effects

    def figures(self) -> dict[str, float]:
        """Return the figures for metrics."""
        full = 100 * self.count / self._capacity if self._capacity else 0.0
        return {
            "filter_names": float(self.count),
            "filter_percent": full,
            "filter_complete": float(self._is_complete),
        }

    def check(self) -> None:
        """Assert that every keeper has told of all its names, in O(keepers)."""
        known = sum(map(len, self.sources())) if self._wanted else 0
        assert self.count == known, f"{self.count} names are told of, {known} are kept"
