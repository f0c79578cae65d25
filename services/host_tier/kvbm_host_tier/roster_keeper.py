"""The roster keeper: writes into the roster what the tier announces, before anybody hears of it."""

from __future__ import annotations

import logging
from typing import assert_never

from kvbm_common.arena import ArenaNoSpace, ArenaUnavailable
from kvbm_common.counters import Counters
from kvbm_common.identity import hashes_from_hex
from kvbm_common.roster import Roster
from kvbm_common.wire.events import Cleared, Event, Removed, Stored

from kvbm_host_tier.tier import Tier

log = logging.getLogger(__name__)


class RosterKeeper:
    """Owns the roster of one arena. It is made with the first block: then its size is known."""

    def __init__(self, tier: Tier, counters: Counters) -> None:
        self._tier = tier
        self._roster: Roster | None = None
        self._has_failed = False
        self._unlisted = counters.counter(
            "kvbm_roster_unlisted_total",
            "Blocks that the roster had no room for: engines ask for them.",
        )

    def follow(self, event: Event) -> None:
        """Blocks come and go."""
        match event:
            case Stored(runs=runs):
                roster = self._roster or self._make()
                if roster is not None:
                    names = (name for run in runs for name in hashes_from_hex(run.hashes))
                    self._unlisted.add(roster.add(names))
            case Removed(hashes=hashes):
                if self._roster is not None:
                    self._roster.remove(hashes_from_hex(hashes))
            case Cleared():
                if self._roster is not None:
                    self._roster.clear()
            case _:
                assert_never(event)

    def _make(self) -> Roster | None:
        """Without one, engines ask."""
        if self._has_failed:
            return None
        tier = self._tier
        try:
            self._roster = Roster.create(
                tier.arena.path, slot_count=tier.table.slot_count, epoch=tier.announcer.epoch
            )
        except (ArenaNoSpace, ArenaUnavailable) as error:
            log.warning("no roster: engines ask for every block: %s", error)
            self._has_failed = True
        return self._roster

    def close(self) -> None:
        """Unlink it."""
        if self._roster is not None:
            self._roster.close()
            self._roster = None
