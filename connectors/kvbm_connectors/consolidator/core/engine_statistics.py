"""Statistics of all engines together: their streams, and what is held and waits in these."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from kvbm_connectors.consolidator.core.engine import Engine
from kvbm_connectors.consolidator.core.messages import EnginesStatistics


def statistics_of(
    engines: Collection[Engine],
    *,
    batches: int,
    published: int,
    replays: int,
    drops: Mapping[str, int],
) -> EnginesStatistics:
    """Return the figures of these engines, with what was counted of their streams until now."""
    assert min(batches, published, replays) >= 0, f"{batches}, {published}, {replays} are counted"
    ranks = [rank for engine in engines for rank in engine.ranks.values()]
    return EnginesStatistics(
        engines=len(engines),
        streams=len(ranks),
        passing_through=sum(bool(rank.attach.passes_through) for rank in ranks),
        blocks=sum(rank.block_count for rank in ranks),
        pending_batches=sum(rank.sequencer.pending_count for rank in ranks),
        orphan_blocks=sum(rank.orphans.block_count for rank in ranks),
        pending_most=max((rank.sequencer.pending_count for rank in ranks), default=0),
        orphan_most=max((rank.orphans.block_count for rank in ranks), default=0),
        batches=batches,
        published=published,
        replays=replays,
        drops=dict(drops),
    )
