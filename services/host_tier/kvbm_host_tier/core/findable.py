"""The findable names: what a lookup may find now, told to the filter that engines read.

A name is findable as often as it is committed here, known to be below, or on its way for a lookup.
The owners of such names report each that comes and goes. At the end of a step all changes leave as
one effect, before the others: an engine that learns of a block finds its name in the filter.

The filter is complete unless blocks of peers can be had, which are listed nowhere here.

A filter that has become too small is replaced by a larger one, and stays in use until that is
complete. The larger one is written a slice at a tick: first the names at its start, then the
changes since. The tables of the tiers may be large, and are listed a part at a tick: an earlier
change shows in the listing itself. If the larger one cannot be made, the same generation is tried
again after a pause.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, cast

from kvbm_common.identity import SequenceHash
from kvbm_common.tier.block_lookup import PARTS, BlockLookup

from kvbm_host_tier.core.filter_messages import (
    FilterEffect,
    MakeFilter,
    NamesChanged,
    SwitchFilter,
    UseFilter,
)
from kvbm_host_tier.core.limits import HostTierLimits

GROWTH = 2
"""A filter has room for so many times the names that there are: growth then is rare."""
RETRY_MS, RETRY_MOST_MS = 1_000, 60_000
"""The first pause before a filter is made again; each is twice the one before, up to the last."""


class Findable:
    """Gathers the changes of a step, and says when a filter is made, written and used."""

    def __init__(self, limits: HostTierLimits, counts: Counter[str] | None = None) -> None:
        """Follow names if a filter is wanted; `name_sets` must be set before the first step."""
        assert limits.filter_slice > 0, limits
        self._counts: Counter[str] = Counter() if counts is None else counts
        self._is_enabled, self._slice = limits.miss_filter, limits.filter_slice
        self._names_least = limits.filter_names_least
        self.name_sets: Callable[[], Iterable[Collection[SequenceHash]]] = tuple
        """Returns the names that each owner has now, without those of `tables`."""
        self.tables: Sequence[BlockLookup[Any]] = ()
        """The names of this tier and of lower ones, divided from the start."""
        self.count = 0
        """The names that were findable after the last step."""
        self.generation = 0
        """The present filter's; 0: no filter was made."""
        self._capacity = 0
        self._came: list[SequenceHash] = []
        self._left: list[SequenceHash] = []
        self._came_in_tables: list[SequenceHash] = []
        self._left_in_tables: list[SequenceHash] = []
        self._is_wanted = False
        """A filter is to be made at the end of this step."""
        self._initial: Iterator[NamesChanged] = iter(())
        """The rest of the names that a filter being made begins with: not written yet."""
        self._listed = 0
        """Parts of `tables` that are in it already."""
        self._unwritten: deque[NamesChanged] | None = None
        """Changes since the filter was begun, oldest first; None: no filter is being made."""
        self._is_tick = False
        """True if this step is a tick: those alone write slices."""
        self._used = self._used_before = 0
        """The generations of the filter in use and of the one before it; 0: no filter yet."""
        self._is_complete: bool | None = False
        """True if the filter in use says that it is complete; None: not known."""
        self._failures = 0
        """Failures in a row to make a filter."""
        self._retry_ms: int | None = None
        """The time at which a failed filter is tried again; None: none has failed."""

    @property
    def is_making(self) -> bool:
        """Tell whether a filter is being made, a slice at each tick."""
        return self._unwritten is not None

    def add(self, names: Iterable[SequenceHash], *, in_tables: bool = False) -> None:
        """Note names that can be found from this step on; `in_tables`: one of `tables` has them."""
        if self._is_enabled:
            (self._came_in_tables if in_tables else self._came).extend(names)

    def remove(self, names: Iterable[SequenceHash], *, in_tables: bool = False) -> None:
        """Note names that one of their owners has no more."""
        if self._is_enabled:
            (self._left_in_tables if in_tables else self._left).extend(names)

    def lay_out(self, slot_count: int) -> None:
        """Have the first filter made: the arena has slots now."""
        assert slot_count > 0, "an arena without slots"
        assert not self.generation, "the arena is cut once"
        self._want(max(self._names_least, slot_count + GROWTH * self.count))

    def tick(self, now_ms: int) -> None:
        """Have a larger filter made where names have outgrown it: until then it errs more often.

        One that could not be made is tried again when its pause is over.
        """
        self._is_tick = True
        if self._retry_ms is not None:
            if now_ms >= self._retry_ms:
                self._retry_ms, self._is_wanted = None, True
                self._capacity = max(self._capacity, GROWTH * self.count)
        elif self.generation and not self.is_making and self.count > self._capacity:
            self._want(GROWTH * self.count)

    def failed(self, generation: int, now_ms: int) -> None:
        """Forget what was written into a filter that could not be made, and try it again later."""
        assert 0 < generation <= self.generation, f"{generation} of {self.generation}"
        self._counts["filters_failed"] += 1
        if generation < self.generation:
            return  # It has been outgrown, and a larger one is being made.
        assert self._retry_ms is None, f"filter {generation} has failed already"
        self._unwritten = None
        if self._used == generation:
            self._used = self._used_before
        self._is_complete = None if self._used else False
        self._retry_ms = now_ms + min(RETRY_MS << min(self._failures, 16), RETRY_MOST_MS)
        self._failures += 1

    def _want(self, capacity: int) -> None:
        assert capacity > self._capacity, f"{capacity} names after {self._capacity}"
        if self._is_enabled:
            self.generation, self._capacity, self._is_wanted = self.generation + 1, capacity, True
            self._failures = 0

    def settle(self, *, is_complete: bool) -> list[FilterEffect]:
        """Return what has to be written before anything else of this step is done."""
        small, large = (self._came, self._left), (self._came_in_tables, self._left_in_tables)
        came, left = (one + other for one, other in zip(small, large, strict=True))
        may_write, self._is_tick = self._is_tick, False
        changed = came or left or self._is_wanted or is_complete is not self._is_complete
        if not changed and not (may_write and self.is_making):
            return []
        self.count += len(came) - len(left)
        assert self.count >= 0, f"{self.count} names can be found"
        self._came, self._left, self._came_in_tables, self._left_in_tables = [], [], [], []
        if not self.generation:
            return []
        effects: list[FilterEffect] = []
        if self._used and (came or left):
            effects.append(NamesChanged(tuple(came), tuple(left)))
        if self._is_wanted:
            effects += self._begin()
        elif self._unwritten is not None and (came or left):
            self._unwritten += self._slices(small[0] + self._of_listed(large[0]), ())
            self._unwritten += self._slices((), small[1] + self._of_listed(large[1]))
        if may_write or not self.count:
            effects += self._write_slice()
        if self._used and is_complete is not self._is_complete:
            self._is_complete = is_complete
            effects.append(SwitchFilter(is_complete))
        return effects

    def _begin(self) -> list[FilterEffect]:
        """Begin a filter with the names that there are, all but those of `tables`."""
        assert not self.is_making, f"filter {self.generation} is being made"
        self._is_wanted = False
        self._listed, self._unwritten = 0, deque()
        self._initial = self._list(list(chain.from_iterable(self.name_sets())))
        return [MakeFilter(self.generation, self._capacity)]

    def _list(self, names: list[SequenceHash]) -> Iterator[NamesChanged]:
        """Yield these names, and then those of each part of the tables as they are by then."""
        yield from self._slices(names, ())
        for number in range(PARTS):
            self._listed = number + 1
            part = chain.from_iterable(table.part(number) for table in self.tables)
            yield from self._slices(cast("list[SequenceHash]", list(part)), ())

    def _of_listed(self, names: list[SequenceHash]) -> list[SequenceHash]:
        """Return those names of `tables` that are in the filter that is being made."""
        assert 0 <= self._listed <= PARTS, f"{self._listed} parts are listed"
        return [name for name in names if name[-1] < self._listed]

    def _write_slice(self) -> list[FilterEffect]:
        """Write the next slice into the filter that is being made; after the last one, use it."""
        if self._unwritten is None:
            return []
        effects: list[FilterEffect] = []
        room = self._slice
        for part in chain(self._initial, _taken_from(self._unwritten)):
            effects.append(part)
            room -= len(part.came) + len(part.left)
            if room <= 0:
                return effects
        self._unwritten, self._is_complete = None, False
        self._used_before, self._used = self._used, self.generation
        return [*effects, UseFilter()]

    def _slices(
        self, came: Sequence[SequenceHash], left: Sequence[SequenceHash]
    ) -> Iterator[NamesChanged]:
        """Cut a change into what one step can write: first what came, then what left."""
        size = self._slice
        for start in range(0, len(came), size):
            yield NamesChanged(tuple(came[start : start + size]), (), is_new=True)
        for start in range(0, len(left), size):
            yield NamesChanged((), tuple(left[start : start + size]), is_new=True)

    def figures(self) -> dict[str, float]:
        """Return the figures for metrics."""
        full = 100 * self.count / self._capacity if self._capacity else 0.0
        return {
            "filter_names": float(self.count),
            "filter_percent": full,
            "filter_complete": float(bool(self._is_complete)),
        }

    def check(self) -> None:
        """Assert that every owner has reported all its names, in O(owners)."""
        known = sum(map(len, self.name_sets())) + sum(map(len, self.tables))
        known = known if self._is_enabled else 0
        assert self.count == known, f"{self.count} names are reported, {known} are there"


def _taken_from(waiting: deque[NamesChanged]) -> Iterator[NamesChanged]:
    while waiting:
        yield waiting.popleft()
