"""Access to the miss filter of the host tier that serves an engine; without one it asks."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from kvbm_common.identity import SequenceHash
from kvbm_common.memory.arena import ArenaUnavailable
from kvbm_common.memory.miss_filter import FilterState, MissFilterReader, map_file, owner_of
from kvbm_common.wire.local import Welcome

UNSEEN_MAX = 32
"""Filters of one life that an engine may have missed: each has room for twice as many names."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Mapped:
    """A filter, and what a further generation of it is mapped by."""

    reader: MissFilterReader
    arena_path: str
    owner: int
    epoch: int


class MissFilterAccess:
    """The filter of the present life. `welcomed` and `lost` come from the link's thread, questions
    from the engine's: what is mapped is replaced as a whole."""

    def __init__(self) -> None:
        self._mapped: Mapped | None = None

    def welcomed(self, welcome: Welcome) -> None:
        """Map the filter that a host tier names, if it can be reached."""
        self._mapped = None
        if welcome.filter:
            owner = owner_of(welcome.host, welcome.instance)
            self._map(welcome.arena_path, owner, welcome.epoch, welcome.filter)

    def lost(self) -> None:
        """Ask again about every block: the host tier does not answer."""
        self._mapped = None

    def denies_any(self, names: Sequence[SequenceHash]) -> bool | None:
        """Return whether some of these names cannot be found now; None: that is not known."""
        mapped = self._mapped
        if mapped is None or not names:
            return None
        if mapped.reader.denies_any(names):
            return True
        if mapped.reader.state is FilterState.COMPLETE:
            return False
        if mapped.reader.next_generation:
            self._follow(mapped)
        return None

    def _follow(self, mapped: Mapped) -> None:
        """Map the filter that has followed this one; the next question is put to it.

        Of an engine that has asked nothing for long that one has ended, too, and is unlinked.
        """
        first = mapped.reader.next_generation
        for generation in range(first, first + UNSEEN_MAX):
            self._map(mapped.arena_path, mapped.owner, mapped.epoch, generation)
            if self._mapped is not None:
                return

    def _map(self, arena_path: str, owner: int, epoch: int, generation: int) -> None:
        try:
            memory = map_file(arena_path, generation)
            reader = MissFilterReader(memory, owner=owner, epoch=epoch)
        except ArenaUnavailable as error:
            log.info("lookups that find nothing are asked: %s", error)
            self._mapped = None
            return
        self._mapped = Mapped(reader, arena_path, owner, epoch)
