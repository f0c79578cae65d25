"""The way into a core that is busy, for what none would ask for again."""

from __future__ import annotations

from typing import Any

from kvbm_common.errors import DeadlineExceeded
from kvbm_common.runtime.logs import OncePerKind
from kvbm_common.runtime.loop import CoreLoop

INBOX_DEADLINE_S = 30.0
"""An inbox without room for so long is worth a warning."""


async def hand_in(loop: CoreLoop[Any, Any], event: object, log: OncePerKind, what: str) -> None:
    """Hand an input to a core, however long there is no room; `what` waits meanwhile."""
    while True:
        try:
            return await loop.offer(event, deadline_s=INBOX_DEADLINE_S)
        except DeadlineExceeded as error:
            log.warning("inbox", f"{what} waits: {error}")
