"""Exposition: the fleet's counters as a page for Prometheus, written by prometheus_client."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, Metric, generate_latest
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from kvbm_metrics.core import series
from kvbm_metrics.core.fleet_view import FleetView
from kvbm_metrics.core.models import KvbmView
from kvbm_metrics.core.series import FleetMetric

CONTENT_TYPE: Final = CONTENT_TYPE_PLAIN_0_0_4


class FleetCollector(Collector):
    """A fleet's counters, as prometheus_client collects them."""

    def __init__(self, metrics: Sequence[FleetMetric], *, as_unknown: bool = False) -> None:
        self._metrics = metrics
        self._as_unknown = as_unknown

    def collect(self) -> Iterator[Metric]:
        """Yield each metric with its series."""
        for one in self._metrics:
            metric = Metric(one.name, one.help, "unknown" if self._as_unknown else one.kind)
            metric.samples = [Sample(row.name, dict(row.labels), row.value) for row in one.series]
            yield metric


def render(view: FleetView, values: KvbmView, *, version: str) -> bytes:
    """Render the whole answer of `/metrics`, UTF-8, in milliseconds: not for an event loop."""
    fleet = FleetCollector(series.fleet(view, values, version=version))
    return _kvbm_counters(values) + generate_latest(fleet)


def _kvbm_counters(values: KvbmView) -> bytes:
    """Render KVBM's counters, under their very names.

    The library writes `_total` after the name of every counter, and KVBM's do not have it. Of a
    metric of unknown type it writes the name as it is, and `untyped`.
    """
    text = generate_latest(FleetCollector(series.kvbm_counters(values), as_unknown=True))
    return text.replace(b" untyped\n", b" counter\n")
