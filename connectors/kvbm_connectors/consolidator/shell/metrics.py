"""Figures: the cores' statistics as metrics and as the reply to `stats`."""

from __future__ import annotations

from kvbm_common.runtime.metrics import Metric, gauge_of, metrics_of_counts

from kvbm_connectors.consolidator.core.core import ConsolidatorStatistics

GAUGES = (
    "engines", "streams", "passing_through", "blocks", "pending_batches", "orphan_blocks",
    "consolidated_blocks", "tier_blocks", "tiers_behind", "names", "unnamed_blocks",
)  # fmt: skip
TOTALS = ("batches", "published", "replays", "router_batches")


def figures_of(statistics: ConsolidatorStatistics) -> dict[str, int]:
    """Return all figures but the drops, by name."""
    engines = statistics.engines
    return {
        "engines": engines.engines,
        "streams": engines.streams,
        "passing_through": engines.passing_through,
        "blocks": engines.blocks,
        "pending_batches": engines.pending_batches,
        "orphan_blocks": engines.orphan_blocks,
        "batches": engines.batches,
        "published": engines.published,
        "replays": engines.replays,
        "consolidated_blocks": statistics.merged_blocks,
        "tier_blocks": statistics.tier_blocks,
        "tiers_behind": statistics.tiers_behind,
        "names": statistics.names,
        "unnamed_blocks": statistics.unnamed_blocks,
        "router_batches": statistics.router_batches,
    }


def drops_of(statistics: ConsolidatorStatistics) -> dict[str, int]:
    """Return how much was dropped, by reason."""
    return {**statistics.engines.drops, **statistics.drops}


def metrics_of(statistics: ConsolidatorStatistics) -> list[Metric]:
    """Return the metrics of the cores."""
    prefix = "consolidator_dropped_total"
    figures = figures_of(statistics)
    counts = {f"{prefix}.{reason}": value for reason, value in drops_of(statistics).items()}
    counts |= {f"consolidator_{name}_total": figures[name] for name in TOTALS}
    return metrics_of_counts(counts) + [
        gauge_of(f"kvbm_consolidator_{name}", f"Now: {name.replace('_', ' ')}.", figures[name])
        for name in GAUGES
    ]
