"""Statistics: the connector's counters, in vLLM's log line and in its `/metrics`.

`vllm:kvbm_connector_total{what="load_failed_blocks", …}` counts since the engine's start; the
names are those of docs/vllm.md. `vllm:kvbm_connector_passes_through{reason=…}` is 1 for an engine
that computes without a cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

PASSES_THROUGH = "passes_through: "
"""The prefix of a count's name that ends with the reason why the engine passes through."""


@dataclass
class KvbmStats(KVConnectorStats):  # type: ignore[misc]
    """The counts since the last collection."""

    def reset(self) -> None:
        self.data: dict[str, int] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for what, count in other.data.items():
            self.data[what] = self.data.get(what, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(sorted(self.data.items()))

    def is_empty(self) -> bool:
        return not self.data


class KvbmPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """One counter, labelled by what it counts, beside vLLM's own labels."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._passes = self._gauge_cls(
            name="vllm:kvbm_connector_passes_through",
            documentation="Whether the engine computes without KVBM, by `reason`.",
            labelnames=[*labelnames, "reason"],
        )
        self._counter = self._counter_cls(
            name="vllm:kvbm_connector",
            documentation="What the KVBM connector has counted, by `what`.",
            labelnames=[*labelnames, "what"],
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for what, count in transfer_stats_data.items():
            if what.startswith(PASSES_THROUGH):
                self._passes.labels(*labels, what.removeprefix(PASSES_THROUGH)).set(1)
            else:
                self._counter.labels(*labels, what).inc(count)
