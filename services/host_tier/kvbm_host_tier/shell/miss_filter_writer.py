"""The writer of the miss filter: carries out what the core decides, in memory that engines map."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from kvbm_common.memory.arena import Arena, ArenaNoSpace, ArenaUnavailable
from kvbm_common.memory.miss_filter import FilterState, MissFilter, make_file, owner_of

from kvbm_host_tier.core.filter_messages import (
    FilterEffect,
    FilterFailed,
    MakeFilter,
    NamesChanged,
    SwitchFilter,
    UseFilter,
)
from kvbm_host_tier.core.view import HostTierView

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Filter:
    filter: MissFilter
    file: Arena
    generation: int


class MissFilterWriter:
    """Owns the filter of one arena. Without memory for it engines ask about every block."""

    def __init__(self, view: HostTierView, host: str, source: str) -> None:
        self._view = view
        self._owner = owner_of(host, source)
        self._used: _Filter | None = None
        self._new: _Filter | None = None
        """The one that is being made."""
        self._has_failed = False
        """The last one could not be made, which was said."""

    def carry_out(self, effect: FilterEffect) -> FilterFailed | None:
        """Write a change; readers see it before this returns. Returns what has failed."""
        match effect:
            case MakeFilter(generation, capacity):
                self._new = self._make(generation, capacity)
                return FilterFailed(generation) if self._new is None else None
            case NamesChanged(came, left, is_new):
                if (one := self._new if is_new else self._used) is not None:
                    one.filter.change(came, left)
            case UseFilter():
                self._use()
            case SwitchFilter(is_complete):
                if self._used is not None:
                    state = FilterState.COMPLETE if is_complete else FilterState.PARTIAL
                    self._used.filter.switch(state)
        return None

    def _make(self, generation: int, capacity: int) -> _Filter | None:
        try:
            file = make_file(self._view.arena.path, generation, capacity)
        except (ArenaNoSpace, ArenaUnavailable) as error:
            if not self._has_failed:
                text = "no miss filter for %d names: it is tried again, meanwhile engines ask: %s"
                log.warning(text, capacity, error)
            self._has_failed = True
            return None
        if self._has_failed:
            log.info("the miss filter has room for %d names now", capacity)
            self._has_failed = False
        memory = file.view(0, file.bytes)
        made = MissFilter(memory, owner=self._owner, epoch=self._view.epoch)
        return _Filter(made, file, generation)

    def _use(self) -> None:
        """Have the filter that was made follow the one in use, which stays where none was made."""
        if self._new is None:
            return
        if self._used is not None:
            self._used.filter.end(self._new.generation)
            self._used.file.close()
        self._used, self._new = self._new, None

    def close(self) -> None:
        """End the filters and unlink their files; readers keep what they have mapped."""
        for one in (self._used, self._new):
            if one is not None:
                one.filter.end()
                one.file.close()
        self._used = self._new = None
