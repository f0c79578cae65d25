"""Figures: the core's statistics as metrics and as the reply to `stats`."""

from __future__ import annotations

from kvbm_common.runtime.metrics import Metric, gauge_of, metrics_of_counts

from kvbm_index.core.messages import Statistics

FIGURES = ("sources", "sources_behind", "holders", "blocks", "buffered_events")
COUNTED = ("events", "snapshots", "lower_epochs")


def figures_of(statistics: Statistics) -> dict[str, int]:
    """Return all figures but the drops, by name."""
    return {name: getattr(statistics, name) for name in FIGURES + COUNTED}


def metrics_of(statistics: Statistics) -> list[Metric]:
    """Return the metrics of the core."""
    counts = {f"index_dropped_total.{name}": value for name, value in statistics.drops.items()}
    counts["index_events_total"] = statistics.events
    counts["index_snapshots_total"] = statistics.snapshots
    counts["index_lower_epochs_total"] = statistics.lower_epochs
    figures = figures_of(statistics)
    return metrics_of_counts(counts) + [
        gauge_of(f"kvbm_index_{name}", f"Now: {name}.", figures[name]) for name in FIGURES
    ]
