"""Held lookups: what `find` has leased for the load that usually follows. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from kvbm_common.identity import SequenceHash

HELD_MAX = 8
"""Lookups whose leases wait for a load: more than SGLang has batches on their way."""


@dataclass(frozen=True, slots=True)
class Held:
    """A lookup that `find` has made, with its lease, or one that only asks."""

    request: str
    names: tuple[SequenceHash, ...]
    only_asks: bool = False


class HeldLookups:
    """Lookups by the name of their first page. Not thread-safe."""

    def __init__(self) -> None:
        self._held: OrderedDict[SequenceHash, Held] = OrderedDict()

    def hold(self, held: Held) -> list[Held]:
        """Keep a lookup; return those that are to be given back, the oldest if there are too
        many."""
        older = self._held.pop(held.names[0], None)
        replaced = [older] if older is not None and older.request != held.request else []
        self._held[held.names[0]] = held
        while len(self._held) > HELD_MAX:
            replaced.append(self._held.popitem(last=False)[1])
        return replaced

    def take(self, names: tuple[SequenceHash, ...]) -> Held | None:
        """Take the lookup that covers these names, if `find` has left one."""
        held = self._held.get(names[0])
        if held is None or held.names[: len(names)] != names:
            return None
        return self._held.pop(names[0])

    def take_all(self) -> list[Held]:
        """Take every lookup that is left."""
        taken = list(self._held.values())
        self._held.clear()
        return taken


def refuse_twice(names: Sequence[SequenceHash]) -> None:
    """Raise ValueError at a page that comes twice: the host tier would refuse it unanswered."""
    if len(set(names)) < len(names):
        raise ValueError("a page twice in one call")
