"""Figures of the host tier: its core's counters, and what it expects of loads and engines."""

from __future__ import annotations

from kvbm_common.runtime.metrics import Metric, metrics_of_counts, metrics_of_gauges

from kvbm_host_tier.core.view import HostTierView

LABELS = {
    "lookup_blocks": "outcome",
    "bytes": "path",
    "left_to_compute_blocks": "medium reason",
    "load_queued_bytes": "medium",
    "load_estimate_start_ms": "medium",
    "load_estimate_ms_per_mib": "medium",
    "prefill_tokens_per_s": "engine",
}
"""Metrics whose label is not a reason."""


def figures_of(view: HostTierView) -> list[Metric]:
    """Return every counter and estimate as of now."""
    counters = metrics_of_counts(view.counts, label_names=LABELS)
    return counters + metrics_of_gauges(view.estimates(), label_names=LABELS)
