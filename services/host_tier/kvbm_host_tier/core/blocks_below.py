"""The blocks of one medium below, each with the instances that have it; removed in parts.

Each block belongs to a life of an instance. When a life ends, none of its blocks is found any more.
They stay in the table until a later step reaches them: to remove a million at once would hold up
every lookup. Until then the miss filter lets engines ask for them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import islice
from typing import NamedTuple, cast

from kvbm_common.identity import SequenceHash
from kvbm_common.tier.block_lookup import PARTS, BlockLookup

from kvbm_host_tier.core.findable import Findable

AWAY_MAX = 1_048_576
"""Names of blocks; they were in the table before, so this is no memory that was not taken."""


class Life:
    """A period of an instance: since it began, was cleared, or sent a snapshot."""

    __slots__ = ("block_count", "instance", "is_away", "is_over")

    def __init__(self, instance: str) -> None:
        assert instance, "a lower tier has a name"
        self.instance = instance
        self.block_count = 0
        """Its blocks in the table."""
        self.is_over = False
        self.is_away = False
        """It is over because its instance has left, and may be back with the same blocks."""


class Holding(NamedTuple):
    """An instance's hold of blocks of one size and namespace: one object for all of them."""

    life: Life
    block_bytes: int
    """0: that was not said."""
    namespace: bytes


class BlocksBelow:
    """Block → its holding, and what instances had that are away now."""

    def __init__(self, findable: Findable) -> None:
        """Start empty; `findable` hears of all that come and go."""
        self._findable = findable
        self.table: BlockLookup[Holding] = BlockLookup(0)
        """The blocks that are there, and those that are not let go of yet: the filter has all."""
        self._away: BlockLookup[bool] = BlockLookup(0)
        self._count = 0
        """The blocks of lives that are not over."""
        self._unsifted = 0
        """Parts of the table that may have blocks of lives that are over; the next one first."""
        self._next = 0
        self._last: Holding | None = None
        """The last one that was made: the next event is mostly of blocks that are alike."""

    def __len__(self) -> int:
        return self._count

    def __contains__(self, name: SequenceHash) -> bool:
        return self.get(name) is not None

    def get(self, name: SequenceHash) -> Holding | None:
        """Return who has a block; None: it is not there."""
        holding = self.table.get(name)
        return None if holding is None or holding.life.is_over else holding

    def tester(self) -> Callable[[SequenceHash], bool]:
        """Return what tells of many names, as of this moment, whether they are there."""
        return self.__contains__ if self._unsifted else self.table.__contains__

    @property
    def is_settled(self) -> bool:
        """Tell whether no block is left that must still be dropped."""
        return not self._unsifted

    def has_none_of(self, names: Collection[SequenceHash]) -> bool:
        """Return whether none of these is there, or was there a moment ago."""
        return self.table.has_none_of(names)

    def has_never_had(self, names: Sequence[SequenceHash]) -> bool:
        """Return whether nothing is known of any of these names."""
        return self.table.has_none_of(names) and self._away.has_none_of(names)

    def is_away(self, name: SequenceHash) -> bool:
        """Return whether an instance had this block that is away."""
        holding = self.table.get(name)
        return name in self._away if holding is None else holding.life.is_away

    def store(
        self, life: Life, names: Iterable[SequenceHash], block_bytes: int, namespace: bytes
    ) -> int:
        """Note that a life has these blocks; returns how many were not there."""
        assert not life.is_over, f"a life of {life.instance} that is over says something"
        holding = Holding(life, block_bytes, namespace)
        if holding == self._last:
            holding = self._last
        self._last = holding
        names = list(dict.fromkeys(names))
        before = [self.table.get(name) for name in names]
        came = [name for name, was in zip(names, before, strict=True) if was is None]
        new = len(came)
        for was in before:
            if was is not None:
                was.life.block_count -= 1
                new += was.life.is_over
        assert 0 <= new <= len(names), f"{new} of {len(names)} blocks are new"
        life.block_count += len(names)
        self._count += new
        self._findable.add(came, in_tables=True)
        self.table.set(names, holding)
        self._away.drop(names)
        return new

    def remove(self, names: Iterable[SequenceHash], lives: Collection[Life] | None = None) -> None:
        """Forget those blocks that one of these lives has; None: any life."""
        gone: list[SequenceHash] = []
        for name in names:
            holding = self.get(name)
            if holding is not None and (lives is None or holding.life in lives):
                holding.life.block_count -= 1
                assert holding.life.block_count >= 0, f"{name.hex()} was not counted"
                self.table.drop((name,))
                gone.append(name)
        self._count -= len(gone)
        self._findable.remove(gone, in_tables=True)

    def end(self, life: Life, *, is_away: bool) -> None:
        """Have nothing of a life be there from now on; `let_go` forgets its blocks."""
        if life.is_over:
            return
        life.is_over, life.is_away = True, is_away
        self._count -= life.block_count
        assert self._count >= 0, f"{life.instance} had more blocks than there were"
        if life.block_count:
            self._unsifted = PARTS

    def let_go(self, room: int) -> None:
        """Forget blocks of lives that are over: look at a part of the table, and at others while
        there is room for their blocks."""
        while self._unsifted and room > 0:
            self._next = (self._next + 1) % PARTS
            gone, looked_at = self.table.sift(self._next, _is_there)
            if gone:
                for holding in gone.values():
                    holding.life.block_count -= 1
                names = cast("list[SequenceHash]", list(gone))
                self._findable.remove(names, in_tables=True)
                self._note_away([name for name in names if gone[name].life.is_away])
            self._unsifted -= 1
            room -= looked_at
            if room < looked_at:  # The next part is as large.
                break

    def _note_away(self, names: list[SequenceHash]) -> None:
        self._away.set(names, True)
        over = len(self._away) - AWAY_MAX
        if over > 0:
            self._away.drop(list(islice(self._away, over)))
        assert len(self._away) <= AWAY_MAX, f"{len(self._away)} blocks are away"

    def check(self) -> None:
        """Assert what holds after each step, in O(1)."""
        assert 0 <= self._count <= len(self.table), f"{self._count} of {len(self.table)} are there"
        assert self._unsifted or self._count == len(self.table), "what is over was not let go of"


def _is_there(holding: Holding) -> bool:
    return not holding.life.is_over
