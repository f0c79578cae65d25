"""The form of events: packed, unless a service is present that reads JSON only.

Services are replaced one by one, in any order. One of a release before packed events would hear
nothing of what a source has stored until it falls silent, and what it holds would be wrong for as
long. So while one is there, every event has a message of its own, as before.
"""

from __future__ import annotations

import logging

from kvbm_common.registry.records import ENGINE, Left, RegistryEvent

_log = logging.getLogger(__name__)


class EventForm:
    """Follows the registry, and says in which form a source publishes."""

    def __init__(self, *, packed: bool) -> None:
        """Begin with no service known. Without `packed` it is always JSON."""
        self._packed = packed
        self._old: set[str] = set()
        """Services that read JSON only."""

    def packs(self) -> bool:
        """Return whether events may be packed now."""
        return self._packed and not self._old

    def take(self, event: RegistryEvent) -> None:
        """Take what the registry says of a service. An engine reads no events."""
        record, before = event.record, self.packs()
        if isinstance(event, Left) or record.reads_packed or record.kind == ENGINE:
            self._old.discard(record.key)
        else:
            self._old.add(record.key)
        if self.packs() != before:
            form = "are packed: every service reads them" if self.packs() else "are JSON"
            _log.info("events %s; %s has changed", form, record.key)
