"""Prometheus text (version 0.0.4) of everything that the instances have counted.

Families of the services get the labels `service`, `host` and `instance`. KVBM's own metrics come
first, under exactly KVBM's names and without labels; prometheus_client would append `_total` to
the counters among them, so those few lines are written here. The labelled series of the same
counters do end in `_total` and are thus other families.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Final

from kvbm_common.counters import Family, Sample
from kvbm_common.registry import ServiceRecord
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import GaugeMetricFamily

from kvbm_metrics.collector import (
    KVBM_COUNTERS,
    KVBM_GAUGES,
    FleetView,
    Instance,
    Totals,
    kvbm_view,
    tier_of,
    used_slots,
)

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
FAMILIES_MAX = 2_000
"""Families in one answer. All services together have about a hundred; the rest is a mistake."""

_NAME = re.compile(r"kvbm_[a-z0-9_]{1,120}")
_LABEL = re.compile(r"(?!__)[a-z_][a-z0-9_]{0,60}")
_OURS = ("service", "host", "instance")
_HELP = {
    "kvbm_matched_tokens": "Tokens found in the cache by lookups.",
    "kvbm_offload_blocks_d2h": "Blocks offloaded from device to host.",
    "kvbm_offload_blocks_h2d": "Blocks offloaded from host to disk.",
    "kvbm_offload_blocks_d2d": "Blocks offloaded from device to disk without a host cache.",
    "kvbm_offload_blocks_d2o": "Blocks offloaded to the object store.",
    "kvbm_onboard_blocks_h2d": "Blocks onboarded from host to device.",
    "kvbm_onboard_blocks_d2d": "Blocks onboarded from disk to device.",
    "kvbm_onboard_blocks_o2d": "Blocks onboarded from the object store to device.",
    "kvbm_object_read_failures": "Blocks that could not be read from the object store.",
    "kvbm_object_write_failures": "Blocks that could not be written to the object store.",
    "kvbm_host_cache_hit_rate": "Part of recent lookups that the host cache answered, 0 to 1.",
    "kvbm_disk_cache_hit_rate": "Part of recent lookups that the disk cache answered, 0 to 1.",
    "kvbm_object_cache_hit_rate": "Part of recent lookups that the object store answered, 0 to 1.",
}


def render(view: FleetView, totals: Totals, *, version: str) -> bytes:
    """The whole answer of `/metrics`, UTF-8."""
    families = _Families()
    for metric in _about_instances(view, version=version):
        families.add_own(metric)
    for one in view.instances:
        for family in one.snapshot.families if one.snapshot else ():
            families.add(one.record, family)
    registry = CollectorRegistry()
    registry.register(families)
    return kvbm_lines(view, totals).encode() + generate_latest(registry)


def kvbm_lines(view: FleetView, totals: Totals) -> str:
    """KVBM's metrics."""
    values = kvbm_view(view, totals).model_dump()
    types = dict.fromkeys(KVBM_COUNTERS, "counter") | dict.fromkeys(KVBM_GAUGES, "gauge")
    return "".join(
        f"# HELP {name} {_HELP[name]}\n# TYPE {name} {kind}\n{name} {_number(values[name])}\n"
        for name, kind in types.items()
    )


class _Families:
    """Families of many instances merged by name. What does not fit is refused and counted."""

    def __init__(self) -> None:
        self._metrics: dict[str, Metric] = {}
        self._own: set[str] = set()
        self._refused: Counter[str] = Counter()

    def collect(self) -> Iterator[Metric]:
        """All of it, as prometheus_client wants it."""
        yield from (metric for metric in self._metrics.values() if metric.samples)
        refused = GaugeMetricFamily(
            "kvbm_families_refused",
            "Metric families and samples left out of this answer.",
            labels=["reason"],
        )
        for reason in ("conflict", "malformed", "too_many"):
            refused.add_metric([reason], self._refused[reason])
        yield refused

    def add_own(self, metric: Metric) -> None:
        """A metric that this service makes."""
        self._metrics[metric.name] = metric
        self._own.add(metric.name)

    def add(self, record: ServiceRecord, family: Family) -> None:
        """A family of one instance."""
        name = family.name.removesuffix("_total") if family.kind == "counter" else family.name
        metric = self._metrics.get(name)
        if not _NAME.fullmatch(name) or family.name in KVBM_GAUGES:
            self._refused["malformed"] += 1
        elif metric is None and len(self._metrics) >= FAMILIES_MAX:
            self._refused["too_many"] += 1
        elif metric is not None and (name in self._own or metric.type != family.kind):
            self._refused["conflict"] += 1
        else:
            if metric is None:
                metric = self._metrics[name] = Metric(name, family.help, family.kind)
            self._add_samples(metric, record, family)

    def _add_samples(self, metric: Metric, record: ServiceRecord, family: Family) -> None:
        for sample in family.samples:
            if not all(_LABEL.fullmatch(name) for name in sample.labels):
                self._refused["malformed"] += 1
                continue
            labels = _labels(record, sample)
            match family.kind:
                case "counter":
                    metric.add_sample(f"{metric.name}_total", labels, sample.value)
                case "gauge":
                    metric.add_sample(metric.name, labels, sample.value)
                case "histogram" if len(sample.bucket_counts) == len(family.bucket_bounds) + 1:
                    _add_histogram(metric, labels, family.bucket_bounds, sample)
                case _:
                    self._refused["malformed"] += 1


def _labels(record: ServiceRecord, sample: Sample) -> dict[str, str]:
    """A label of the service that is called like one of ours gets Prometheus's usual prefix."""
    theirs = {f"exported_{k}" if k in _OURS else k: v for k, v in sample.labels.items()}
    ours = {"service": record.kind, "host": record.host, "instance": record.instance}
    return theirs | ours


def _add_histogram(
    metric: Metric, labels: dict[str, str], bounds: list[float], sample: Sample
) -> None:
    running = 0
    for bound, count in zip([*bounds, float("inf")], sample.bucket_counts, strict=True):
        running += count
        le = {"le": _number(bound)}
        metric.add_sample(f"{metric.name}_bucket", labels | le, running)
    metric.add_sample(f"{metric.name}_sum", labels, sample.value)
    metric.add_sample(f"{metric.name}_count", labels, running)


def _number(value: float) -> str:
    return "+Inf" if value == float("inf") else repr(float(value))


def _about_instances(view: FleetView, *, version: str) -> list[Metric]:
    """What this service knows of the others from the registry and their stats."""
    build = GaugeMetricFamily("kvbm_build_info", "The version of KVBM.", labels=["version"])
    build.add_metric([version], 1)
    up = GaugeMetricFamily(
        "kvbm_up", "Whether a registered instance answers.", labels=["kind", "host", "instance"]
    )
    ready = GaugeMetricFamily(
        "kvbm_ready", "Whether a registered instance serves.", labels=["kind", "host", "instance"]
    )
    for one in view.instances:
        labels = [one.record.kind, one.record.host, one.record.instance]
        up.add_metric(labels, one.up)
        ready.add_metric(labels, one.ready)
    return [build, up, ready, *_about_tiers(view)]


def _about_tiers(view: FleetView) -> list[Metric]:
    names = ["tier", *_OURS]
    slots = GaugeMetricFamily("kvbm_tier_slots", "Slots by state.", labels=[*names, "state"])
    slot_bytes = GaugeMetricFamily("kvbm_tier_slot_bytes", "Bytes of one slot.", labels=names)
    used = GaugeMetricFamily(
        "kvbm_tier_occupancy_ratio", "Slots with a block / all slots, 0 to 1.", labels=names
    )
    leases = GaugeMetricFamily("kvbm_tier_leases", "Leases that hold now.", labels=names)
    for one in view.instances:
        tier, stats = tier_of(one), one.stats
        if tier is None or stats is None:
            continue
        labels = _tier_labels(one, tier)
        total = stats.slots.get("total", 0)
        for state, count in stats.slots.items():
            if state != "total":
                slots.add_metric([*labels, state], count)
        slot_bytes.add_metric(labels, stats.slot_bytes)
        used.add_metric(labels, used_slots(stats) / total if total else 0.0)
        leases.add_metric(labels, stats.leases)
    return [slots, slot_bytes, used, leases]


def _tier_labels(one: Instance, tier: str) -> list[str]:
    return [tier, one.record.kind, one.record.host, one.record.instance]
