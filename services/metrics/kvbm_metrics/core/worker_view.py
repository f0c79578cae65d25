"""A worker of an engine, as the HTTP API shows it."""

from __future__ import annotations

import msgspec
from kvbm_common.registry.records import ServiceRecord
from kvbm_common.wire.tier_stats import WorkerStats

from kvbm_metrics.core.models import WorkerView


def worker_view(record: ServiceRecord, worker: WorkerStats) -> WorkerView:
    """Return what an instance says of a worker, under the instance's name."""
    return WorkerView(
        host=record.host,
        host_tier="" if worker.passes_through else record.instance,
        engine=worker.engine,
        incarnation=worker.incarnation,
        rank=worker.rank,
        world_size=worker.world_size,
        model=worker.namespace.model,
        block_tokens=worker.namespace.block_tokens,
        namespace=worker.namespace.digest.hex(),
        namespace_fields=msgspec.to_builtins(worker.namespace),
        block_bytes=worker.block_bytes,
        seen_ms_ago=worker.seen_ms_ago,
        verify=worker.verify,
        prefill_tokens_per_s=round(worker.prefill_tokens_per_s, 1),
        passes_through=worker.passes_through,
    )
