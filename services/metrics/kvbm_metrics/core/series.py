"""Every series of the fleet's page: what the instances have counted, merged by name.

Families of the services get the labels `service`, `host` and `instance`. KVBM's own metrics have
exactly KVBM's names and no labels. The labelled series of the same counters do end in `_total` and
are thus other families.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from kvbm_common.registry.records import ServiceRecord
from kvbm_common.wire.metrics import Family, Kind, Sample

from kvbm_metrics.core.collector import tier_of
from kvbm_metrics.core.fleet_view import FleetView, Instance
from kvbm_metrics.core.kvbm_totals import KVBM_COUNTERS, KVBM_GAUGES
from kvbm_metrics.core.models import KvbmView
from kvbm_metrics.core.sizes import occupancy

FAMILIES_MAX = 2_000
"""Families in one answer. All services together have about a hundred; the rest is a mistake."""

LABELS_MAX = 16_384
"""Names of labels that are remembered as good or bad."""

REFUSED = "kvbm_families_refused"
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


class Series(NamedTuple):
    """One series and its value."""

    name: str
    labels: Mapping[str, str]
    value: float


@dataclass(slots=True)
class FleetMetric:
    """One metric with all its series."""

    name: str
    """Without the `_total` of a counter, whose series have it."""
    help: str
    kind: Kind = "gauge"
    series: list[Series] = field(default_factory=list)

    def add(self, labels: Mapping[str, str], value: float) -> None:
        """Add a series under the metric's own name."""
        self.series.append(Series(self.name, labels, value))


def kvbm_counters(values: KvbmView) -> list[FleetMetric]:
    """Return KVBM's counters, with series that have their very names."""
    return _kvbm(values, KVBM_COUNTERS, "counter")


def fleet(view: FleetView, values: KvbmView, *, version: str) -> list[FleetMetric]:
    """Return KVBM's gauges, and everything that the instances have counted."""
    families = _Families()
    for metric in _about_instances(view, version=version):
        families.add_own(metric)
    for one in view.instances:
        for family in one.snapshot.families if one.snapshot else ():
            families.add(one.record, family)
    metrics = _kvbm(values, KVBM_GAUGES, "gauge") + families.metrics()
    assert len({metric.name for metric in metrics}) == len(metrics), "two families have one name"
    return metrics


def _kvbm(values: KvbmView, names: Sequence[str], kind: Kind) -> list[FleetMetric]:
    said = values.model_dump()
    return [FleetMetric(name, _HELP[name], kind, [Series(name, {}, said[name])]) for name in names]


class _Families:
    """Families of many instances merged by name. What does not fit is refused and counted."""

    def __init__(self) -> None:
        self._metrics: dict[str, FleetMetric] = {}
        self._own = {REFUSED}
        self._refused: Counter[str] = Counter()

    def metrics(self) -> list[FleetMetric]:
        """Return all families that have a series, and the counts of what was refused."""
        refused = FleetMetric(REFUSED, "Metric families and samples left out of this answer.")
        for reason in ("conflict", "malformed", "too_many"):
            refused.add({"reason": reason}, self._refused[reason])
        count_max = FAMILIES_MAX + len(self._own)
        assert len(self._metrics) <= count_max, f"{len(self._metrics)} families in one answer"
        return [metric for metric in (*self._metrics.values(), refused) if metric.series]

    def add_own(self, metric: FleetMetric) -> None:
        """Add a family that this service makes."""
        assert metric.name not in self._metrics, f"{metric.name} is made twice"
        assert _NAME.fullmatch(metric.name), f"{metric.name} is no name of a metric"
        self._metrics[metric.name] = metric
        self._own.add(metric.name)

    def add(self, record: ServiceRecord, family: Family) -> None:
        """Add a family of one instance, or count why it is refused."""
        name = family.name.removesuffix("_total") if family.kind == "counter" else family.name
        metric = self._metrics.get(name)
        is_kvbms = name in KVBM_GAUGES or (family.kind != "counter" and name in KVBM_COUNTERS)
        if is_kvbms or not _NAME.fullmatch(name):
            self._refused["malformed"] += 1
        elif metric is None and len(self._metrics) >= FAMILIES_MAX:
            self._refused["too_many"] += 1
        elif name in self._own or (metric is not None and metric.kind != family.kind):
            self._refused["conflict"] += 1
        else:
            if metric is None:
                metric = self._metrics[name] = FleetMetric(name, family.help, family.kind)
            assert metric.kind == family.kind, f"a {family.kind} joins the {metric.kind} {name}"
            self._add_samples(metric, record, family)

    def _add_samples(self, metric: FleetMetric, record: ServiceRecord, family: Family) -> None:
        for sample in family.samples:
            if not all(map(_is_label, sample.labels)):
                self._refused["malformed"] += 1
                continue
            labels = _labels(record, sample)
            match family.kind:
                case "counter":
                    metric.series.append(Series(f"{metric.name}_total", labels, sample.value))
                case "gauge":
                    metric.add(labels, sample.value)
                case "histogram" if len(sample.bucket_counts) == len(family.bucket_bounds) + 1:
                    metric.series += _histogram(metric.name, labels, family.bucket_bounds, sample)
                case _:
                    self._refused["malformed"] += 1


def _labels(record: ServiceRecord, sample: Sample) -> dict[str, str]:
    """Return the labels of a sample, with those of its service.

    A label of the service that is called like one of ours gets Prometheus's usual prefix.
    """
    theirs = {f"exported_{k}" if k in _OURS else k: v for k, v in sample.labels.items()}
    ours = {"service": record.kind, "host": record.host, "instance": record.instance}
    assert theirs.keys().isdisjoint(ours), f"{record.key} says {sorted(theirs)} itself"
    return theirs | ours


def _histogram(
    name: str, labels: Mapping[str, str], bounds: Sequence[float], sample: Sample
) -> Iterator[Series]:
    """Yield the series of a histogram: cumulative buckets, sum and count."""
    running = 0
    for bound, count in zip([*map(_bound, bounds), "+Inf"], sample.bucket_counts, strict=True):
        running += count
        yield Series(f"{name}_bucket", {**labels, "le": bound}, running)
    yield Series(f"{name}_sum", labels, sample.value)
    yield Series(f"{name}_count", labels, running)


def _bound(bound: float) -> str:
    """Format a bucket's bound as always written here: 4194304.0, not 4.194304e+06."""
    return repr(float(bound))


@lru_cache(maxsize=LABELS_MAX)
def _is_label(name: str) -> bool:
    return _LABEL.fullmatch(name) is not None


def _about_instances(view: FleetView, *, version: str) -> list[FleetMetric]:
    """Return what this service knows of the others from the registry and their stats."""
    build = FleetMetric("kvbm_build_info", "The version of KVBM.")
    build.add({"version": version}, 1)
    up = FleetMetric("kvbm_up", "Whether an instance answers; 0 also for one that was lost.")
    ready = FleetMetric("kvbm_ready", "Whether an instance serves; 0 also for one that was lost.")
    for one in view.instances:
        labels = _instance_labels(one.record)
        up.add(labels, one.up)
        ready.add(labels, one.ready)
    for record in view.lost:  # Without a series no alert would speak of it.
        up.add(_instance_labels(record), 0)
        ready.add(_instance_labels(record), 0)
    return [build, up, ready, *_about_tiers(view)]


def _instance_labels(record: ServiceRecord) -> dict[str, str]:
    return {"kind": record.kind, "host": record.host, "instance": record.instance}


def _about_tiers(view: FleetView) -> list[FleetMetric]:
    slots = FleetMetric("kvbm_tier_slots", "Slots by state.")
    slot_bytes = FleetMetric("kvbm_tier_slot_bytes", "Bytes of one slot.")
    used = FleetMetric("kvbm_tier_occupancy_ratio", "Slots with a block / all slots, 0 to 1.")
    leases = FleetMetric("kvbm_tier_leases", "Leases that hold now.")
    for one in view.instances:
        tier, stats = tier_of(one), one.stats
        if tier is None or stats is None:
            continue
        labels = _tier_labels(one, tier)
        for state, count in stats.slots.items():
            if state != "total":
                slots.add(labels | {"state": state}, count)
        slot_bytes.add(labels, stats.slot_bytes)
        used.add(labels, occupancy(stats))
        leases.add(labels, stats.leases)
    return [slots, slot_bytes, used, leases, *_about_sizes(view), *_about_tenants(view)]


def _about_tenants(view: FleetView) -> list[FleetMetric]:
    """Return what tenants have in tiers: of each tier 34 at most, those beyond together."""
    used = FleetMetric("kvbm_tenant_used_bytes", "Bytes of a tenant's blocks in a tier.")
    share = FleetMetric(
        "kvbm_tenant_share_bytes", "Bytes that a tenant keeps when others want all."
    )
    waiting = FleetMetric(
        "kvbm_tenant_waiting_blocks", "Blocks of a tenant that wait to be written."
    )
    for one in view.instances:
        tier, stats = tier_of(one), one.stats
        for tenant in stats.tenants if tier is not None and stats is not None else ():
            labels = _tier_labels(one, str(tier)) | {"tenant": tenant.name}
            used.add(labels, tenant.bytes)
            share.add(labels, tenant.share_bytes)
            waiting.add(labels, tenant.waiting)
    return [used, share, waiting]


def _about_sizes(view: FleetView) -> list[FleetMetric]:
    """Return how the bytes of tiers are shared out among sizes of blocks."""
    slabs = FleetMetric("kvbm_tier_slabs", "Slabs by state.")
    waste = FleetMetric("kvbm_tier_waste_percent", "Part of slabs in use that no block fills.")
    of_size = FleetMetric("kvbm_tier_size_slabs", "Slabs that are cut into slots of a length.")
    size_bytes = FleetMetric("kvbm_tier_size_used_bytes", "Bytes of the slots of a length in use.")
    for one in view.instances:
        tier, stats = tier_of(one), one.stats
        if tier is None or stats is None or not stats.sizes:
            continue
        labels = _tier_labels(one, tier)
        for state, count in stats.slabs.items():
            slabs.add(labels | {"state": state}, count)
        waste.add(labels, stats.figures.get("waste_percent", 0.0))
        for size in stats.sizes:
            of_length = labels | {"slot_bytes": str(size.slot_bytes)}
            of_size.add(of_length, size.slabs)
            size_bytes.add(of_length, size.used * size.slot_bytes)
    return [slabs, waste, of_size, size_bytes]


def _tier_labels(one: Instance, tier: str) -> dict[str, str]:
    record = one.record
    ours = {"service": record.kind, "host": record.host, "instance": record.instance}
    return {"tier": tier} | ours
