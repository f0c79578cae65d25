"""Metadata: the messages between the connector's halves, which vLLM carries once a step."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvbm_connectors.vllm.plan import StepPlan, StepReport


@dataclass
class KvbmMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """A step's plan, from the scheduler to every worker."""

    plan: StepPlan


@dataclass
class KvbmWorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """The workers' reports of a step, to the scheduler."""

    report: StepReport

    def aggregate(self, other: KvbmWorkerMetadata) -> KvbmWorkerMetadata:
        """Return a report of both: the scheduler side counts the ranks."""
        return KvbmWorkerMetadata(self.report.joined(other.report))
