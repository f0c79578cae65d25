"""KVBM totals: the metrics that NVIDIA's KVBM names, over all instances.

Pure. Rates are means of what instances say. Counters never go back: a plain sum would fall when an
instance dies or misses one answer, and Prometheus would take the fall for a restart and count
everything again. So each life of an instance adds what it has counted since its last answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvbm_common.wire.metrics import MetricsSnapshot

from kvbm_metrics.core.fleet_view import FleetView, Instance
from kvbm_metrics.core.models import KvbmView

# NVIDIA KVBM's names. Offload h2d is host to disk, onboard h2d is host to device; d2d and d2o
# begin at the disk.
KVBM_COUNTERS = (
    "kvbm_matched_tokens",
    "kvbm_offload_blocks_d2h",
    "kvbm_offload_blocks_h2d",
    "kvbm_offload_blocks_d2d",
    "kvbm_offload_blocks_d2o",
    "kvbm_onboard_blocks_h2d",
    "kvbm_onboard_blocks_d2d",
    "kvbm_onboard_blocks_o2d",
    "kvbm_object_read_failures",
    "kvbm_object_write_failures",
)
KVBM_GAUGES = (
    "kvbm_host_cache_hit_rate",
    "kvbm_disk_cache_hit_rate",
    "kvbm_object_cache_hit_rate",
)
INSTANCES_MAX = 4096
"""Instances that are remembered, dead ones too; the longest silent is forgotten first."""
LIVES_MAX = 4
"""Lives of one instance that are remembered: answers of the one before may still arrive."""

Counts = Mapping[str, float]


class Totals:
    """The sums of all counters, by name. They begin at 0 with this process.

    What an older instance has counted before is its baseline: Prometheus would count it twice.
    A life is known by its epoch. A later life may have a lower one, as after a change of the
    registry; it counts from its first answer, since it may as well be an old one.
    """

    def __init__(self, *, since_epoch: int = 0) -> None:
        """Count all of the lives that begin after `since_epoch`, the epoch of this process."""
        self._since_epoch = since_epoch
        self._totals = dict.fromkeys(KVBM_COUNTERS, 0.0)
        self._lives: dict[tuple[str, str, str], dict[int, Counts]] = {}

    def take(self, snapshots: Iterable[MetricsSnapshot]) -> None:
        """Add what is new. The same snapshot again adds nothing."""
        for snapshot in snapshots:
            key = (snapshot.kind, snapshot.host, snapshot.instance)
            lives = self._lives.pop(key, {})
            now = kvbm_counters(snapshot)
            before = lives.pop(snapshot.epoch, None)
            if before is None:
                last = next(reversed(lives), self._since_epoch)
                before = {} if snapshot.epoch > last else now
            self._add(now, before)
            lives[snapshot.epoch] = now
            while len(lives) > LIVES_MAX:
                del lives[next(iter(lives))]
            assert snapshot.epoch in lives, f"{key}: the life that has answered is forgotten"
            self._lives[key] = lives
        while len(self._lives) > INSTANCES_MAX:
            del self._lives[next(iter(self._lives))]

    def _add(self, now: Counts, before: Counts) -> None:
        for name, value in now.items():
            total = self._totals[name]
            self._totals[name] += max(0.0, value - before.get(name, 0.0))
            assert self._totals[name] >= total, f"{name} went back from {total}"

    def values(self) -> dict[str, float]:
        """Return the totals by name."""
        return dict(self._totals)


def kvbm_counters(snapshot: MetricsSnapshot) -> dict[str, float]:
    """Return what one instance has counted of KVBM's counters, summed over labels."""
    return {
        family.name.removesuffix("_total"): sum(sample.value for sample in family.samples)
        for family in snapshot.families
        if family.kind == "counter" and family.name.removesuffix("_total") in KVBM_COUNTERS
    }


def kvbm_view(view: FleetView, totals: Totals) -> KvbmView:
    """Return the metrics that NVIDIA's KVBM names; 0 where no service has reported."""
    rates = {name: hit_rate(view.instances, name.removeprefix("kvbm_")) for name in KVBM_GAUGES}
    counts = totals.values()
    assert counts.keys().isdisjoint(rates), f"a counter and a rate have one name: {list(rates)}"
    return KvbmView.model_validate(counts | rates)


def hit_rate(instances: Iterable[Instance], figure: str) -> float:
    """Return the mean of a rate over instances, weighted by their recent lookups."""
    weighted = lookups = 0.0
    for one in instances:
        if one.stats is not None and figure in one.stats.figures:
            weight = one.stats.figures.get("lookups_windowed", 0.0)
            weighted += weight * one.stats.figures[figure]
            lookups += weight
    return weighted / lookups if lookups else 0.0
