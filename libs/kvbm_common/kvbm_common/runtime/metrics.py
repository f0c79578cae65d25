"""The metrics of one process: prometheus_client's, each declared once, and how they travel.

A core counts in a dict of its own and knows nothing of this module; its shell shows the dict here.
What engines import does not reach prometheus_client, and so not this module either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Any, TypeVar, cast

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Metric,
    disable_created_metrics,
)

from kvbm_common.wire.metrics import Family, Kind, Sample

__all__ = ["Counter", "Gauge", "Histogram", "Metric", "Metrics", "TransferFigures"]

LATENCY_BUCKETS_S = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
"""From a lookup in memory (0.1 ms) to the longest deadline (10 s), half a decade apart."""
BYTES_BUCKETS = tuple(float(4096 * 4**power) for power in range(10))
"""From 4 KiB, the smallest aligned transfer, to 1 GiB."""
SAMPLES_MAX = 16_000
"""Samples per metric: a histogram's of a thousand label sets. More means that a label has unbounded
values, which is our mistake."""

Declared = TypeVar("Declared", Counter, Gauge, Histogram)

# The epoch in a snapshot says when a process began to count; a series for each counter would double
# what is scraped.
disable_created_metrics()  # type: ignore[no-untyped-call]


class Metrics:
    """Every metric of one process. Declaring a metric again returns the same one."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._declared: dict[str, tuple[Counter | Gauge | Histogram, tuple[str, ...]]] = {}

    def counter(self, name: str, help: str, *, labels: Sequence[str] = ()) -> Counter:
        """Declare a counter; it is read under a name that ends in `_total`, given or not."""
        return self._declare(Counter, name, help, labels)

    def gauge(self, name: str, help: str, *, labels: Sequence[str] = ()) -> Gauge:
        """Declare a gauge and return it."""
        return self._declare(Gauge, name, help, labels)

    def histogram(
        self,
        name: str,
        help: str,
        *,
        labels: Sequence[str] = (),
        bounds: Sequence[float] = LATENCY_BUCKETS_S,
    ) -> Histogram:
        """Declare a histogram; its name ends in the unit: `_seconds` or `_bytes`."""
        return self._declare(Histogram, name, help, labels, buckets=bounds)

    def include(self, collect: Callable[[], Iterable[Metric]]) -> None:
        """Add what a core has counted by itself: `collect` is asked each time."""
        self.registry.register(Included(collect))

    def collect(self) -> list[Metric]:
        """Collect every metric as of now, in the order of declaration, each name once.

        A core and its shell may count under one name: what shell and core dropped is one metric.
        """
        merged: dict[str, Metric] = {}
        for metric in self.registry.collect():
            known = merged.setdefault(metric.name, metric)
            assert known.type == metric.type, metric.name
            if known is not metric:
                known.samples += metric.samples
            assert len(known.samples) <= SAMPLES_MAX, metric.name
        return list(merged.values())

    def families(self) -> list[Family]:
        """Return every metric as it travels."""
        return [family_of(metric) for metric in self.collect()]

    def value(self, name: str, **labels: str) -> float:
        """Return the value of one series by the name that Prometheus reads; 0 if never touched."""
        return self.registry.get_sample_value(name, labels) or 0.0

    def _declare(
        self, kind: type[Declared], name: str, help: str, labels: Sequence[str], **more: Any
    ) -> Declared:
        known = self._declared.get(name)
        if known is None:
            metric = kind(name, help, labels, registry=self.registry, **more)
            known = self._declared[name] = metric, tuple(labels)
        assert isinstance(known[0], kind), name
        assert known[1] == tuple(labels), name
        return known[0]


class Included:
    """A collector of prometheus_client that asks a function."""

    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        self.collect = collect


# --- cores ----------------------------------------------------------------------------------


def metrics_of_counts(
    counts: Mapping[str, int], *, label_names: Mapping[str, str] = MappingProxyType({})
) -> list[Metric]:
    """Return a core's counts as counters.

    `dropped.no_room` becomes `kvbm_dropped{reason="no_room"}`; a count without a dot has no label.
    `label_names` names the label of a metric where `reason` would be wrong, or several labels with
    spaces between: then the count has as many dots.
    """
    metrics: dict[str, Metric] = {}
    for key, value in sorted(counts.items()):
        name, _, label = key.partition(".")
        bare = name.removesuffix("_total")
        labels = _labels(label_names.get(name, "reason"), label)
        metric = metrics.setdefault(name, Metric(f"kvbm_{bare}", _help(bare), "counter"))
        metric.add_sample(f"kvbm_{bare}_total", labels, value)
    return list(metrics.values())


def _labels(names: str, label: str) -> dict[str, str]:
    """Return the labels of a count: "medium reason" and "disk.slow" are two."""
    several = names.split()
    return dict(zip(several, label.split(".", len(several) - 1), strict=True)) if label else {}


def metrics_of_gauges(
    figures: Mapping[str, float], *, label_names: Mapping[str, str] = MappingProxyType({})
) -> list[Metric]:
    """Return a core's figures of now as gauges; labels as in `metrics_of_counts`."""
    metrics: dict[str, Metric] = {}
    for key, value in sorted(figures.items()):
        name, _, label = key.partition(".")
        metric = metrics.setdefault(name, Metric(f"kvbm_{name}", _help(name), "gauge"))
        metric.add_sample(f"kvbm_{name}", _labels(label_names.get(name, "reason"), label), value)
    return list(metrics.values())


def gauge_of(name: str, help: str, value: float) -> Metric:
    """Return one figure of now as a gauge."""
    metric = Metric(name, help, "gauge")
    metric.add_sample(name, {}, value)
    return metric


def _help(name: str) -> str:
    return f"{name.replace('_', ' ').capitalize()}; see docs/operating.md."


class TransferFigures:
    """The durations and sizes of a process's transfers, by path: `d2h`, `h2d` …"""

    def __init__(self, metrics: Metrics) -> None:
        self._seconds = metrics.histogram(
            "kvbm_transfer_seconds", "How long transfers took, by path.", labels=("path",)
        )
        self._bytes = metrics.histogram(
            "kvbm_transfer_bytes",
            "How large transfers were, by path.",
            labels=("path",),
            bounds=BYTES_BUCKETS,
        )

    def observe(self, path: str, seconds: float, size: int) -> None:
        """Observe the end of one transfer of `size` bytes."""
        self._seconds.labels(path).observe(seconds)
        self._bytes.labels(path).observe(size)


# --- the wire -------------------------------------------------------------------------------


def family_of(metric: Metric) -> Family:
    """Return a metric as it travels: the buckets of a histogram are not cumulative."""
    if metric.type == "histogram":
        return _histogram_family(metric)
    assert metric.type in ("counter", "gauge"), metric.name
    name = f"{metric.name}_total" if metric.type == "counter" else metric.name
    samples = [Sample(one.labels, float(one.value)) for one in metric.samples]
    return Family(name, cast(Kind, metric.type), metric.documentation, samples)


def _histogram_family(metric: Metric) -> Family:
    sums: dict[tuple[tuple[str, str], ...], float] = {}
    buckets: dict[tuple[tuple[str, str], ...], dict[float, float]] = {}
    for one in metric.samples:
        labels = tuple(item for item in one.labels.items() if item[0] != "le")
        if one.name.endswith("_sum"):
            sums[labels] = one.value
        elif one.name.endswith("_bucket"):
            buckets.setdefault(labels, {})[float(one.labels["le"])] = one.value
    bounds = list(next(iter(buckets.values()), {}))[:-1]
    samples = [
        Sample(dict(labels), total, _apart(buckets[labels].values()))
        for labels, total in sums.items()
    ]
    return Family(metric.name, "histogram", metric.documentation, samples, bounds)


def _apart(cumulative: Iterable[float]) -> list[int]:
    """Return counts per bucket from cumulative ones, of everything up to each."""
    return [int(after - before) for before, after in pairwise([0.0, *cumulative])]
