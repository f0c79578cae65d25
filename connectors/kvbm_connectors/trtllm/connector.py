"""Connector classes that TensorRT-LLM loads: they hand its calls on to leader or worker side.

`kv_connector_config.connector_module: kvbm_connectors.trtllm`. Every rank makes a worker, rank 0 a
leader as well, in two threads at the same time. What cannot be cached is logged once; the
engine then computes as it would without us.

This module has not run inside TensorRT-LLM: see docs/trtllm.md for what has.
"""

from __future__ import annotations

import atexit
import importlib
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from kvbm_common.config.settings import Settings
from kvbm_common.copying.naming import NAMING
from kvbm_common.errors import KvbmError
from kvbm_common.identity import of_tenant
from kvbm_common.wire.local import Region

from kvbm_connectors.client.affinity import unbound
from kvbm_connectors.client.engine_options import log_beside
from kvbm_connectors.client.lending import gpu_maker
from kvbm_connectors.client.scheduler import SchedulerHalf
from kvbm_connectors.core.messages import ConnectorLimits
from kvbm_connectors.trtllm.identity import Lives, agree, namespace_of, refusal_of, stream_of
from kvbm_connectors.trtllm.leader import LeaderSide
from kvbm_connectors.trtllm.memory import regions_of_layout, regions_of_tensor
from kvbm_connectors.trtllm.promises import PromiseKeeper, PromisePlan
from kvbm_connectors.trtllm.protocols import SOURCES
from kvbm_connectors.trtllm.worker import WorkerSide

log = logging.getLogger(__name__)

LIVES = Lives()
ENGINE_LOGGER = "TRT-LLM"
"""The only one that it configures (logger.py)."""
COUNTS_LOG_S = 60.0
"""TensorRT-LLM has no place for a connector's figures but the log."""


def _interface() -> Any:
    """Import the module with the engine's base classes, wherever this release has it."""
    for path in SOURCES:
        try:
            return importlib.import_module(path)
        except ModuleNotFoundError as error:
            if error.name is None or not path.startswith(error.name):
                raise  # The engine is there, and broken in some other place.
    raise ModuleNotFoundError(f"TensorRT-LLM has none of {', '.join(SOURCES)}")


_engine = _interface()
_Scheduler: Any = _engine.KvCacheConnectorScheduler
_Worker: Any = _engine.KvCacheConnectorWorker


def _version() -> str:
    return str(importlib.import_module("tensorrt_llm").__version__)


def _broadcast(value: str, root: int) -> str:
    utils = importlib.import_module("tensorrt_llm._utils")
    return str(utils.mpi_broadcast(value, root))


def _refusal(llm_args: Any) -> str:
    """Return why this rank passes through. No error leaves: the other ranks wait for this one."""
    try:
        return refusal_of(llm_args)
    except Exception as error:  # Of a file system, for one.
        return repr(error)


class KvbmConnectorLeader(_Scheduler):  # type: ignore[misc]
    """KVBM as TensorRT-LLM's KvCacheConnectorScheduler (release 1.2, and its path in 1.3)."""

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        log_beside(ENGINE_LOGGER, level=logging.INFO)
        self._side: LeaderSide | None = None
        self._half: SchedulerHalf | None = None
        self._barrier: threading.Timer | None = None
        self._log_at_s = time.monotonic() + COUNTS_LOG_S
        refusal = _refusal(llm_args)
        if refusal:
            log.error("KVBM passes through: %s", refusal)
            return
        with unbound():
            self._start(Settings.load())

    def _start(self, settings: Settings) -> None:
        for warning in settings.warnings:
            log.warning("%s", warning)
        life = LIVES.of(self._llm_args)
        namespace = namespace_of(self._llm_args, _version(), life.incarnation)
        namespace = of_tenant(namespace, settings.tenant)
        try:
            keeper = PromiseKeeper(
                settings.shm_dir, life.incarnation, int(settings.promise_gb * 1e9)
            )
        except KvbmError as error:
            log.error("KVBM passes through: %s (%s)", error, error.code)
            return
        news = threading.Event()
        world_size = int(self._llm_args.parallel_config.to_mapping().world_size)
        self._half = half = SchedulerHalf(
            engine=life.engine,
            incarnation=life.incarnation,
            namespace=namespace,
            host_tier_endpoint=settings.host_tier_endpoint,
            consolidator_endpoint=settings.consolidator_endpoint,
            streams=[stream_of(self._llm_args, life, namespace, settings.trtllm_zmq_port)],
            world_size=world_size,
            limits=ConnectorLimits.of(settings),
            on_news=news.set,
        )
        life.leader = self._side = LeaderSide(
            half, NAMING.hasher(namespace), keeper,
            news=news,
            step_wait_ms=settings.onboard_deadline_ms,
            min_priority=settings.host_offload_prefix_min_priority,
        )  # fmt: skip
        half.start()
        atexit.register(self.shutdown)
        timeout_s = settings.leader_worker_init_timeout_s
        self._barrier = threading.Timer(timeout_s, self._warn_if_ranks_are_missing, [timeout_s])
        self._barrier.daemon = True
        self._barrier.start()
        log.info("%s, namespace %s", life.engine, namespace)

    def _warn_if_ranks_are_missing(self, timeout_s: float) -> None:
        half, side = self._half, self._side
        if half is not None and side is not None and not half.attached:
            side.counts["init_timeouts"] += 1
            log.error(
                "the engine's ranks and the host tier have not met within %d s "
                "(DYN_KVBM_LEADER_WORKER_INIT_TIMEOUT_SECS): passing through until they do",
                timeout_s,
            )

    # --- what the engine calls --------------------------------------------------------------

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """See LeaderSide.matched. Loads are done when a step begins, never asynchronously: a
        cancelled request's blocks would be freed under a load that still writes."""
        if self._side is None:
            return 0, False
        return self._side.matched(request, num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None:
        """Do nothing: what matters of the blocks is in the scheduler output, too, and there it is
        complete."""

    def build_connector_meta(self, scheduler_output: Any) -> PromisePlan:
        """Return the plan of this step: see LeaderSide.plan."""
        if self._side is None:
            return PromisePlan(0)
        if time.monotonic() >= self._log_at_s:
            self._log_at_s = time.monotonic() + COUNTS_LOG_S
            log.info("KVBM so far: %s", self.counts())
        return self._side.plan(scheduler_output)

    def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool:
        """Offer what a request has computed: see LeaderSide.finished."""
        return self._side is not None and self._side.finished(request, cache_block_ids)

    def cancel_load(self, request: Any, start: int, end: int) -> None:
        """Give up what was promised of these tokens, which will not be used (release 1.3)."""
        if self._side is not None:
            self._side.cut(request, start, end)

    def request_reset(self, request: Any) -> None:
        """Reset a request that begins again, with other blocks (release 1.3)."""
        if self._side is not None:
            self._side.reset(request)

    def counts(self) -> dict[str, int]:
        """Return all counters; their names are in docs/trtllm.md."""
        side, half = self._side, self._half
        return {**half.counts(), **side.counts} if side is not None and half is not None else {}

    def shutdown(self) -> None:
        """End all threads and say good-bye. No release of the engine that was read calls it: the
        interpreter does, at its end."""
        half, self._half = self._half, None
        side, self._side = self._side, None
        if self._barrier is not None:
            self._barrier.cancel()
        if half is not None and side is not None:
            half.close()
            side.close()


class KvbmConnectorWorker(_Worker):  # type: ignore[misc]
    """KVBM as TensorRT-LLM's KvCacheConnectorWorker: one on every rank."""

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        log_beside(ENGINE_LOGGER, level=logging.INFO)
        self._side: WorkerSide | None = None
        mapping = llm_args.parallel_config.to_mapping()
        life = LIVES.of(llm_args)
        refusal = _refusal(llm_args)
        if refusal and mapping.rank:  # The leader says it of rank 0.
            log.error("KVBM passes through: rank %d: %s", mapping.rank, refusal)
        try:
            agreed = agree(life, int(mapping.world_size), _broadcast, refuses=bool(refusal))
        except Exception as error:  # Without MPI, for one; whatever it is, the engine computes.
            log.error("KVBM passes through: the ranks cannot agree on a name: %r", error)
            return
        if refusal or not agreed:
            return
        settings = Settings.load()
        self._side = WorkerSide(
            life,
            of_tenant(namespace_of(llm_args, _version(), life.incarnation), settings.tenant),
            settings,
            rank=int(mapping.rank),
            world_size=int(mapping.world_size),
        )
        atexit.register(self.shutdown)

    def register_kv_caches(self, kv_cache_tensor: Any) -> None:
        """Lend the V1 manager's pool."""
        self._register(lambda: regions_of_tensor(kv_cache_tensor), kv_cache_tensor.device)

    def register_kv_cache_layout(self, layout: Any) -> None:
        """Lend the V2 manager's pools (1.3)."""
        self._register(
            lambda: regions_of_layout(layout), layout.groups[0].regions[0].as_tensor().device
        )

    def _register(self, regions: Callable[[], list[Region]], device: Any) -> None:
        if self._side is None:
            return
        try:
            found = regions()
            make_gpu = gpu_maker(device) if device.type == "cuda" else None
            with unbound():
                self._side.register(found, make_gpu)
        except (KvbmError, TimeoutError) as error:
            log.error("KVBM passes through: %s (%s)", error, getattr(error, "code", "timeout"))

    def start_load_kv(self, stream: Any) -> None:
        """Load the promised blocks: they are in when this returns. Raises PromiseBroken.

        `stream` is the one that the step computes on; on it, what was in those blocks before may
        still be read.
        """
        plan = self.get_connector_meta()
        if self._side is not None and isinstance(plan, PromisePlan):
            self._side.start(plan, compute_stream=getattr(stream, "cuda_stream", None))

    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None:
        """Do nothing: loads are over before the first layer."""

    def save_kv_layer(self, layer_idx: int, stream: Any) -> None:
        """Do nothing: the host tier pulls whole blocks, when their request is over."""

    def wait_for_save(self, stream: Any) -> None:
        """Do nothing: nothing is saved while a step runs."""

    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]:
        """Return the requests (saved, loaded). Loads are never asynchronous, so that none is
        awaited."""
        if self._side is None:
            return list(finished_gen_req_ids), list(started_loading_req_ids)
        return self._side.finished(finished_gen_req_ids), list(started_loading_req_ids)

    def shutdown(self) -> None:
        """Take the memory back."""
        side, self._side = self._side, None
        if side is not None:
            side.close()


DynamoKVBMConnectorLeader = KvbmConnectorLeader
DynamoKVBMConnectorWorker = KvbmConnectorWorker
