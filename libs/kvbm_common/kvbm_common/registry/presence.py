"""Presence: which members are alive. Leased entries and times go in, events come out.

The table is drawn in `docs/state_machines.md`. Soon after contact an entry may be gone because it
could not be renewed; its owner gets time to.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import msgspec

from kvbm_common.registry.records import Changed, Joined, Left, RegistryEvent, ServiceRecord
from kvbm_common.tier.machine import Machine
from kvbm_common.wire.codec import UNREADABLE


class PresenceState(Enum):
    """The states of a service that has joined."""

    PRESENT = "present"
    MISSING = "missing"


PRESENCE = Machine(
    "registered service",
    {
        (None, "joined"): PresenceState.PRESENT,
        (PresenceState.PRESENT, "joined"): PresenceState.PRESENT,
        (PresenceState.PRESENT, "gone soon after contact"): PresenceState.MISSING,
        (PresenceState.PRESENT, "deleted"): None,
        (PresenceState.PRESENT, "expired"): None,
        (PresenceState.MISSING, "joined"): PresenceState.PRESENT,
        (PresenceState.MISSING, "gone soon after contact"): PresenceState.MISSING,
        (PresenceState.MISSING, "deleted"): None,
        (PresenceState.MISSING, "expired"): None,
    },
)


@dataclass(slots=True)
class Entry:
    """A service that has joined and not left."""

    record: ServiceRecord
    state: PresenceState
    believed_s: float = math.inf
    """The time from which a MISSING entry counts as gone."""


class Presence:
    """The services that are present. One is MISSING while its entry is gone since an outage."""

    def __init__(self, *, grace_s: float, warn: Callable[[str, str], None]) -> None:
        """Begin without entries. `warn` takes a kind of trouble and a text."""
        self._warn = warn
        self._grace_s = grace_s
        """The time that an owner may need to find the registry once it is back."""
        self._entries: dict[str, Entry] = {}
        self._contact_s = math.inf
        """Since when the registry answers; infinite during an outage."""

    @property
    def records(self) -> dict[str, ServiceRecord]:
        """Return what is registered by key, MISSING services included."""
        return {key: entry.record for key, entry in self._entries.items()}

    def contact(self, now_s: float) -> None:
        """Note that the registry answers, for the first time or again."""
        self._contact_s = now_s
        self._give_time()

    def outage(self) -> None:
        """Note that the registry does not answer: no entry leaves."""
        self._contact_s = math.inf
        self._give_time()

    def put(self, key: str, payload: bytes) -> list[RegistryEvent]:
        """Take an entry that was written; an empty one says goodbye."""
        if not payload:
            return self._leave(key, "deleted")
        try:
            record = msgspec.json.decode(payload, type=ServiceRecord)
        except UNREADABLE as error:
            self._warn("bad_record", f"{key}: {error}")
            return []
        if record.key != key:
            self._warn("bad_record", f"{key} names another service: {record.key}")
            return []
        entry = self._entries.get(key)
        if entry is None:
            self._entries[key] = Entry(record, PRESENCE.next(None, "joined", key))
            return [Joined(record)]
        self._move(key, "joined")
        before, entry.record = entry.record, record
        return [] if before == record else [Changed(before, record)]

    def remove(self, key: str, now_s: float) -> list[RegistryEvent]:
        """Take note that an entry is gone: its lease has ended, or the whole store was lost."""
        entry = self._entries.get(key)
        if entry is None:
            return []
        believed_s = self._believed_s(entry)
        if now_s >= believed_s:
            return self._leave(key, "expired")
        if entry.state is PresenceState.PRESENT:
            entry.believed_s = believed_s
        self._move(key, "gone soon after contact")
        return []

    def replace(self, payloads: dict[str, bytes], now_s: float) -> list[RegistryEvent]:
        """Take a listing of all entries."""
        gone = [key for key in self._entries if key not in payloads]
        events = [event for key, payload in payloads.items() for event in self.put(key, payload)]
        return events + [event for key in gone for event in self.remove(key, now_s)]

    def sweep(self, now_s: float) -> list[RegistryEvent]:
        """Remove the entries that have been missing for long enough; return their events."""
        due = [
            key
            for key, entry in self._entries.items()
            if entry.state is PresenceState.MISSING and now_s >= entry.believed_s
        ]
        return [event for key in due for event in self._leave(key, "expired")]

    def _give_time(self) -> None:
        for entry in self._entries.values():
            if entry.state is PresenceState.MISSING:
                entry.believed_s = self._believed_s(entry)

    def _believed_s(self, entry: Entry) -> float:
        return self._contact_s + entry.record.ttl_s + self._grace_s

    def _leave(self, key: str, reason: str) -> list[RegistryEvent]:
        if key not in self._entries:
            return []
        record = self._entries[key].record
        self._move(key, reason)
        return [Left(record, reason)]

    def _move(self, key: str, event: str) -> None:
        """Move a service by the table; one that has left is forgotten."""
        entry = self._entries[key]
        if event in ("deleted", "expired"):
            PRESENCE.end(entry.state, event, key)
            del self._entries[key]
        else:
            entry.state = PRESENCE.next(entry.state, event, key)
