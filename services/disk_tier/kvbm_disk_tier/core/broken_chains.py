"""Broken chains: blocks for which an overloaded disk had no time, and what hangs on them.

A lookup for full attention ends at the first missing block: blocks after it are of no use, though
they are on disk. So a disk that is too slow drops whole chains: a block with its descendants,
those that wait and those that come later. A dropped block is forgotten when it waits again or was
found in the store, and every one when nothing waits any more: then the overload is over.

A window or a state needs no block before it. Which groups have which rule is not known here, so
these lose blocks under overload that could have been of use.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from kvbm_common.identity import SequenceHash

DESCENDANTS_MAX = 4_096
"""Waiting blocks that one step drops: some 8 ms."""


class BrokenChains:
    """The parents of waiting blocks, and the blocks that were dropped lately."""

    def __init__(self, dropped_max: int) -> None:
        """Start without blocks; of more than `dropped_max` the oldest are forgotten."""
        assert dropped_max > 0, dropped_max
        self._parent: dict[SequenceHash, SequenceHash] = {}
        """Waiting block → its parent, if that is known."""
        self._children: dict[SequenceHash, dict[SequenceHash, None]] = {}
        """Waiting blocks by parent, which may wait, be in flight or anywhere."""
        self.dropped: OrderedDict[SequenceHash, SequenceHash | None] = OrderedDict()
        """Blocks that were dropped, with their parents as far as these are known."""
        self._dropped_max = dropped_max

    def note_waiting(self, name: SequenceHash, parent: SequenceHash | None) -> None:
        """Note that a block waits for its write; None: its parent was not told now."""
        assert name not in self._parent, f"{name.hex()} waits already"
        remembered = self.dropped.pop(name, None)
        parent = remembered if parent is None else parent
        if parent is not None and parent != name:
            self._parent[name] = parent
            self._children.setdefault(parent, {})[name] = None

    def note_left_queue(self, name: SequenceHash) -> SequenceHash | None:
        """Note that a block waits no more; returns its parent where that is known."""
        parent = self._parent.pop(name, None)
        if parent is not None:
            siblings = self._children[parent]
            assert name in siblings, f"{name.hex()} is no child of {parent.hex()}"
            del siblings[name]
            if not siblings:
                del self._children[parent]
        return parent

    def note_stored(self, name: SequenceHash) -> None:
        """Note that a block is in the store without a write of ours."""
        self.note_left_queue(name)
        self.dropped.pop(name, None)
        assert not self.is_cut_off(name)

    def known_parent(
        self, name: SequenceHash, told: SequenceHash | None = None
    ) -> SequenceHash | None:
        """Return the parent as it was told, or as it is remembered of a dropped block."""
        return self.dropped.get(name) if told is None else told

    def is_cut_off(self, parent: SequenceHash | None) -> bool:
        """Tell whether the children of this block cannot be reached."""
        return parent is not None and parent in self.dropped

    def note_dropped(self, name: SequenceHash, parent: SequenceHash | None = None) -> None:
        """Note that a block will not be on disk."""
        parent = self._parent.get(name) or self.known_parent(name, parent)
        self.dropped[name] = None if parent == name else parent
        self.dropped.move_to_end(name)
        if len(self.dropped) > self._dropped_max:
            self.dropped.popitem(last=False)

    def forget(self) -> None:
        """Forget what was dropped: nothing waits, or others write those blocks from now on."""
        self.dropped.clear()

    def descendants(self, names: Iterable[SequenceHash]) -> list[SequenceHash]:
        """Return the waiting blocks below these, parents first; about DESCENDANTS_MAX at most.

        Those below them find their parents dropped when their own turn comes.
        """
        found: list[SequenceHash] = []
        seen = set(names)
        ahead = list(seen)
        while ahead and len(found) < DESCENDANTS_MAX:
            children = [child for child in self._children.get(ahead.pop(), ()) if child not in seen]
            seen.update(children)
            found += children
            ahead += children
        return found

    def check(self, waiting: Iterable[SequenceHash]) -> None:
        """Assert that what is linked waits, and that both directions agree."""
        assert self._parent.keys() <= set(waiting), "a block is linked, and does not wait"
        assert self.dropped.keys().isdisjoint(waiting), "a block waits, and was dropped"
        assert len(self.dropped) <= self._dropped_max
        links = [(child, parent) for parent, below in self._children.items() for child in below]
        assert dict(links) == self._parent, "children and parents disagree"
