"""Copies: which bytes go where, joined, cut and divided between copy engine and kernel. Pure.

A copy is a row (target, source, bytes). Which layout a block has, does not matter any more here: a
block-outermost one gives a row per block, a layer-outermost one a row per block and layer, and
tensor-parallel parts are shorter rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

Numbers = NDArray[np.uint64]
Flags = NDArray[np.bool_]

KERNEL_ROW_BYTES = 8 * 1024
"""A warp copies one row: short enough that the last rows of a launch end together, long enough
that a row's 24 bytes of table are nothing beside it."""


class Lent(Protocol):
    """A region of `wire.local`."""

    @property
    def address(self) -> int: ...
    @property
    def stride(self) -> int: ...
    @property
    def piece_bytes(self) -> int: ...
    @property
    def blocks(self) -> int: ...


@dataclass(frozen=True, slots=True, eq=False)
class Copies:
    """N rows (target, source, bytes), each a copy that needs no other one."""

    rows: Numbers

    def __post_init__(self) -> None:
        assert self.rows.shape[1:] == (3,), self.rows.shape

    @classmethod
    def of(cls, targets: ArrayLike, sources: ArrayLike, lengths: ArrayLike) -> Self:
        """Make rows from columns of targets, sources and lengths."""
        columns = np.broadcast_arrays(
            np.asarray(targets, np.uint64), np.asarray(sources, np.uint64),
            np.asarray(lengths, np.uint64),
        )  # fmt: skip
        return cls(np.stack([column.reshape(-1) for column in columns], axis=1))

    @property
    def targets(self) -> Numbers:
        return self.rows[:, 0]

    @property
    def sources(self) -> Numbers:
        return self.rows[:, 1]

    @property
    def lengths(self) -> Numbers:
        return self.rows[:, 2]

    @property
    def count(self) -> int:
        return len(self.rows)

    @property
    def bytes(self) -> int:
        return int(self.lengths.sum())

    def where(self, flags: Flags) -> Copies:
        """Return the rows that are flagged."""
        return self if bool(flags.all()) else Copies(self.rows[flags])

    def joined(self) -> Copies:
        """Join neighbouring rows that go on where the last one ends, on both sides."""
        if self.count < 2:
            return self
        targets, sources, lengths = self.targets, self.sources, self.lengths
        begins = np.empty(self.count, dtype=np.bool_)
        begins[0] = True
        np.not_equal(targets[:-1] + lengths[:-1], targets[1:], out=begins[1:])
        begins[1:] |= sources[:-1] + lengths[:-1] != sources[1:]
        if bool(begins.all()):
            return self
        starts = np.flatnonzero(begins)
        rows = self.rows[starts].copy()
        rows[:, 2] = np.add.reduceat(self.lengths, starts)
        return Copies(rows)

    def cut_at(self, side: int, base: int, step: int) -> Copies:
        """Cut rows so that none crosses `base + n · step` on a side (0: target, 1: source)."""
        assert step > 0, step
        assert bool((self.rows[:, side] >= np.uint64(base)).all()), "an address is before the base"
        offsets = self.rows[:, side] - np.uint64(base)
        is_power = step & (step - 1) == 0  # Dividing is the slowest of all that is done to a row.
        first = offsets & np.uint64(step - 1) if is_power else offsets % np.uint64(step)
        return self._cut(first, step)

    def cut_to(self, length_max: int) -> Copies:
        """Cut rows so that none is longer than `length_max` bytes."""
        if self.count == 0 or int(self.lengths.max()) <= length_max:
            return self
        return self._cut(np.zeros(self.count, dtype=np.uint64), length_max)

    def _cut(self, first: Numbers, step: int) -> Copies:
        """Cut row i every `step` bytes, where its first byte is at `first[i]` of a step."""
        step64 = np.uint64(step)
        if self.count == 0 or int((first + self.lengths).max()) <= step:
            return self
        counts = (first + self.lengths + step64 - np.uint64(1)) // step64
        owner = np.repeat(np.arange(self.count), counts.astype(np.int64))
        begin_of_owner = np.cumsum(counts) - counts
        index = np.arange(len(owner), dtype=np.uint64) - begin_of_owner[owner]
        begins = np.maximum(index * step64, first[owner]) - first[owner]
        ends = np.minimum((index + np.uint64(1)) * step64 - first[owner], self.lengths[owner])
        rows = np.empty((len(owner), 3), dtype=np.uint64)
        rows[:, 0] = self.targets[owner] + begins
        rows[:, 1] = self.sources[owner] + begins
        rows[:, 2] = ends - begins
        return Copies(rows)


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Rows for the copy engine, rows for the kernel, and those of memory that is not pinned."""

    engine: Copies
    kernel: Copies
    pageable: Copies


def plan(copies: Copies, *, kernel_below_bytes: int, pinned: Flags | None = None) -> Plan:
    """Divide. The kernel takes what is shorter than `kernel_below_bytes`, and only where the host's
    side is pinned, since it reads and writes host memory itself."""
    small = copies.lengths < np.uint64(kernel_below_bytes)
    if pinned is None:
        pinned = np.ones(copies.count, dtype=np.bool_)
    kernel = copies.where(small & pinned).cut_to(KERNEL_ROW_BYTES)
    return Plan(copies.where(~small & pinned), kernel, copies.where(~pinned))


@dataclass(frozen=True, slots=True)
class Window:
    """Memory that has two addresses: `theirs` in another process, `ours` here."""

    theirs: int
    bytes: int
    ours: int


class OutsideWindows(ValueError):
    """A range is in none of the windows."""


def through(windows: Sequence[Window], addresses: Numbers, lengths: Numbers) -> Numbers:
    """Translate another process's addresses into ours.

    Raises OutsideWindows unless every range is inside one window.
    """
    ordered = sorted(windows, key=lambda window: window.theirs)
    starts = np.array([window.theirs for window in ordered], dtype=np.uint64)
    ours = np.array([window.ours for window in ordered], dtype=np.uint64)
    sizes = np.array([window.bytes for window in ordered], dtype=np.uint64)
    found = np.searchsorted(starts, addresses, side="right") - 1
    if len(addresses) and int(found.min()) < 0:
        raise OutsideWindows("an address is before the first window")
    offsets = addresses - starts[found]
    if bool(((lengths > sizes[found]) | (offsets > sizes[found] - lengths)).any()):
        raise OutsideWindows("a range is not inside one window")
    return ours[found] + offsets
