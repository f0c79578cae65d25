"""The audit log: the newest entries of the audit stream, kept at hand.

A credential may write under its own names only, but NATS does not read what is written. So an
entry that speaks for another service than its subject is dropped.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque

from kvbm_common.nats.bus import Bus
from kvbm_common.nats.streams import AUDIT
from kvbm_common.runtime.logs import OncePerKind
from kvbm_common.runtime.metrics import Metrics
from kvbm_common.wire.admin import Audited, audit_codec, audit_subject
from kvbm_common.wire.codec import WireError

ENTRIES_MAX = 1000
"""Entries that one answer can show; the stream keeps more."""

_log = OncePerKind(logging.getLogger(__name__))


class AuditLog:
    """Follows the stream as long as `run` runs."""

    def __init__(self, counters: Metrics) -> None:
        self._dropped = counters.counter(
            "kvbm_audit_dropped_total",
            "Entries of the audit stream that are not shown.",
            labels=("reason",),
        )
        self._entries: deque[Audited] = deque(maxlen=ENTRIES_MAX)

    async def run(self, bus: Bus) -> None:
        """Read everything that is kept, then what comes, until cancelled."""
        async with bus.event_subscription(spec=AUDIT, subject=AUDIT.subjects[0]) as entries:
            async for batch in entries:
                for message in batch:
                    self._take(message.subject, message.payload)

    def _take(self, subject: str, payload: bytes) -> None:
        try:
            entry = audit_codec.decode(payload)
        except WireError as error:
            self._drop(error.kind, f"{subject}: {error}")
            return
        if subject != audit_subject(entry.kind, entry.host, entry.instance):
            said = f"{entry.kind} {entry.host} {entry.instance}"
            self._drop("forged", f"{subject} has an entry of another service: {said[:200]!r}")
            return
        self._entries.append(entry)

    def _drop(self, reason: str, text: str) -> None:
        self._dropped.labels(reason).inc()
        _log.warning(reason, f"an entry of the audit stream is not shown: {text}")

    def newest(self, count: int) -> list[Audited]:
        """Return the newest entries, oldest first."""
        skipped = max(0, len(self._entries) - count)
        return list(itertools.islice(self._entries, skipped, None))
