"""The connector that vLLM loads: its methods, handed on to the scheduler or the worker side.

vLLM makes one for its scheduler and one in each worker. An engine that cannot be cached computes as
it would without us; its operators are told why (`client/pass_through.py`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from kvbm_common.errors import KvbmError
from kvbm_common.identity import of_tenant
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    SupportsHMA,
)

from kvbm_connectors.client.affinity import unbound
from kvbm_connectors.client.engine_options import log_beside
from kvbm_connectors.client.pass_through import PassThrough
from kvbm_connectors.client.scheduler import SchedulerHalf
from kvbm_connectors.vllm.adapter_loads import watch_loads
from kvbm_connectors.vllm.adapters import Adapters
from kvbm_connectors.vllm.block_holds import BlockHolds, evict_from
from kvbm_connectors.vllm.computation import application_of
from kvbm_connectors.vllm.count_meter import CountMeter
from kvbm_connectors.vllm.kv_groups import KvGroup, groups_of, is_hybrid
from kvbm_connectors.vllm.kv_layout import wanted_layout
from kvbm_connectors.vllm.metadata import KvbmMetadata, KvbmWorkerMetadata
from kvbm_connectors.vllm.namespace import (
    Life,
    drafts_write_kv,
    namespace_of,
    pass_through_of,
    refusal_of,
    rewritten_by_drafts,
    stream_of,
)
from kvbm_connectors.vllm.options import Options, recompute_failed_loads
from kvbm_connectors.vllm.plan import NEWS, StepPlan, StepReport
from kvbm_connectors.vllm.ranks import watch_ranks
from kvbm_connectors.vllm.resets import Generations, PrefixCacheWatch, weights_are_pushed
from kvbm_connectors.vllm.scheduler_side import SchedulerSide
from kvbm_connectors.vllm.shape import rank_here, shape_of
from kvbm_connectors.vllm.statistics import PASSES_THROUGH, KvbmPromMetrics, KvbmStats
from kvbm_connectors.vllm.step_meter import meter_of
from kvbm_connectors.vllm.versions import has_all_tables, repeats_request_ids, sources_of, tables_in
from kvbm_connectors.vllm.weight_writes import watch_writes
from kvbm_connectors.vllm.worker_side import WorkerSide, lend_layers

log = logging.getLogger(__name__)


class KvbmConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """KVBM as vLLM's KV connector (KVConnectorBase_V1, vLLM 0.29 and later)."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        log_beside("vllm")
        transfer = vllm_config.kv_transfer_config
        self._options = Options.read(transfer.kv_connector_extra_config)
        self._scheduler: SchedulerSide | None = None
        self._scheduler_half: SchedulerHalf | None = None
        self._worker: WorkerSide | None = None
        self._meter = CountMeter(
            self.counts, is_busy=lambda: self._scheduler is not None and not self._scheduler.idle
        )
        self._block_pool: Any = None
        self._watch = PrefixCacheWatch()
        self._generations: Generations | None = None
        self._holds: BlockHolds | None = None
        self._lend: Callable[[], None] = lambda: None
        self._parked = False
        self._passing: PassThrough | None = None
        self._refused: StepReport | None = None
        self._groups: tuple[KvGroup, ...] = ()
        if refusal := refusal_of(vllm_config, kv_cache_config):
            self._pass_through(role, refusal)
            return
        try:
            namespace = namespace_of(vllm_config, kv_cache_config, self._options.revision)
            self._namespace = of_tenant(namespace, self._options.settings.tenant)
            drafts = drafts_write_kv(vllm_config)
            self._shape = shape_of(vllm_config, kv_cache_config, drafts=drafts)
        except KvbmError as error:
            self._pass_through(role, f"{error} ({error.code})")
            return
        self._groups = groups_of(kv_cache_config, self._namespace)
        self._group_namespaces = [group.hasher.namespace for group in self._groups[1:]]
        self._group_count = len(kv_cache_config.kv_cache_groups)
        self._hybrid = is_hybrid(kv_cache_config)
        self._holds = BlockHolds() if self._hybrid or repeats_request_ids() else None
        self._life = Life.of(vllm_config)
        self._world_size = int(vllm_config.parallel_config.world_size)
        if role == KVConnectorRole.SCHEDULER:
            recompute_failed_loads(transfer)
            watch_loads()
            watch_writes()
            with unbound():
                self._start_scheduler()

    def _pass_through(self, role: Any, reason: str) -> None:
        """Compute without a cache, and tell operators why; a worker tells the scheduler half."""
        log.warning("KVBM passes through: %s", reason)
        if role == KVConnectorRole.SCHEDULER:
            attach = pass_through_of(self._vllm_config, reason)
            with unbound():
                self._passing = PassThrough(attach, self._options.settings.consolidator_endpoint)
                self._passing.start()
        else:
            self._refused = StepReport(passes_through=reason)

    def _start_scheduler(self) -> None:
        settings = self._options.settings
        for warning in settings.warnings:
            log.warning("%s", warning)
        stream = stream_of(self._vllm_config, self._life, self._namespace, self._group_namespaces)
        if not stream.endpoint:
            log.info("vLLM publishes no KV events: its device blocks will not be in the index")
        self._scheduler_half = half = SchedulerHalf(
            engine=self._life.engine, incarnation=self._life.incarnation,
            namespace=self._namespace, group_namespaces=self._group_namespaces,
            host_tier_endpoint=settings.host_tier_endpoint,
            consolidator_endpoint=settings.consolidator_endpoint,
            streams=[stream], world_size=self._world_size, limits=self._options.limits,
            on_news=NEWS.set,
        )  # fmt: skip
        self._scheduler = SchedulerSide(
            self._scheduler_half,
            self._groups[0].hasher,
            world_size=self._world_size,
            rewritten=rewritten_by_drafts(self._vllm_config),
            groups=self._groups,
            holds=self._holds,
            hybrid=self._hybrid,
            all_tables=has_all_tables(),
            meter=meter_of(self._vllm_config) if settings.load_or_compute else None,
            adapters=Adapters(
                lambda adapters: half.describe(adapters=adapters),
                applied=application_of(self._vllm_config.lora_config),
                since_ns=time.time_ns(),
                final=self._options.lora_final,
            ),
        )
        self.adapter_loaded = self._scheduler.adapter_loaded  # Called by adapter_loads.py.
        self.adapters_lost = self._scheduler.adapters_lost
        forgets = self._options.forgets(weights_are_pushed(self._vllm_config))
        self._generations = Generations(self._scheduler, half, self._watch, forgets=forgets,
                                        harmless=self._options.harmless_calls)  # fmt: skip
        self.weights_written = self._generations.weights_written  # Called by weight_writes.py.
        self._scheduler_half.start()
        self._barrier = watch_ranks(half, self._scheduler.counts, self._world_size, settings)
        log.info("%s, namespace %s", self._life.engine, self._namespace)

    # --- both -------------------------------------------------------------------------------

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Return the layout that vLLM is asked for: see kv_layout.py."""
        return wanted_layout(vllm_config)

    @property
    def requires_kv_delivery(self) -> bool:
        """A block that is not saved costs a miss, no more."""
        return False

    def shutdown(self) -> None:
        """End all threads and say good-bye."""
        if self._scheduler_half is not None:
            self._barrier.cancel()
            self._scheduler_half.close()
            self._scheduler_half = None
        if self._worker is not None:
            self._worker.close()
        if self._passing is not None:
            self._passing.close()
            self._passing = None

    def counts(self) -> dict[str, int]:
        """Return what this half has counted."""
        counts = self._worker.counts() if self._worker is not None else {}
        if self._scheduler is not None and self._scheduler_half is not None:
            counts |= self._scheduler_half.counts() | dict(self._scheduler.counts)
        if self._passing is not None:
            counts[f"{PASSES_THROUGH}{self._passing.reason}"] = 1
        return counts

    def get_kv_connector_stats(self) -> KvbmStats | None:
        """Return what either half has counted since the last call."""
        added = self._meter.take()
        return None if added is None else KvbmStats(added)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvbmStats:
        """Build the statistics from `data`, in the process that logs."""
        return KvbmStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KvbmPromMetrics:
        """Build the metrics that show our counters in vLLM's `/metrics`."""
        return KvbmPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # --- the scheduler's --------------------------------------------------------------------

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Answer vLLM: see SchedulerSide.matched."""
        if self._scheduler is None:
            return 0, False
        if self._generations is not None:
            self._generations.look()
        return self._scheduler.matched(request, num_computed_tokens)

    def on_new_request(self, request: Any) -> None:
        """Read a request's hints when it arrives (vLLM calls it in later versions)."""
        if self._scheduler is not None:
            self._scheduler.hints.begin(request)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Take vLLM's blocks: see SchedulerSide.allocated."""
        if self._scheduler is not None:
            self._scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KvbmMetadata:
        """Plan a step: see SchedulerSide.plan."""
        if self._generations is not None:
            self._generations.look()
        plan = StepPlan() if self._scheduler is None else self._scheduler.plan(scheduler_output)
        return KvbmMetadata(plan)

    def update_connector_output(self, connector_output: Any) -> None:
        """Take the workers' reports: see SchedulerSide.reported."""
        if self._scheduler is not None:
            self._scheduler.steps.ended()
        metadata = connector_output.kv_connector_worker_meta
        if self._scheduler is not None and isinstance(metadata, KvbmWorkerMetadata):
            self._scheduler.reported(metadata.report)
            if (reason := metadata.report.passes_through) and self._scheduler_half is not None:
                self._scheduler.counts[f"{PASSES_THROUGH}{reason}"] = 1
                self._scheduler_half.describe(passes_through=reason)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """End a request: see SchedulerSide.finished."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """End a request: see SchedulerSide.finished."""
        side = self._scheduler
        return side is not None and side.finished(request, block_ids), None

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """Read block tables out of vLLM's manager (vLLM 0.30 and later)."""
        super().bind_kv_cache_manager(kv_cache_manager)
        if self._scheduler is not None:
            self._scheduler.tables_of = tables_in(kv_cache_manager)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Keep the block pool, where vLLM keeps the events that it has not published yet; blocks
        are evicted from it."""
        self._block_pool = gpu_block_pool
        self._watch.bind(gpu_block_pool)
        if self._scheduler is None:
            return
        if hasattr(gpu_block_pool, "evict_blocks"):
            self._scheduler.evict = partial(evict_from, gpu_block_pool, self._group_count)
        if self._holds is not None:
            self._holds.bind(gpu_block_pool)

    def has_pending_push_work(self) -> bool:
        """Return whether vLLM must step to publish events, to have held blocks back, or for marks.

        Else, after a reset of an idle engine, the index would believe in blocks that are gone.
        """
        side, events = self._scheduler, getattr(self._block_pool, "kv_event_queue", None)
        return bool(self._holds or events) or (side is not None and side.awaits_marks)

    def has_pending_block_frees(self) -> bool:
        """Return whether offers that end will free blocks: vLLM waits for that instead of
        preempting a request."""
        return self._scheduler is not None and self._scheduler.holding

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """Return the KV groups whose blocks a load writes: vLLM need not zero them before."""
        return tuple(group.table for group in self._groups)

    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[Any, int]:
        """Return which tier the tokens of a hit were in, for vLLM's metrics."""
        if self._scheduler is None or not num_external_tokens:
            return {}
        return sources_of(self._scheduler.hit_of(request), num_external_tokens)

    def reset_cache(self) -> bool | None:
        """Stop finding blocks stored so far: the weights may be others now.

        The tiers are shared with other engines, so nothing is removed: from now on this engine's
        blocks have other names. False: vLLM has refused to clear its device cache, because some
        request holds blocks of before. Those are not stored.
        """
        return self._generations is None or self._generations.reset()

    # --- the workers' -----------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """Lend the KV tensors to the host tier."""
        if not hasattr(self, "_life"):
            return
        self._worker = worker = WorkerSide(
            self._life,
            self._namespace,
            self._options,
            rank=rank_here() if self._world_size > 1 else 0,
            world_size=self._world_size,
            shape=self._shape,
            group_namespaces=self._group_namespaces,
        )
        self._lend = partial(lend_layers, worker, kv_caches, self._kv_cache_config)
        self._lend()

    @classmethod
    def supports_sleep_mode(cls, vllm_config: Any) -> bool:
        """Return True: vLLM may unmap the KV tensors of an engine that sleeps (vLLM 0.33)."""
        return True

    def unregister_kv_caches(self) -> None:
        """Take the KV tensors back from the host tier: their memory is about to be unmapped."""
        if self._worker is not None and not self._parked:
            self._parked = True
            self._worker.park()

    def restore_kv_caches(self) -> None:
        """Lend them again: they are mapped, at the same addresses, and empty.

        Whether the weights are the same is not known here: vLLM has reset the caches before an
        engine sleeps, which began another generation, and resets them again after a reload.
        """
        if self._parked:
            self._parked = False
            self._lend()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin this step's loads."""
        if self._worker is not None:
            self._worker.start(self._get_connector_metadata().plan)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: loads are of whole blocks, and are over when they must be."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Do nothing: the host tier pulls whole blocks after the step."""

    def wait_for_save(self) -> None:
        """Do nothing: the scheduler side holds what the host tier pulls."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return (sent, arrived): requests whose blocks are to be freed, and those that loaded."""
        if self._worker is None:
            return None, None
        return self._worker.sent() or None, self._worker.arrived() or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Return what `get_finished` returns, with the requests whose loads have failed as a whole
        (vLLM 0.30 and later)."""
        results = super().get_transfer_results(finished_req_ids)
        if self._worker is not None:
            results.failed_recving |= self._worker.failed()
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that must be recomputed, of an engine with one KV group."""
        return self._worker.bad_blocks() if self._worker is not None else set()

    def build_connector_worker_meta(self) -> KvbmWorkerMetadata | None:
        """Report how loads ended, so that what failed is not offered again; or a refusal, once."""
        report, self._refused = self._refused, None
        if self._worker is not None:
            report = self._worker.report()
        return KvbmWorkerMetadata(report) if report is not None else None


DynamoConnector = KvbmConnector
