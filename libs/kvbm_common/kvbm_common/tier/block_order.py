"""Blocks in the order in which they came, in a table that never moves all of its entries at once.

An OrderedDict moves all of its entries when it grows, and again when enough have left: 0.2 to 0.4 s
for a million. Here blocks that came together are a run, and a table says the run of each:

    run_of   a → 2   b → 1   c → 2        runs, oldest first   [ b  a ] [ a  c ]
                                                                     └── left, and came again

A block of a run that has another run, or none, has left it. A run that has lost more than half is
made shorter, and runs without blocks are swept out, some with each that comes.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Generic, TypeVar

import msgspec

from kvbm_common.identity import SequenceHash
from kvbm_common.tier.block_lookup import BlockLookup

RUN_MAX = 256
"""Blocks of a run: to find its first one costs 30 ns for each that has left."""
SWEPT = 2
"""Runs that are looked at for each that comes: so at most half of all have no blocks."""

T = TypeVar("T")


class _Run(msgspec.Struct, Generic[T], gc=False, eq=False):
    """Blocks that came together; the garbage collector looks at none of it."""

    names: tuple[SequenceHash, ...]
    value: T
    left: int
    """How many of them are still here."""
    first: int = 0
    """All before this one have left: victims leave from the front."""


class BlockOrder(Generic[T]):
    """An ordered set of blocks, with one value for all that came together."""

    def __init__(self) -> None:
        self._run_of: BlockLookup[_Run[T]] = BlockLookup()
        self._swept: deque[_Run[T]] = deque()
        """The oldest runs, looked at since all were looked at the last time."""
        self._runs: deque[_Run[T]] = deque()
        self._open: _Run[T] | None = None
        """The newest run, if single blocks may join it: none has left it."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, block: object) -> bool:
        return block in self._run_of

    def __iter__(self) -> Iterator[SequenceHash]:
        return (name for run in self._all() for name in self._present(run))

    def items(self) -> Iterator[tuple[SequenceHash, T]]:
        """Yield the blocks, the oldest first, each with its value."""
        return ((name, run.value) for run in self._all() for name in self._names_of(run))

    @property
    def run_count(self) -> int:
        """How many runs there are, those without blocks included."""
        return len(self._swept) + len(self._runs)

    def get(self, block: SequenceHash) -> T | None:
        """Return the value of a block, or None if it is not here."""
        run = self._run_of.get(block)
        return None if run is None else run.value

    def has_none_of(self, blocks: Collection[SequenceHash]) -> bool:
        """Return whether none of these blocks is here."""
        return not self._count or self._run_of.has_none_of(blocks)

    def oldest(self, count: int) -> list[tuple[SequenceHash, T]]:
        """Return up to `count` blocks, the oldest first, each with its value."""
        assert count >= 0, f"the {count} oldest blocks"
        found: list[tuple[SequenceHash, T]] = []
        for run in self._all():
            if len(found) >= count:
                break
            found += [(name, run.value) for name in self._names_of(run)]
        return found[:count]

    def add(self, block: SequenceHash, value: T) -> None:
        """Put a block behind all others; it is not here."""
        run = self._open
        if run is None or run.value is not value or len(run.names) >= RUN_MAX:
            self.add_all((block,), value)
            self._open = self._runs[-1]
            return
        assert block not in self._run_of, f"{block.hex()} is here already"
        run.names += (block,)
        run.left += 1
        self._run_of.set((block,), run)
        self._count += 1

    def add_all(self, blocks: Sequence[SequenceHash], value: T) -> None:
        """Put blocks behind all others, in their order; none of them is here."""
        assert len(set(blocks)) == len(blocks), f"of {len(blocks)} blocks some come twice"
        self._open = None
        for start in range(0, len(blocks), RUN_MAX):
            names = tuple(blocks[start : start + RUN_MAX])
            run = _Run(names, value, len(names))
            is_new = self._run_of.set_new(run.names, run)
            assert is_new, f"of {len(run.names)} blocks some are here already"
            self._runs.append(run)
            self._count += len(run.names)
            self._sweep()

    def pop(self, block: SequenceHash) -> bool:
        """Take a block out, if it is here; return whether it was."""
        run = self._run_of.pop(block)
        if run is None:
            return False
        if run is self._open and run.left > 1 and run.names[-1] == block:
            run.names = run.names[:-1]  # It came, and leaves at once: others may still join.
            run.left -= 1
            self._count -= 1
            assert run.left == len(run.names), f"{run.left} of {len(run.names)} are left"
        elif run is self._open or 2 * run.left <= len(run.names) + 1:
            self._leave(run, 1)
        else:  # As a rule, and in half of the time.
            run.left -= 1
            self._count -= 1
            if run.names[run.first] == block:
                run.first += 1
            assert run.left > 0, f"a run of {len(run.names)} blocks was not made shorter"
        return True

    def pop_oldest(self) -> tuple[SequenceHash, T]:
        """Take the oldest block out; return it with its value."""
        run = next(self._all())
        name, value = next(iter(self._present(run))), run.value
        is_here = self.pop(name)
        assert is_here, f"the oldest block, {name.hex()}, is not here"
        return name, value

    def drop(self, blocks: Sequence[SequenceHash]) -> None:
        """Take blocks out; raises KeyError when one of them is not here."""
        if self.discard(blocks) != len(blocks):
            raise KeyError(f"of {len(blocks)} blocks some are not here")

    def discard(self, blocks: Sequence[SequenceHash]) -> int:
        """Take those of these blocks out that are here; returns how many."""
        found = self._run_of.pop_all(blocks)
        first = found[0] if found else None
        if first is not None and found.count(first) == len(found):  # As a rule.
            self._leave(first, len(found))
            return len(found)
        left = [run for run in found if run is not None]
        for run, count in Counter(left).items():
            self._leave(run, count)
        assert len(left) <= len(blocks), f"{len(left)} of {len(blocks)} blocks have left"
        return len(left)

    def check(self) -> None:
        """Assert every invariant; O(blocks)."""
        names = list(self)
        assert len(names) == len(set(names)) == self._count == len(self._run_of)
        for run in self._all():
            assert run.left == len(self._names_of(run)), f"{run.left} blocks are said to be left"
            assert [*self._present(run)] == [*self._names_of(run)], f"{run.first} are passed over"
            assert 2 * run.left >= len(run.names), f"{run.left} of {len(run.names)} are left"

    # --- runs -------------------------------------------------------------------------------

    def _all(self) -> Iterator[_Run[T]]:
        """Yield the runs that have blocks, oldest first."""
        return (run for run in chain(self._swept, self._runs) if run.left)

    def _names_of(self, run: _Run[T]) -> Sequence[SequenceHash]:
        if run.left == len(run.names):
            return run.names
        run_of = self._run_of.get
        return [name for name in run.names if run_of(name) is run]

    def _present(self, run: _Run[T]) -> Iterable[SequenceHash]:
        """Return the names that are left of a run, each looked at when it is reached."""
        if run.left == len(run.names):
            return run.names
        run_of = self._run_of.get
        return (name for name in islice(run.names, run.first, None) if run_of(name) is run)

    def _leave(self, run: _Run[T], count: int) -> None:
        """Note that blocks have left a run; forget which, if they are most of it."""
        run.left -= count
        self._count -= count
        assert 0 <= run.left <= self._count, f"{run.left} blocks of {self._count} are in a run"
        if run is self._open:
            self._open = None  # What comes again comes behind the others.
        if 2 * run.left >= len(run.names) and run.left:
            return
        run.names, run.first = tuple(self._names_of(run)) if run.left else (), 0
        assert len(run.names) == run.left, f"{len(run.names)} of {run.left} blocks are in a run"
        for runs in (self._swept, self._runs):
            while runs and not runs[0].left:
                runs.popleft()
            if runs:
                break

    def _sweep(self) -> None:
        """Look at the next runs, and forget those without blocks."""
        for _ in range(SWEPT):
            if not self._runs:
                self._swept, self._runs = self._runs, self._swept
            run = self._runs.popleft()
            if run.left:
                self._swept.append(run)
        if not self._runs:
            self._swept, self._runs = self._runs, self._swept
        assert self._runs, "the newest run is kept"
