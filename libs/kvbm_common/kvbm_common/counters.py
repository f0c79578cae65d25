"""Counters, gauges and histograms of one process, and the snapshot in which they travel.

Engines import this module, so it is not prometheus_client: the metrics service collects snapshots
over NATS and renders them. A process owns one `Counters`; names are unique inside it, and declaring
a metric again returns the same one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal

import msgspec

LATENCY_BUCKETS_S = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
"""From a lookup in memory (0.1 ms) to the longest deadline (10 s), half a decade apart."""
BYTES_BUCKETS = tuple(float(4096 * 4**power) for power in range(10))
"""From 4 KiB, the smallest aligned transfer, to 1 GiB."""
SERIES_MAX = 1000
"""Label sets per metric. More means that a label has unbounded values, which is our mistake."""

Kind = Literal["counter", "gauge", "histogram"]


class Sample(msgspec.Struct, frozen=True):
    """One label set of a metric. For a histogram `value` is the sum of what was observed."""

    labels: dict[str, str]
    value: float
    bucket_counts: list[int] = []
    """Histogram: observations per bucket, not cumulative; the last one is above all bounds."""


class Family(msgspec.Struct, frozen=True):
    """One metric with all its label sets."""

    name: str
    kind: Kind
    help: str
    samples: list[Sample]
    bucket_bounds: list[float] = []
    """Histogram: upper bounds, inclusive, ascending."""


class MetricsSnapshot(msgspec.Struct, frozen=True):
    """What a process has counted since it started."""

    kind: str
    host: str
    instance: str
    epoch: int
    families: list[Family]


class _Metric:
    kind: Kind

    def __init__(self, name: str, help: str, labels: Sequence[str]) -> None:
        self.name = name
        self.help = help
        self.label_names = tuple(labels)
        self._values: dict[tuple[str, ...], float] = {}
        if not labels:
            self._values[()] = 0.0

    def _key(self, labels: dict[str, str]) -> tuple[str, ...]:
        assert len(labels) == len(self.label_names), (self.name, labels)
        key = tuple(labels[name] for name in self.label_names)
        assert key in self._values or len(self._values) < SERIES_MAX, self.name
        return key

    def value(self, **labels: str) -> float:
        """The value of one label set; 0 if it was never touched."""
        return self._values.get(self._key(labels), 0.0)

    def total(self) -> float:
        """The sum over all label sets."""
        return sum(self._values.values())

    def family(self) -> Family:
        """The metric as it travels."""
        samples = [
            Sample(dict(zip(self.label_names, key, strict=True)), value)
            for key, value in self._values.items()
        ]
        return Family(self.name, self.kind, self.help, samples)


class Counter(_Metric):
    """Only grows."""

    kind = "counter"

    def add(self, amount: float = 1, **labels: str) -> None:
        """Count `amount` ≥ 0."""
        assert amount >= 0, (self.name, amount)
        key = self._key(labels)
        self._values[key] = self._values.get(key, 0.0) + amount


class Gauge(_Metric):
    """A value that goes up and down."""

    kind = "gauge"

    def set(self, value: float, **labels: str) -> None:
        """Replace the value."""
        self._values[self._key(labels)] = value


class Histogram(_Metric):
    """How observations spread over fixed buckets."""

    kind = "histogram"

    def __init__(
        self, name: str, help: str, labels: Sequence[str], bounds: Sequence[float]
    ) -> None:
        super().__init__(name, help, labels)
        assert list(bounds) == sorted(bounds), name
        self.bounds = tuple(bounds)
        self._counts: dict[tuple[str, ...], list[int]] = {
            key: [0] * (len(bounds) + 1) for key in self._values
        }

    def observe(self, value: float, **labels: str) -> None:
        """Count one observation."""
        key = self._key(labels)
        self._values[key] = self._values.get(key, 0.0) + value
        counts = self._counts.setdefault(key, [0] * (len(self.bounds) + 1))
        counts[bisect_left(self.bounds, value)] += 1

    def count(self, **labels: str) -> int:
        """How many observations one label set has."""
        return sum(self._counts.get(self._key(labels), ()))

    def family(self) -> Family:
        """The metric as it travels."""
        samples = [
            Sample(dict(zip(self.label_names, key, strict=True)), value, list(self._counts[key]))
            for key, value in self._values.items()
        ]
        return Family(self.name, self.kind, self.help, samples, list(self.bounds))


class Counters:
    """Every metric of one process."""

    def __init__(self) -> None:
        self._metrics: dict[str, Counter | Gauge | Histogram] = {}
        self._providers: list[Callable[[], Sequence[Family]]] = []

    def include(self, provider: Callable[[], Sequence[Family]]) -> None:
        """Add what a core has counted by itself: `provider` is asked at every snapshot."""
        self._providers.append(provider)

    def counter(self, name: str, help: str, *, labels: Sequence[str] = ()) -> Counter:
        """Declare a counter."""
        metric = self._metrics.setdefault(name, Counter(name, help, labels))
        assert isinstance(metric, Counter), name
        assert metric.label_names == tuple(labels), name
        return metric

    def gauge(self, name: str, help: str, *, labels: Sequence[str] = ()) -> Gauge:
        """Declare a gauge."""
        metric = self._metrics.setdefault(name, Gauge(name, help, labels))
        assert isinstance(metric, Gauge), name
        assert metric.label_names == tuple(labels), name
        return metric

    def histogram(
        self,
        name: str,
        help: str,
        *,
        labels: Sequence[str] = (),
        bounds: Sequence[float] = LATENCY_BUCKETS_S,
    ) -> Histogram:
        """Declare a histogram; its name ends in the unit: `_seconds` or `_bytes`."""
        metric = self._metrics.setdefault(name, Histogram(name, help, labels, bounds))
        assert isinstance(metric, Histogram), name
        assert metric.label_names == tuple(labels), name
        return metric

    def families(self) -> list[Family]:
        """Everything, in the order of declaration."""
        own = [metric.family() for metric in self._metrics.values()]
        return own + [family for provider in self._providers for family in provider()]


def families_of_counts(
    counts: Mapping[str, int], *, label_names: Mapping[str, str] = MappingProxyType({})
) -> list[Family]:
    """A core's counts as counter families.

    `dropped.no_room` becomes `kvbm_dropped{reason="no_room"}`; a count without a dot has no label.
    `label_names` names the label of a family where `reason` would be wrong.
    """
    samples: dict[str, list[Sample]] = {}
    for key, value in sorted(counts.items()):
        name, _, label = key.partition(".")
        labels = {label_names.get(name, "reason"): label} if label else {}
        samples.setdefault(name, []).append(Sample(labels, value))
    return [
        Family(f"kvbm_{name}", "counter", f"{_words(name)}; see docs/operating.md.", group)
        for name, group in samples.items()
    ]


def families_of_gauges(figures: Mapping[str, float]) -> list[Family]:
    """A core's figures of now as gauge families."""
    return [
        Family(
            f"kvbm_{name}", "gauge", f"{_words(name)}; see docs/operating.md.", [Sample({}, value)]
        )
        for name, value in sorted(figures.items())
    ]


def _words(name: str) -> str:
    return name.removesuffix("_total").replace("_", " ").capitalize()


class TransferFigures:
    """How long the transfers of a process took and how large they were, by path: `d2h`, `h2d` …"""

    def __init__(self, counters: Counters) -> None:
        self._seconds = counters.histogram(
            "kvbm_transfer_seconds", "How long transfers took, by path.", labels=("path",)
        )
        self._bytes = counters.histogram(
            "kvbm_transfer_bytes",
            "How large transfers were, by path.",
            labels=("path",),
            bounds=BYTES_BUCKETS,
        )

    def observe(self, path: str, seconds: float, size: int) -> None:
        """One transfer of `size` bytes has ended."""
        self._seconds.observe(seconds, path=path)
        self._bytes.observe(size, path=path)
