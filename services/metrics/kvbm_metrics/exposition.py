"""Prometheus text (version 0.0.4) of everything that the instances have counted.

Families of the services get the labels `service`, `host` and `instance`. KVBM's own metrics come
first, under exactly KVBM's names and without labels. The labelled series of the same counters do
end in `_total` and are thus other families.

The text is written here, line by line: prometheus_client takes three times as long for the same,
and would append `_total` to KVBM's counters.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import lru_cache
from math import isfinite, isnan
from typing import Final

from kvbm_common.counters import Family, Sample
from kvbm_common.registry import ServiceRecord

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

LABELS_MAX = 16_384
"""Names and values of labels that are remembered in the form in which they are written."""

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
    for block in _about_instances(view, version=version):
        families.add_own(block)
    for one in view.instances:
        for family in one.snapshot.families if one.snapshot else ():
            families.add(one.record, family)
    return (kvbm_lines(view, totals) + families.text()).encode()


def kvbm_lines(view: FleetView, totals: Totals) -> str:
    """KVBM's metrics."""
    values = kvbm_view(view, totals).model_dump()
    types = dict.fromkeys(KVBM_COUNTERS, "counter") | dict.fromkeys(KVBM_GAUGES, "gauge")
    return "".join(
        f"# HELP {name} {_HELP[name]}\n# TYPE {name} {kind}\n{name} {_number(values[name])}\n"
        for name, kind in types.items()
    )


class _Block:
    """One family in the text: what it is, and its lines."""

    def __init__(self, name: str, help: str, kind: str = "gauge") -> None:
        self.name, self.help, self.kind = name, help, kind
        self.lines: list[str] = []

    def add(self, labels: Mapping[str, str], value: float) -> None:
        """A sample under the family's own name."""
        self.lines.append(_line(self.name, _pairs(labels), value))

    def text(self) -> str:
        """Head and lines; the name of a counter ends in `_total` there, too."""
        name = f"{self.name}_total" if self.kind == "counter" else self.name
        help = self.help.replace("\\", r"\\").replace("\n", r"\n")
        head = f"# HELP {name} {help}\n# TYPE {name} {self.kind}\n"
        return head + "".join(self.lines)


class _Families:
    """Families of many instances merged by name. What does not fit is refused and counted."""

    def __init__(self) -> None:
        self._blocks: dict[str, _Block] = {}
        self._own: set[str] = set()
        self._refused: Counter[str] = Counter()

    def text(self) -> str:
        """All of it."""
        refused = _Block(
            "kvbm_families_refused", "Metric families and samples left out of this answer."
        )
        for reason in ("conflict", "malformed", "too_many"):
            refused.add({"reason": reason}, self._refused[reason])
        blocks = [*self._blocks.values(), refused]
        return "".join(block.text() for block in blocks if block.lines)

    def add_own(self, block: _Block) -> None:
        """A family that this service makes."""
        self._blocks[block.name] = block
        self._own.add(block.name)

    def add(self, record: ServiceRecord, family: Family) -> None:
        """A family of one instance."""
        name = family.name.removesuffix("_total") if family.kind == "counter" else family.name
        block = self._blocks.get(name)
        if not _NAME.fullmatch(name) or family.name in KVBM_GAUGES:
            self._refused["malformed"] += 1
        elif block is None and len(self._blocks) >= FAMILIES_MAX:
            self._refused["too_many"] += 1
        elif block is not None and (name in self._own or block.kind != family.kind):
            self._refused["conflict"] += 1
        else:
            if block is None:
                block = self._blocks[name] = _Block(name, family.help, family.kind)
            self._add_samples(block, record, family)

    def _add_samples(self, block: _Block, record: ServiceRecord, family: Family) -> None:
        for sample in family.samples:
            if not all(map(_is_label, sample.labels)):
                self._refused["malformed"] += 1
                continue
            pairs = _pairs(_labels(record, sample))
            match family.kind:
                case "counter":
                    block.lines.append(_line(f"{block.name}_total", pairs, sample.value))
                case "gauge":
                    block.lines.append(_line(block.name, pairs, sample.value))
                case "histogram" if len(sample.bucket_counts) == len(family.bucket_bounds) + 1:
                    block.lines += _histogram(block.name, pairs, family.bucket_bounds, sample)
                case _:
                    self._refused["malformed"] += 1


def _labels(record: ServiceRecord, sample: Sample) -> dict[str, str]:
    """A label of the service that is called like one of ours gets Prometheus's usual prefix."""
    theirs = {f"exported_{k}" if k in _OURS else k: v for k, v in sample.labels.items()}
    ours = {"service": record.kind, "host": record.host, "instance": record.instance}
    return theirs | ours


def _histogram(
    name: str, pairs: list[tuple[str, str]], bounds: list[float], sample: Sample
) -> Iterator[str]:
    """Cumulative buckets, sum and count. `le` has its place among the labels, which are sorted."""
    before = "".join(f'{label}="{value}",' for label, value in pairs if label < "le")
    after = "".join(f',{label}="{value}"' for label, value in pairs if label >= "le")
    running = 0
    for bound, count in zip([*bounds, float("inf")], sample.bucket_counts, strict=True):
        running += count
        yield f'{name}_bucket{{{before}le="{_number(bound)}"{after}}} {float(running)!r}\n'
    yield _line(f"{name}_sum", pairs, sample.value)
    yield _line(f"{name}_count", pairs, running)


@lru_cache(maxsize=LABELS_MAX)
def _is_label(name: str) -> bool:
    return _LABEL.fullmatch(name) is not None


@lru_cache(maxsize=LABELS_MAX)
def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _pairs(labels: Mapping[str, str]) -> list[tuple[str, str]]:
    return [(name, _escaped(labels[name])) for name in sorted(labels)]


def _line(name: str, pairs: list[tuple[str, str]], value: float) -> str:
    labels = ",".join([f'{label}="{text}"' for label, text in pairs])
    return f"{name}{{{labels}}} {_number(value)}\n"


def _number(value: float) -> str:
    if isfinite(value):
        return repr(float(value))
    return "NaN" if isnan(value) else "+Inf" if value > 0 else "-Inf"


def _about_instances(view: FleetView, *, version: str) -> list[_Block]:
    """What this service knows of the others from the registry and their stats."""
    build = _Block("kvbm_build_info", "The version of KVBM.")
    build.add({"version": version}, 1)
    up = _Block("kvbm_up", "Whether a registered instance answers.")
    ready = _Block("kvbm_ready", "Whether a registered instance serves.")
    for one in view.instances:
        record = one.record
        labels = {"kind": record.kind, "host": record.host, "instance": record.instance}
        up.add(labels, one.up)
        ready.add(labels, one.ready)
    return [build, up, ready, *_about_tiers(view)]


def _about_tiers(view: FleetView) -> list[_Block]:
    slots = _Block("kvbm_tier_slots", "Slots by state.")
    slot_bytes = _Block("kvbm_tier_slot_bytes", "Bytes of one slot.")
    used = _Block("kvbm_tier_occupancy_ratio", "Slots with a block / all slots, 0 to 1.")
    leases = _Block("kvbm_tier_leases", "Leases that hold now.")
    for one in view.instances:
        tier, stats = tier_of(one), one.stats
        if tier is None or stats is None:
            continue
        labels = _tier_labels(one, tier)
        total = stats.slots.get("total", 0)
        for state, count in stats.slots.items():
            if state != "total":
                slots.add(labels | {"state": state}, count)
        slot_bytes.add(labels, stats.slot_bytes)
        used.add(labels, used_slots(stats) / total if total else 0.0)
        leases.add(labels, stats.leases)
    return [slots, slot_bytes, used, leases]


def _tier_labels(one: Instance, tier: str) -> dict[str, str]:
    record = one.record
    ours = {"service": record.kind, "host": record.host, "instance": record.instance}
    return {"tier": tier} | ours
