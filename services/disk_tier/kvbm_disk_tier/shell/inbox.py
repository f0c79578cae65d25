"""Inbox: inputs that must reach a busy core wait for room, since they are sent only once."""

from __future__ import annotations

from typing import Any

from kvbm_common.errors import DeadlineExceeded
from kvbm_common.runtime.logs import OncePerKind
from kvbm_common.runtime.loop import CoreLoop

INBOX_DEADLINE_S = 30.0
"""The seconds that an inbox may have no room before a warning is logged."""


async def hand_in(loop: CoreLoop[Any, Any], event: object, log: OncePerKind, what: str) -> None:
    """Hand an input to a core, and wait as long as it has no room.

    `what` names the task that waits meanwhile, for the log.
    """
    while True:
        try:
            return await loop.offer(event, deadline_s=INBOX_DEADLINE_S)
        except DeadlineExceeded as error:
            log.warning("inbox", f"{what} waits for room in the core's inbox: {error}")
