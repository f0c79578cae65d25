"""Metrics: the counters of a process, as the verb `metrics` answers them."""

from __future__ import annotations

from typing import Literal

import msgspec

Kind = Literal["counter", "gauge", "histogram"]
MEMORY, MEMORY_BOUND = "memory_bytes", "memory_bound_bytes"
"""Figures of the verb `stats` that every service has."""


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
    """The counters of a process since it started."""

    kind: str
    host: str
    instance: str
    epoch: int
    families: list[Family]
