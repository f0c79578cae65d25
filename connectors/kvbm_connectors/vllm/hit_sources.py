"""Where the tokens of a hit came from, for vLLM's own metrics (vLLM 0.32 and later)."""

from __future__ import annotations

from typing import Any

from kvbm_connectors.core.messages import Hit


def sources_of(hit: Hit, tokens: int) -> dict[Any, int]:
    """Return how many of a hit's tokens were in which tier, by vLLM's CacheHitSource.

    A block's share of the tokens is the same for all blocks of the hit.
    """
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    blocks = max(1, hit.blocks)  # vLLM may ask when the hit has been forgotten.
    disk, remote = tokens * hit.disk // blocks, tokens * hit.remote // blocks
    split = {
        CacheHitSource.HOST: tokens - disk - remote,
        CacheHitSource.DISK: disk,
        CacheHitSource.P2P: remote,
    }
    return {source: count for source, count in split.items() if count}
