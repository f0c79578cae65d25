"""Guests: blocks of other hosts, which were used once here, and leave before all others."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from kvbm_common.identity import SequenceHash


class Guests:
    """The names of all guests, by the length of their slots, the oldest first."""

    def __init__(self) -> None:
        self.names: dict[SequenceHash, int] = {}
        """Of each the length of its slot."""
        self._by_size: dict[int, OrderedDict[SequenceHash, None]] = {}

    def __contains__(self, name: SequenceHash) -> bool:
        return name in self.names

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[SequenceHash]:
        return iter(self.names)

    def add(self, name: SequenceHash, slot_bytes: int) -> None:
        """Add a block in a slot of this length."""
        assert name not in self.names, f"{name.hex()} is a guest already"
        self.names[name] = slot_bytes
        self._by_size.setdefault(slot_bytes, OrderedDict())[name] = None

    def remove(self, names: Iterable[SequenceHash]) -> None:
        """Remove guests that have left, or are guests no more."""
        for name in names:
            slot_bytes = self.names.pop(name)
            of_size = self._by_size[slot_bytes]
            del of_size[name]
            if not of_size:
                del self._by_size[slot_bytes]

    def of_size(self, slot_bytes: int) -> Iterable[SequenceHash]:
        """Return the guests in slots of this length, the oldest first."""
        return self._by_size.get(slot_bytes, ())
