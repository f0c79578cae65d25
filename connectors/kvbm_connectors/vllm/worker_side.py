"""The worker side: lends one rank's KV tensors, carries out loads, says once how each ended."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from kvbm_common.errors import KvbmError
from kvbm_common.identity import Namespace
from kvbm_common.wire.local import Region

from kvbm_connectors.client.affinity import unbound
from kvbm_connectors.client.lending import MakeGpu, current_stream, gpu_maker
from kvbm_connectors.client.tensors import Tensor, UnknownLayout, regions_of_groups
from kvbm_connectors.client.worker import WorkerHalf
from kvbm_connectors.core.messages import Load, LoadResult
from kvbm_connectors.vllm.namespace import Life
from kvbm_connectors.vllm.options import Options
from kvbm_connectors.vllm.plan import NEWS, StepPlan, StepReport
from kvbm_connectors.vllm.shape import Shape
from kvbm_connectors.vllm.stream_marks import StreamMarks

if TYPE_CHECKING:
    from kvbm_common.cuda.reading import Gpu

log = logging.getLogger(__name__)

LEND_AGAIN_S = 1.0
LEND_AGAIN_S_MAX = 60.0
"""Between attempts to lend memory that NIXL has refused: doubled each time."""


class WorkerSide:
    """One rank. Without a `WorkerHalf` (memory that cannot be lent) every load fails at once."""

    def __init__(
        self,
        life: Life,
        namespace: Namespace,
        options: Options,
        *,
        rank: int = 0,
        world_size: int = 1,
        shape: Shape | None = None,
        group_namespaces: Sequence[Namespace] = (),
    ) -> None:
        """Create the side of a rank. Without a `shape` blocks have a part for each rank."""
        self._shape = shape
        self._group_namespaces = group_namespaces
        self._life, self._namespace, self._options = life, namespace, options
        self._rank, self._world_size = rank, world_size
        self._half: WorkerHalf | None = None
        self._former: list[WorkerHalf] = []
        """Closed halves, some of whose loads may end yet."""
        self._counts: Counter[str] = Counter()
        self._closing = threading.Event()
        self._lender: threading.Thread | None = None
        self._refused: list[LoadResult] = []
        """Results of loads that could not be carried out."""
        self._ended: list[LoadResult] = []
        """Loads that have ended since the last report."""
        self._arrived: set[str] = set()
        self._bad_blocks: set[int] = set()
        self._failed: set[str] = set()
        self._sent: set[str] = set()
        self._passes_through = ""
        """A reason that the scheduler half has not heard yet."""
        self._make_gpu: MakeGpu | None = None
        self._gpu: Gpu | None = None
        self._compute_stream: Callable[[], int] | None = None
        self._marks = StreamMarks()

    def register(
        self,
        groups: Sequence[Sequence[Tensor]],
        block_count: int,
        make_gpu: MakeGpu | None = None,
        *,
        compute_stream: Callable[[], int] | None = None,
    ) -> None:
        """Lend the memory of the layers of each KV group, and begin to attach. Raises
        UnknownLayout.

        With `make_gpu` it is a GPU's, and `compute_stream` says what the engine's thread computes
        on: vLLM may choose its stream after this.

        NIXL may refuse memory for want of locked pages or descriptors, which may come: the engine
        computes meanwhile.
        """
        self._make_gpu, self._compute_stream = make_gpu, compute_stream
        regions = self._regions(groups, block_count)
        if not self._lend(regions):
            self._lender = threading.Thread(
                target=self._lend_again, args=(regions,), name="kvbm-lend", daemon=True
            )
            self._lender.start()

    def _regions(self, groups: Sequence[Sequence[Tensor]], block_count: int) -> list[Region]:
        if self._shape is None:
            return regions_of_groups(groups, block_count)
        by_head, heads = self._shape.is_cut_by_heads, self._shape.heads
        if by_head and any(tensor.shape[1] != heads for group in groups for tensor in group):
            raise UnknownLayout(f"a layer does not have its {heads} heads outside of tokens")
        regions = regions_of_groups(groups, block_count, by_head=by_head)
        size = sum(region.piece_bytes for region in regions)
        if size != (self._shape.share_bytes(self._rank) or size):
            raise UnknownLayout(f"{size} bytes of a block, where its parts have another size")
        return regions

    def _lend_again(self, regions: Sequence[Region]) -> None:
        pause_s = LEND_AGAIN_S
        while not self._closing.wait(pause_s) and not self._lend(regions):
            pause_s = min(2 * pause_s, LEND_AGAIN_S_MAX)

    def _lend(self, regions: Sequence[Region]) -> bool:
        try:
            half = self._worker_half(regions)
        except (KvbmError, TimeoutError) as error:
            self._counts["lend_failures"] += 1
            log.error("KVBM passes through until the KV tensors can be lent: %r", error)
            return False
        self._half = half
        half.start()
        size = sum(region.piece_bytes for region in regions)
        log.info("%d blocks of %d bytes in %d pieces are lent", regions[0].blocks, size,
                 len(regions))  # fmt: skip
        return True

    def _worker_half(self, regions: Sequence[Region]) -> WorkerHalf:
        if self._make_gpu is not None and self._gpu is None:
            self._gpu = self._make_gpu()
        return WorkerHalf(
            engine=self._life.engine,
            incarnation=self._life.incarnation,
            namespace=self._namespace,
            group_namespaces=self._group_namespaces,
            regions=regions,
            host_tier_endpoint=self._options.settings.host_tier_endpoint,
            rank=self._rank,
            world_size=self._world_size,
            share=None if self._shape is None else self._shape.shares[self._rank],
            gpu=self._gpu,
            verify_every=self._options.verify_every,
            onboard_mover=self._options.settings.onboard_mover,
            offer_deadline_ms=self._options.settings.offer_deadline_ms,
            on_news=NEWS.set,
        )

    def counts(self) -> dict[str, int]:
        """Return all counters, of this side and of the half."""
        half = self._half
        return dict(self._counts) | (dict(half.counts) if half is not None else {})

    def start(self, plan: StepPlan) -> None:
        """Begin the loads of a step, in the thread that computes it."""
        self._sent.update(plan.sent)
        gpu = self._gpu  # Another thread may have opened it by the next look.
        if (plan.loads or plan.mark) and gpu is not None and self._compute_stream is not None:
            gpu.computes_on(self._compute_stream())
        if plan.mark:
            self._marks.lay(plan.mark, gpu, on_host=self._make_gpu is None)
        if self._half is not None:
            self._half.expect_reads(expected=plan.offering)
        for load in plan.loads:
            self._start(load)

    def _start(self, load: Load) -> None:
        if self._half is None:
            flags = (False,) * len(load.blocks)
            self._refused.append(LoadResult(load, flags, (), "no_memory_lent"))
        else:
            self._half.start_load(load)

    def _drain(self) -> None:
        results = self._half.drain_ended() if self._half is not None else []
        for half in list(self._former):
            if half.loading == 0:  # What comes below is the last of it.
                self._former.remove(half)
            results += half.drain_ended()
        refused, self._refused = self._refused, []
        self._take([*results, *refused])

    def _take(self, results: Sequence[LoadResult]) -> None:
        for result in results:
            self._ended.append(result)
            if not result.load.whole:
                self._bad_blocks.update(_bad_blocks(result))
            elif result.usable < len(result.intact):
                self._failed.add(result.load.request)
            self._arrived.add(result.load.request)

    def arrived(self) -> set[str]:
        """Return the requests whose loads have ended, well or not; each once."""
        self._drain()
        arrived, self._arrived = self._arrived, set()
        return arrived

    def sent(self) -> set[str]:
        """Return the finished requests whose blocks may be freed; each once."""
        sent, self._sent = self._sent, set()
        return sent

    def bad_blocks(self) -> set[int]:
        """Return the device blocks that were to be loaded and were not; each once."""
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def failed(self) -> set[str]:
        """Return the requests whose loads over several KV groups have failed; each once."""
        failed, self._failed = self._failed, set()
        return failed

    def report(self) -> StepReport | None:
        """Return the loads and marks that are over since the last report, for the scheduler
        half."""
        ended, self._ended = self._ended, []
        reason, self._passes_through = self._passes_through, ""
        ends = self._marks.take_ends()
        return StepReport(tuple(ended), reason, ends) if ended or reason or ends else None

    def pass_through(self, reason: str) -> None:
        """Lend nothing: every load fails. The reason goes to the scheduler half, and to people."""
        assert reason, "a worker passes through for a reason"
        log.error("KVBM passes through: %s", reason)
        self._passes_through = reason

    def park(self) -> None:
        """Take the memory back until `register` lends it again; may be said twice.

        Loads in flight end first, and those that begin meanwhile fail at once.
        """
        self.close()
        self._closing.clear()

    def close(self) -> None:
        """Take the memory back. Loads in flight are given a moment to land."""
        self._closing.set()
        if self._lender is not None:
            self._lender.join(LEND_AGAIN_S_MAX)
            self._lender = None
        half, self._half = self._half, None
        if half is not None:
            started_s = time.monotonic()
            half.close()
            self._former.append(half)
            self._drain()
            log.info("closed in %.1f s", time.monotonic() - started_s)


def _bad_blocks(result: LoadResult) -> Sequence[int]:
    """Return all blocks from the first that failed on: what is after it cannot be used without
    it."""
    return result.load.blocks[result.usable :]


def lend_layers(worker: WorkerSide, kv_caches: Mapping[str, Any], kv_cache_config: Any) -> None:
    """Lend the layers of every KV group; say why, where they cannot be lent.

    `kv_caches` has the tensor of each layer, [block, …]; `kv_cache_config` is vLLM's. A pipeline
    stage may have no layer of a group.
    """
    cut = [
        [kv_caches[name] for name in group.layer_names if name in kv_caches]
        for group in kv_cache_config.kv_cache_groups
    ]
    groups = [tensors for tensors in cut if tensors]
    layers = [tensor for group in groups for tensor in group]
    devices = {tensor.device.type for tensor in layers}
    if devices not in ({"cpu"}, {"cuda"}):
        worker.pass_through(f"KV tensors on {', '.join(sorted(devices))} are not lent")
        return
    device = layers[0].device if devices == {"cuda"} else None
    make_gpu = gpu_maker(device) if device is not None else None
    stream = partial(current_stream, device) if device is not None else None
    try:
        with unbound():
            worker.register(groups, kv_cache_config.num_blocks, make_gpu, compute_stream=stream)
    except KvbmError as error:
        worker.pass_through(f"{error} ({error.code})")
