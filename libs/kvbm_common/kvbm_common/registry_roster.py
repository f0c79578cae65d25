"""Who is alive, as a reader of leased entries knows it: entries and times in, events out.

    absent --put--> there --remove, soon after contact--> missing --put--> there
                      |                                      |
                      +--empty put: deleted                  +--empty put: deleted
                      +--remove: expired                     +--sweep, in time: expired

Soon after contact an entry may be gone because nobody could renew it; its owner gets time to.
"""

from __future__ import annotations

import logging
import math

import msgspec

from kvbm_common.logs import OncePerKind
from kvbm_common.registry import Changed, Joined, Left, RegistryEvent, ServiceRecord

_log = OncePerKind(logging.getLogger(__name__))


class Roster:
    """Who is there. Missing is who has no entry since the registry was away."""

    def __init__(self, *, grace_s: float) -> None:
        self._grace_s = grace_s
        """How long an owner may need to find the registry once it is back."""
        self.records: dict[str, ServiceRecord] = {}
        self._missing: dict[str, float] = {}
        """When to believe it that an entry is gone."""
        self._contact_s = math.inf
        """Since when the registry answers; never, during an outage."""

    def contact(self, now_s: float) -> None:
        """The registry answers, for the first time or again."""
        self._contact_s = now_s
        self._give_time()

    def outage(self) -> None:
        """The registry does not answer: nobody leaves."""
        self._contact_s = math.inf
        self._give_time()

    def put(self, key: str, payload: bytes) -> list[RegistryEvent]:
        """An entry was written; an empty one says goodbye."""
        before = self.records.get(key)
        if not payload:
            return self._leave(key, "deleted")
        try:
            record = msgspec.json.decode(payload, type=ServiceRecord)
        except msgspec.MsgspecError as error:
            _log.warning("bad_record", f"{key}: {error}")
            return []
        self._missing.pop(key, None)
        self.records[key] = record
        if before is None:
            return [Joined(record)]
        return [] if before == record else [Changed(before, record)]

    def remove(self, key: str, now_s: float) -> list[RegistryEvent]:
        """An entry is gone: its lease has ended, or the whole store was lost."""
        if key not in self.records:
            return []
        if now_s >= self._believed_s(key):
            return self._leave(key, "expired")
        self._missing.setdefault(key, self._believed_s(key))
        return []

    def replace(self, payloads: dict[str, bytes], now_s: float) -> list[RegistryEvent]:
        """A whole listing."""
        gone = [key for key in self.records if key not in payloads]
        events = [event for key, payload in payloads.items() for event in self.put(key, payload)]
        return events + [event for key in gone for event in self.remove(key, now_s)]

    def sweep(self, now_s: float) -> list[RegistryEvent]:
        """Believe what has been missing for long enough."""
        due = [key for key, believed_s in self._missing.items() if now_s >= believed_s]
        return [event for key in due for event in self._leave(key, "expired")]

    def _give_time(self) -> None:
        self._missing = {key: self._believed_s(key) for key in self._missing}

    def _believed_s(self, key: str) -> float:
        return self._contact_s + self.records[key].ttl_s + self._grace_s

    def _leave(self, key: str, reason: str) -> list[RegistryEvent]:
        self._missing.pop(key, None)
        record = self.records.pop(key, None)
        return [] if record is None else [Left(record, reason)]
