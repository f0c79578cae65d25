"""The memory that an index may take, from its limits and from the blocks that sources hold."""

from __future__ import annotations

from kvbm_common.wire.bounds import Usage

from kvbm_index.core.event_decoder import SUBJECTS_MAX
from kvbm_index.core.messages import Limits, Statistics

SOURCE_BYTES = 2_048
SUBJECT_BYTES = 600
BLOCK_BYTES = 1_000
"""Memory of a block of one holder in a run of one block, which costs most; a fifth in long runs."""
QUEUE_BYTES = 64 << 20
"""Batches of events that wait, and the last events for stories."""


def parts_of(limits: Limits, *, block_count: int) -> dict[str, int]:
    """Return the bytes that each part may take while sources hold so many blocks."""
    assert block_count >= 0, f"{block_count} blocks"
    return {
        "sources": limits.sources_max * SOURCE_BYTES,
        "subjects": SUBJECTS_MAX * SUBJECT_BYTES,
        "blocks": block_count * BLOCK_BYTES,
        "queues": QUEUE_BYTES,
    }


def usages_of(now: Statistics, limits: Limits) -> dict[str, Usage]:
    """Return how full each table and queue is; that of events is the fullest of all sources."""
    assert now.buffered_most <= now.buffered_events, now
    return {
        "sources": Usage(now.sources, limits.sources_max, now.drops.get("sources_full", 0)),
        "buffered_events": Usage(now.buffered_most, limits.buffer_events_max),
    }
