"""Ranks of an engine that do not come: the host tier welcomes a scheduler half when all have.

The engine does not wait for that: until then it computes everything, and operators should know.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter

from kvbm_common.config.settings import Settings

from kvbm_connectors.client.scheduler import SchedulerHalf

log = logging.getLogger(__name__)


def watch_ranks(
    half: SchedulerHalf, counts: Counter[str], world_size: int, settings: Settings
) -> threading.Timer:
    """Log and count, after a time, that ranks are missing. Returns what ends the wait."""

    def warn() -> None:
        if not half.attached:
            counts["init_timeouts"] += 1
            log.error(
                "%d ranks and the host tier at %s have not met within %d s "
                "(DYN_KVBM_LEADER_WORKER_INIT_TIMEOUT_SECS): passing through until they do",
                world_size,
                settings.host_tier_endpoint,
                settings.leader_worker_init_timeout_s,
            )

    timer = threading.Timer(settings.leader_worker_init_timeout_s, warn)
    timer.daemon = True
    timer.start()
    return timer
