"""The writer of the miss filter: carries out what the core decides, in memory that engines map."""

from __future__ import annotations

import logging

from kvbm_common.memory.arena import Arena, ArenaNoSpace, ArenaUnavailable
from kvbm_common.memory.miss_filter import FilterState, MissFilter, make_file, owner_of

from kvbm_host_tier.core.findable import FilterEffect, MakeFilter, NamesChanged, SwitchFilter
from kvbm_host_tier.core.view import HostTierView

log = logging.getLogger(__name__)


class MissFilterWriter:
    """Owns the filter of one arena. Without memory for it engines ask about every block."""

    def __init__(self, view: HostTierView, host: str, source: str) -> None:
        self._view = view
        self._owner = owner_of(host, source)
        self._file: Arena | None = None
        self._filter: MissFilter | None = None

    def carry_out(self, effect: FilterEffect) -> None:
        """Write a change; readers see it before this returns."""
        match effect:
            case MakeFilter():
                self._make(effect)
            case NamesChanged(came, left):
                if self._filter is not None:
                    self._filter.change(came, left)
            case SwitchFilter(is_complete):
                if self._filter is not None:
                    self._filter.switch(FilterState.OPEN if is_complete else FilterState.CLOSED)

    def _make(self, effect: MakeFilter) -> None:
        former, former_file = self._filter, self._file
        self._filter = self._file = None
        try:
            file = make_file(self._view.arena.path, effect.generation, effect.capacity)
        except (ArenaNoSpace, ArenaUnavailable) as error:
            log.warning("no miss filter: engines ask about every block: %s", error)
        else:
            memory = file.view(0, file.bytes)
            made = MissFilter(memory, owner=self._owner, epoch=self._view.epoch)
            made.change(effect.names, ())
            self._filter, self._file = made, file
        if former is not None and former_file is not None:
            former.end(effect.generation if self._filter is not None else 0)
            former_file.close()

    def close(self) -> None:
        """End the filter and unlink its file; readers keep what they have mapped."""
        if self._filter is not None and self._file is not None:
            self._filter.end()
            self._file.close()
        self._filter = self._file = None
