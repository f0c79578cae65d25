"""Figures: the cores' statistics as metrics and as the reply to `stats`."""

from __future__ import annotations

import msgspec
from kvbm_common.counters import Counters, Family, Sample, families_of_counts

from kvbm_connectors.consolidator.whole import WholeStatistics

GAUGES = (
    "engines", "streams", "blocks", "pending_batches", "orphan_blocks", "consolidated_blocks",
    "tier_blocks", "tiers_behind", "names", "unnamed_blocks",
)  # fmt: skip
TOTALS = ("batches", "published", "replays", "router_batches")


def figures_of(statistics: WholeStatistics) -> dict[str, int]:
    """Everything but the drops."""
    engines = statistics.engines
    return {
        "engines": engines.engines,
        "streams": engines.streams,
        "blocks": engines.blocks,
        "pending_batches": engines.pending_batches,
        "orphan_blocks": engines.orphan_blocks,
        "batches": engines.batches,
        "published": engines.published,
        "replays": engines.replays,
        "consolidated_blocks": statistics.consolidated_blocks,
        "tier_blocks": statistics.tier_blocks,
        "tiers_behind": statistics.tiers_behind,
        "names": statistics.names,
        "unnamed_blocks": statistics.unnamed_blocks,
        "router_batches": statistics.router_batches,
    }


def drops_of(statistics: WholeStatistics) -> dict[str, int]:
    """What was dropped, by reason."""
    return {**statistics.engines.drops, **statistics.drops}


def families_of(statistics: WholeStatistics) -> list[Family]:
    """The metrics of the cores."""
    prefix = "consolidator_dropped_total"
    figures = figures_of(statistics)
    counts = {f"{prefix}.{reason}": value for reason, value in drops_of(statistics).items()}
    counts |= {f"consolidator_{name}_total": figures[name] for name in TOTALS}
    return families_of_counts(counts) + [
        Family(
            f"kvbm_consolidator_{name}",
            "gauge",
            f"Now: {name.replace('_', ' ')}.",
            [Sample({}, float(figures[name]))],
        )
        for name in GAUGES
    ]


def families_of_second(counters: Counters) -> list[Family]:
    """The metrics of the publisher of the consolidated stream, under names of their own."""
    return [
        msgspec.structs.replace(
            family, name=family.name.replace("kvbm_events_", "kvbm_consolidated_events_")
        )
        for family in counters.families()
    ]
