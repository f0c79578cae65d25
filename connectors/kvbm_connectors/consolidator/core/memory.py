"""The memory that a consolidator may take, from its limits and from what engines and tiers hold."""

from __future__ import annotations

from kvbm_common.wire.bounds import Usage

from kvbm_connectors.consolidator.core.core import ConsolidatorStatistics
from kvbm_connectors.consolidator.core.ended_engines import ENDED_MAX
from kvbm_connectors.consolidator.core.held_blocks import RETIRED_MAX
from kvbm_connectors.consolidator.core.messages import ConsolidatorLimits, EnginesStatistics
from kvbm_connectors.consolidator.core.router_stream import BUFFER_BYTES_MAX
from kvbm_connectors.consolidator.core.token_names import RETIRED_MAX as NAMES_MAX

BLOCK_BYTES = 1_200
"""A block of an engine or a tier: its names, its parents, what was said of it, its tokens."""
RETIRED_BYTES = 160
NAME_BYTES = 320
ENDED_BYTES = 1_024
QUEUE_BYTES = 96 << 20
"""Inputs and events that wait (an outbox has 64 MiB), and the last events for stories."""


def parts_of(now: ConsolidatorStatistics, *, routers: bool) -> dict[str, int]:
    """Return the bytes that each part may take with the ranks of engines and the blocks of now."""
    streams, block_count = now.engines.streams, now.engines.blocks + now.tier_blocks
    assert streams >= 0, f"{streams} streams"
    assert block_count >= 0, f"{block_count} blocks"
    return {
        "blocks": block_count * BLOCK_BYTES,
        "removed_blocks": streams * RETIRED_MAX * RETIRED_BYTES,
        "names": NAMES_MAX * NAME_BYTES if routers else 0,
        "replays": streams * BUFFER_BYTES_MAX if routers else 0,
        "engines_that_left": ENDED_MAX * ENDED_BYTES,
        "queues": QUEUE_BYTES,
    }


def usages_of(now: EnginesStatistics, limits: ConsolidatorLimits) -> dict[str, Usage]:
    """Return how full each table and queue is; those of streams are of the fullest stream."""
    assert now.pending_most <= now.pending_batches, now
    assert now.orphan_most <= now.orphan_blocks, now
    return {
        "streams": Usage(now.streams, limits.streams_max),
        "pending_batches": Usage(
            now.pending_most, limits.pending_batches_max, now.drops.get("pending_full", 0)
        ),
        "orphan_blocks": Usage(now.orphan_most, limits.orphan_blocks_max),
    }
