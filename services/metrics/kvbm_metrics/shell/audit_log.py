"""The audit log: the newest entries of the audit stream, kept at hand."""

from __future__ import annotations

import itertools
import logging
from collections import deque

from kvbm_common.nats.bus import Bus
from kvbm_common.nats.streams import AUDIT
from kvbm_common.runtime.logs import OncePerKind
from kvbm_common.wire.admin import Audited, audit_codec
from kvbm_common.wire.codec import WireError

ENTRIES_MAX = 1000
"""What one answer can show; the stream keeps more."""

_log = OncePerKind(logging.getLogger(__name__))


class AuditLog:
    """Follows the stream as long as `run` runs."""

    def __init__(self) -> None:
        self._entries: deque[Audited] = deque(maxlen=ENTRIES_MAX)

    async def run(self, bus: Bus) -> None:
        """Read everything that is kept, then what comes, until cancelled."""
        async with bus.event_subscription(spec=AUDIT, subject=AUDIT.subjects[0]) as entries:
            async for batch in entries:
                for message in batch:
                    try:
                        self._entries.append(audit_codec.decode(message.payload))
                    except WireError as error:
                        _log.warning(error.kind, f"an entry of the audit stream: {error}")

    def newest(self, count: int) -> list[Audited]:
        """Return the newest entries, oldest first."""
        skipped = max(0, len(self._entries) - count)
        return list(itertools.islice(self._entries, skipped, None))
