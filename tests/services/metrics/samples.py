"""Made-up instances for the tests of the metrics service."""

from __future__ import annotations

from typing import Any

import msgspec
from kvbm_common.identity import Namespace
from kvbm_common.registry.records import ServiceRecord
from kvbm_common.runtime.metrics import Metrics
from kvbm_common.wire.metrics import MetricsSnapshot
from kvbm_common.wire.tier_stats import SizeStats, WorkerStats
from kvbm_common.wire.verbs import StatsReply
from kvbm_metrics.core.fleet_view import FleetView, Instance
from kvbm_metrics.core.kvbm_totals import Totals, kvbm_view
from kvbm_metrics.shell import exposition

NAMESPACE = Namespace(model="test", block_tokens=16)
KINDS = ("index", "host-tier", "disk-tier", "metrics", "consolidator")
WORKER = WorkerStats(
    engine="sim-0",
    incarnation="0" * 16,
    rank=0,
    world_size=1,
    namespace=NAMESPACE,
    block_bytes=4096,
    seen_ms_ago=5,
)
PASSING = msgspec.structs.replace(
    WORKER, engine="vllm-1", block_bytes=0, passes_through="prefix caching is off"
)


def record(kind: str, *, host: str = "a", instance: str = "0", epoch: int = 1) -> ServiceRecord:
    """An entry of the registry."""
    return ServiceRecord(
        kind=kind, host=host, instance=instance, epoch=epoch, pid=1, started_ms=2, ttl_s=5.0
    )


def stats(kind: str, **fields: Any) -> StatsReply:
    """The stats of a ready instance."""
    defaults: dict[str, Any] = {"host": "a", "instance": "0", "epoch": 1, "ready": True}
    return StatsReply(kind=kind, **(defaults | fields))


def tier_stats(kind: str, *, used: int, total: int, **fields: Any) -> StatsReply:
    """The stats of a tier with slots of 100 bytes."""
    slots = {"reset": total - used, "staged": 0, "inactive": used, "active": 0, "total": total}
    return stats(kind, tier=kind.split("-")[0], slots=slots, slot_bytes=100, **fields)


def two_sizes(kind: str = "host-tier", **fields: Any) -> StatsReply:
    """The stats of a tier of 3,000 bytes with slots of 100 and of 400 bytes, half of them used."""
    sizes = [
        SizeStats(slot_bytes=100, slabs=2, slots=20, used=7),
        SizeStats(slot_bytes=400, slabs=1, slots=2, used=2),
    ]
    figures = {"waste_percent": 12.5}
    return tier_stats(
        kind, used=9, total=22, block_bytes=1_200, capacity_bytes=3_000, slab_bytes=1_000,
        slabs={"free": 0, "cut": 3, "leaving": 0}, sizes=sizes, figures=figures, **fields,
    )  # fmt: skip


def snapshot(
    counters: Metrics, kind: str, *, host: str = "a", instance: str = "0", epoch: int = 1
) -> MetricsSnapshot:
    """What `counters` hold, as the verb `metrics` answers it."""
    return MetricsSnapshot(
        kind=kind, host=host, instance=instance, epoch=epoch, families=counters.families()
    )


def counted(name: str, value: float, **identity: Any) -> MetricsSnapshot:
    """The snapshot of a host tier that has counted one thing."""
    counters = Metrics()
    counters.counter(name, "Something.").inc(value)
    return snapshot(counters, "host-tier", **identity)


def alive(reply: StatsReply, counted_so_far: MetricsSnapshot | None = None) -> Instance:
    """An instance that answers."""
    return Instance(
        record=record(reply.kind, host=reply.host, instance=reply.instance, epoch=reply.epoch),
        stats=reply,
        snapshot=counted_so_far,
        up=True,
    )


def page_of(view: FleetView, totals: Totals | None = None, *, version: str = "1") -> str:
    """The text of `/metrics`."""
    values = kvbm_view(view, totals or Totals())
    return exposition.render(view, values, version=version).decode()


def silent(kind: str, **identity: Any) -> Instance:
    """An instance that does not."""
    return Instance(record=record(kind, **identity), failure="no answer within 0.5 s")
