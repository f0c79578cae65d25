"""Objects that a store was to delete and still has: the reason is theirs, or the store's.

A store may lock one object and delete all others: then only that object is left. It refuses to
delete as such when it has refused several objects, and had refused none of them before, since it
has last deleted one. An object that is left counts until it is deleted, written again or listed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

REFUSED_MIN = 3
"""A store that has refused so many objects in a row, and deleted none, refuses to delete."""
LOCKED_MAX = 50_000
"""One that is forgotten may once more be taken for a sign that the store refuses all."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Names of one batch, by what the store's answer means for them."""

    gone: Sequence[str]
    left: Mapping[str, str]
    """The others, and why."""
    again: Sequence[str]
    """The part of `left` that is to be tried again; the next listing finds the others."""
    may_go_on: bool
    """True: the store can be asked for the next batch at once."""


class Undeleted:
    """The objects that are left, by name, and the store's last refusal."""

    def __init__(self, passing: Collection[str]) -> None:
        """Start with nothing; reasons in `passing` say nothing of the next attempt."""
        self._passing = frozenset(passing)
        self._left: dict[str, str] = {}
        """Name → the reason why it was not deleted."""
        self._fresh: set[str] = set()
        """Names that were refused since the store has last deleted one, and not before."""
        self._locked: OrderedDict[str, None] = OrderedDict()
        """Names that were refused while others were deleted, the newest last."""
        self._listed: set[str] = set()
        """Names in `_left` that the listing under way finds, if they are still there."""
        self._dropped, self._dropped_before = 0, 0
        """Names that there was no room for, since the listing under way began, and before it."""
        self.refusal = ""
        """The reason why the store deletes nothing; empty: it does, or was not asked."""

    def __len__(self) -> int:
        return len(self._left)

    @property
    def waiting(self) -> str:
        """Return what is left, for an operator; empty: nothing is."""
        count = len(self._left) + self._dropped + self._dropped_before
        why = next(reversed(self._left.values()), "there are too many")
        return f"objects wait to be deleted: {count} ({why})" if count else ""

    def answered(self, batch: Sequence[str], left: Mapping[str, str], where: str) -> Answer:
        """Take the store's answer to a batch: the names that are left, and why.

        An answer that names other objects may mean any: then all of the batch are left.
        """
        assert batch, "a batch has names"
        if foreign := left.keys() - set(batch):
            left = dict.fromkeys(batch, left[min(foreign)])
        gone = [name for name in batch if name not in left]
        if gone:
            self._deleted(gone)
        again = [name for name, why in left.items() if self._keep(name, why, alone=bool(gone))]
        refusals = [why for why in left.values() if why not in self._passing]
        if refusals and len(self._fresh) >= REFUSED_MIN:
            self.refusal = f"{where}: objects cannot be deleted ({refusals[0]})"
        assert len(gone) + len(left) == len(batch), "a name is gone or left"
        may_go_on = bool(gone) and self._passing.isdisjoint(left.values())
        return Answer(gone, left, again, may_go_on)

    def _deleted(self, names: Iterable[str]) -> None:
        """Note that the store deletes: what it has refused before is locked, each by itself."""
        self.refusal = ""
        for name in self._fresh:
            self._lock(name)
        self._fresh.clear()
        for name in names:
            self._left.pop(name, None)
            self._locked.pop(name, None)

    def _keep(self, name: str, why: str, *, alone: bool) -> bool:
        """Note that a name is left, `alone` if others are gone; return whether to try it again."""
        self._note(name, why)
        if why in self._passing:
            return True
        if alone or name in self._locked:
            self._lock(name)
            return False
        self._fresh.add(name)
        return True

    def _lock(self, name: str) -> None:
        self._locked[name] = None
        if len(self._locked) > LOCKED_MAX:
            self._locked.popitem(last=False)

    def failed(self, batch: Iterable[str], why: str, *, refused: bool) -> None:
        """Note that nothing of a batch is deleted, as far as is known."""
        assert why, "a failure has a reason"
        for name in batch:
            self._note(name, why)
        if refused:
            self.refusal = why

    def dropped(self, count: int) -> None:
        """Note that so many names wait for a listing to find them: the queue was full."""
        self._dropped += count

    def _note(self, name: str, why: str) -> None:
        self._left.pop(name, None)
        self._left[name] = why  # The newest is last: an operator reads its reason.
        self._listed.discard(name)

    def written(self, name: str) -> None:
        """Note that a name is to stay: its block is written again."""
        self._left.pop(name, None)
        self._fresh.discard(name)
        self._locked.pop(name, None)

    def begin_listing(self, waits: Callable[[str], bool]) -> None:
        """Forget what the listing that ends now has found, and what may be refused no more.

        `waits(name)` tells whether a name is to be tried again. While one is, so is the refusal.
        """
        for name in self._listed:
            self._left.pop(name, None)
        self._listed = {name for name in self._left if not waits(name)}
        self._dropped, self._dropped_before = 0, self._dropped
        if len(self._listed) == len(self._left):
            self._fresh.clear()
            self.refusal = ""
        assert self._listed <= self._left.keys(), "a name that is left waits, or is listed"
