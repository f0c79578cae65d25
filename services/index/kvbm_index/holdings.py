"""The holdings: which holder has which blocks. Plain sets, changed and asked in bulk."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import length_hint

from kvbm_common.identity import SequenceHash

from kvbm_index.messages import Holder, SourceKey


class Holdings:
    """Blocks by holder. A holder exists exactly as long as it holds something."""

    def __init__(self) -> None:
        self._blocks: dict[Holder, set[SequenceHash]] = {}
        self._holders: dict[SourceKey, set[Holder]] = {}

    @property
    def holder_count(self) -> int:
        """Holders with at least one block."""
        return len(self._blocks)

    @property
    def block_count(self) -> int:
        """Blocks over all holders."""
        return sum(map(len, self._blocks.values()))

    def add(self, holder: Holder, hashes: Iterable[SequenceHash]) -> None:
        """A holder has these too."""
        held = self._blocks.get(holder)
        if held is None:
            held = set(hashes)
            if held:
                self._blocks[holder] = held
                self._holders.setdefault(SourceKey(holder.host, holder.source), set()).add(holder)
        else:
            held.update(hashes)

    def discard(self, holder: Holder, hashes: Iterable[SequenceHash]) -> None:
        """A holder has these no more."""
        held = self._blocks.get(holder)
        if held is not None:
            held.difference_update(hashes)
            if not held:
                self._forget(holder)

    def drop(self, key: SourceKey, rank: int | None = None) -> None:
        """A source holds nothing any more (on one rank, if that is given)."""
        for holder in list(self._holders.get(key, ())):
            if rank is None or holder.rank == rank:
                self._forget(holder)

    def of(self, key: SourceKey) -> dict[Holder, set[SequenceHash]]:
        """What a source holds, by holder."""
        return {holder: self._blocks[holder] for holder in self._holders.get(key, ())}

    def match(self, hashes: Sequence[SequenceHash]) -> list[tuple[Holder, int]]:
        """How many of `hashes` each holder has without a hole, from the first on; longest first."""
        lengths = (
            (holder, run_length(held, hashes))
            for holder, held in self._blocks.items()
            if hashes and hashes[0] in held
        )
        return sorted(lengths, key=lambda found: (-found[1], found[0]))

    def check(self) -> None:
        """Every invariant, O(holders)."""
        assert all(self._blocks.values()), "a holder holds something"
        listed = {holder for holders in self._holders.values() for holder in holders}
        assert listed == self._blocks.keys(), "sources list their holders"
        for key, holders in self._holders.items():
            assert holders, f"{key} has no holder"
            assert all((holder.host, holder.source) == key for holder in holders)

    def _forget(self, holder: Holder) -> None:
        key = SourceKey(holder.host, holder.source)
        self._blocks.pop(holder, None)
        holders = self._holders.get(key, set())
        holders.discard(holder)
        if not holders:
            self._holders.pop(key, None)


def run_length(held: set[SequenceHash], hashes: Sequence[SequenceHash]) -> int:
    """How many of `hashes`, from the first on, are held without a hole.

    >>> run_length({b"a", b"b", b"d"}, [b"a", b"b", b"c", b"d"])
    2
    """
    # `issuperset` stops at the first hole, in C; the iterator tells how far it came. That is three
    # times as fast as a loop: 5 µs for 512 blocks.
    rest = iter(hashes)
    complete = held.issuperset(rest)
    taken = len(hashes) - length_hint(rest)
    return taken if complete else taken - 1
