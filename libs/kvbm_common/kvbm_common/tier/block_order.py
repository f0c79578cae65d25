"""Block orders: insertion-ordered sets of blocks whose table never rehashes as a whole.

An OrderedDict moves all of its entries when it grows or shrinks: 0.2 to 0.4 s for a million. Here
blocks that came together are a batch, and a table names the batch of each:

    batch_of   a → 2   b → 1   c → 2      batches, oldest first   [ b  a ] [ a  c ]
                                                                       └── removed, and came again

A batch keeps its tuple of hashes when blocks leave: a hash is in the batch only while `batch_of`
says so. A batch that has lost more than half is rewritten. Each insertion also drops up to two
empty batches.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Generic, TypeVar

import msgspec

from kvbm_common.identity import SequenceHash
from kvbm_common.tier.block_lookup import BlockLookup

BATCH_MAX = 256
"""Blocks of a batch: to find its first one costs 30 ns for each that was removed."""
SWEPT_PER_BATCH = 2
"""Batches that are looked at for each that is added: so at most half of all have no blocks."""

T = TypeVar("T")


class _Batch(msgspec.Struct, Generic[T], gc=False, eq=False):
    """Blocks that came together; the garbage collector looks at none of it."""

    names: tuple[SequenceHash, ...]
    value: T
    present_count: int
    """Blocks of the batch that are still here."""
    first: int = 0
    """The place before which all were removed: victims leave from the front."""


class BlockOrder(Generic[T]):
    """An ordered set of blocks, with one value for all that came together."""

    def __init__(self) -> None:
        self._batch_of: BlockLookup[_Batch[T]] = BlockLookup()
        self._swept: deque[_Batch[T]] = deque()
        """The oldest batches, looked at since all were looked at the last time."""
        self._batches: deque[_Batch[T]] = deque()
        self._open: _Batch[T] | None = None
        """The newest batch, if single blocks may join it: none was removed."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, block: object) -> bool:
        return block in self._batch_of

    def __iter__(self) -> Iterator[SequenceHash]:
        return (name for batch in self._all() for name in self._present(batch))

    def items(self) -> Iterator[tuple[SequenceHash, T]]:
        """Yield the blocks, the oldest first, each with its value."""
        return ((name, batch.value) for batch in self._all() for name in self._names_of(batch))

    @property
    def batch_count(self) -> int:
        """The number of batches, including those without blocks."""
        return len(self._swept) + len(self._batches)

    def get(self, block: SequenceHash) -> T | None:
        """Return the value of a block, or None if it is not here."""
        batch = self._batch_of.get(block)
        return None if batch is None else batch.value

    def has_none_of(self, blocks: Collection[SequenceHash]) -> bool:
        """Return whether none of these blocks is here."""
        return not self._count or self._batch_of.has_none_of(blocks)

    def add(self, block: SequenceHash, value: T) -> None:
        """Put a block after all others; it is not here."""
        batch = self._open
        if batch is None or batch.value is not value or len(batch.names) >= BATCH_MAX:
            self.add_all((block,), value)
            self._open = self._batches[-1]
            return
        assert block not in self._batch_of, f"{block.hex()} is here already"
        batch.names += (block,)
        batch.present_count += 1
        self._batch_of.set((block,), batch)
        self._count += 1

    def add_all(self, blocks: Sequence[SequenceHash], value: T) -> None:
        """Put blocks after all others, in their order; none of them is here."""
        assert len(set(blocks)) == len(blocks), f"of {len(blocks)} blocks some come twice"
        self._open = None
        for start in range(0, len(blocks), BATCH_MAX):
            names = tuple(blocks[start : start + BATCH_MAX])
            batch = _Batch(names, value, len(names))
            is_new = self._batch_of.set_new(batch.names, batch)
            assert is_new, f"of {len(batch.names)} blocks some are here already"
            self._batches.append(batch)
            self._count += len(batch.names)
            self._sweep()

    def pop(self, block: SequenceHash) -> bool:
        """Take a block out, if it is here; return whether it was."""
        batch = self._batch_of.pop(block)
        if batch is None:
            return False
        if batch is self._open and batch.present_count > 1 and batch.names[-1] == block:
            batch.names = batch.names[:-1]  # It came, and leaves at once: others may still join.
            batch.present_count -= 1
            self._count -= 1
            assert batch.present_count == len(batch.names), (
                f"{batch.present_count} of {len(batch.names)} are here"
            )
        elif batch is self._open or 2 * batch.present_count <= len(batch.names) + 1:
            self._note_removed(batch, 1)
        else:  # The usual case, at half the cost of _note_removed.
            batch.present_count -= 1
            self._count -= 1
            if batch.names[batch.first] == block:
                batch.first += 1
            assert batch.present_count > 0, (
                f"a batch of {len(batch.names)} blocks was not rewritten"
            )
        return True

    def pop_oldest(self) -> tuple[SequenceHash, T]:
        """Take the oldest block out; return it with its value."""
        batch = next(self._all())
        name, value = next(iter(self._present(batch))), batch.value
        is_here = self.pop(name)
        assert is_here, f"the oldest block, {name.hex()}, is not here"
        return name, value

    def drop(self, blocks: Sequence[SequenceHash]) -> None:
        """Take blocks out; raises KeyError when one of them is not here."""
        if self.discard(blocks) != len(blocks):
            raise KeyError(f"of {len(blocks)} blocks some are not here")

    def discard(self, blocks: Sequence[SequenceHash]) -> int:
        """Take those of these blocks out that are here; returns how many."""
        found = self._batch_of.pop_all(blocks)
        first = found[0] if found else None
        if first is not None and found.count(first) == len(found):  # The usual case.
            self._note_removed(first, len(found))
            return len(found)
        batches = [batch for batch in found if batch is not None]
        for batch, count in Counter(batches).items():
            self._note_removed(batch, count)
        assert len(batches) <= len(blocks), f"{len(batches)} of {len(blocks)} blocks were removed"
        return len(batches)

    def check(self) -> None:
        """Assert every invariant; O(blocks)."""
        names = list(self)
        assert len(names) == len(set(names)) == self._count == len(self._batch_of)
        for batch in self._all():
            assert batch.present_count == len(self._names_of(batch)), (
                f"the count of a batch is {batch.present_count}"
            )
            assert [*self._present(batch)] == [*self._names_of(batch)], (
                f"{batch.first} are passed over"
            )
            assert 2 * batch.present_count >= len(batch.names), (
                f"{batch.present_count} of {len(batch.names)} are here"
            )

    # --- batches ----------------------------------------------------------------------------

    def _all(self) -> Iterator[_Batch[T]]:
        """Yield the batches that have blocks, oldest first."""
        return (batch for batch in chain(self._swept, self._batches) if batch.present_count)

    def _names_of(self, batch: _Batch[T]) -> Sequence[SequenceHash]:
        if batch.present_count == len(batch.names):
            return batch.names
        batch_of = self._batch_of.get
        return [name for name in batch.names if batch_of(name) is batch]

    def _present(self, batch: _Batch[T]) -> Iterable[SequenceHash]:
        """Return the names that are still in a batch, each looked at when it is reached."""
        if batch.present_count == len(batch.names):
            return batch.names
        batch_of = self._batch_of.get
        return (name for name in islice(batch.names, batch.first, None) if batch_of(name) is batch)

    def _note_removed(self, batch: _Batch[T], count: int) -> None:
        """Note that blocks of a batch were removed; rewrite it if they are most of it."""
        batch.present_count -= count
        self._count -= count
        assert 0 <= batch.present_count <= self._count, (
            f"{batch.present_count} of {self._count} blocks are in a batch"
        )
        if batch is self._open:
            self._open = None  # What comes again comes after the others.
        if 2 * batch.present_count >= len(batch.names) and batch.present_count:
            return
        batch.names, batch.first = tuple(self._names_of(batch)) if batch.present_count else (), 0
        assert len(batch.names) == batch.present_count, (
            f"{len(batch.names)} of {batch.present_count} blocks are in a batch"
        )
        for batches in (self._swept, self._batches):
            while batches and not batches[0].present_count:
                batches.popleft()
            if batches:
                break

    def _sweep(self) -> None:
        """Look at the next batches, and drop those without blocks."""
        for _ in range(SWEPT_PER_BATCH):
            if not self._batches:
                self._swept, self._batches = self._batches, self._swept
            batch = self._batches.popleft()
            if batch.present_count:
                self._swept.append(batch)
        if not self._batches:
            self._swept, self._batches = self._batches, self._swept
        assert self._batches, "the newest batch is kept"
