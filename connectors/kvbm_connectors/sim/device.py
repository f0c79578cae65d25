"""The device: the memory of all ranks of a sim engine, and the workers that lend and fill it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvbm_common.identity import Namespace, SequenceHash
from kvbm_common.wire.local import Region

from kvbm_connectors.client.engine_options import VERIFY_EVERY
from kvbm_connectors.client.worker import WorkerHalf
from kvbm_connectors.core.messages import Load, LoadResult, merge_results
from kvbm_connectors.sim.control import EngineConfig
from kvbm_connectors.sim.pages import Content, DevicePages, HostPages, Pages

if TYPE_CHECKING:
    from kvbm_common.cuda.reading import Gpu
    from kvbm_common.cuda.runtime import Runtime


@dataclass(slots=True)
class _Pending:
    """A load and the ranks' results so far."""

    load: Load
    results: list[LoadResult] = field(default_factory=list)


class SimDevice:
    """Paged memory on every rank. A block is the parts of all ranks."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        incarnation: str,
        namespace: Namespace,
        on_news: Callable[[], None],
        runtime: Runtime | None = None,
    ) -> None:
        """Create the memory of all ranks, and their workers if there is a connector. With a
        `runtime` all ranks are on its GPU, and compute on one stream."""
        part_bytes = config.block_bytes // config.ranks
        gpu: Gpu | None = None
        self._memory: list[Pages] = []
        if runtime is None:
            self._memory += [HostPages(config.block_count, part_bytes) for _ in range(config.ranks)]
        else:
            from kvbm_common.cuda.reading import Gpu  # Only where there is a GPU.

            stream = runtime.stream(urgent=False)
            gpu = Gpu(runtime, compute_stream=stream)
            self._memory += [
                DevicePages(runtime, stream, config.block_count, part_bytes)
                for _ in range(config.ranks)
            ]
        self._content = [Content(part_bytes, rank=rank) for rank in range(config.ranks)]
        self._pending: dict[int, _Pending] = {}
        self._workers: list[WorkerHalf] = []
        if not config.connector:
            return
        for rank, memory in enumerate(self._memory):
            region = Region(
                address=memory.address,
                stride=part_bytes,
                piece_bytes=part_bytes,
                blocks=config.block_count,
            )
            self._workers.append(
                WorkerHalf(
                    engine=config.name,
                    incarnation=incarnation,
                    namespace=namespace,
                    regions=[region],
                    host_tier_endpoint=config.host_tier_endpoint,
                    rank=rank,
                    world_size=config.ranks,
                    gpu=gpu,
                    verify_every=VERIFY_EVERY[config.verify],
                    onboard_mover=config.onboard_mover,
                    offer_deadline_ms=config.offer_deadline_ms,
                    on_news=on_news,
                )
            )

    def start(self) -> None:
        """Attach the workers of all ranks."""
        for worker in self._workers:
            worker.start()

    def close(self) -> None:
        """Detach the workers of all ranks."""
        for worker in self._workers:
            worker.close()

    def compute(self, block: int, name: SequenceHash) -> None:
        """Fill a block with what a prefill leaves behind in it."""
        for memory, content in zip(self._memory, self._content, strict=True):
            memory.fill(content, block, name)

    def holds(self, block: int, name: SequenceHash) -> bool:
        """Return whether every rank's part of a block holds what the name demands."""
        parts = zip(self._memory, self._content, strict=True)
        return all(memory.holds(content, block, name) for memory, content in parts)

    def expect_reads(self, *, expected: bool) -> None:
        """Tell every rank whether anything is on offer."""
        for worker in self._workers:
            worker.expect_reads(expected=expected)

    def start_load(self, load: Load) -> None:
        """Pull a load on every rank."""
        self._pending[load.lease] = _Pending(load)
        for worker in self._workers:
            worker.start_load(load)

    def drain_ended(self) -> list[LoadResult]:
        """Return the loads that every rank has reported since the last call."""
        ended: list[LoadResult] = []
        for worker in self._workers:
            for result in worker.drain_ended():
                pending = self._pending[result.load.lease]
                pending.results.append(result)
                if len(pending.results) == len(self._workers):
                    del self._pending[result.load.lease]
                    ended.append(merge_results(pending.results))
        return ended

    def counts(self) -> dict[str, int]:
        """Return the counters of the workers, summed."""
        counts: dict[str, int] = {}
        for worker in self._workers:
            for name, count in worker.counts.items():
                counts[name] = counts.get(name, 0) + count
        return counts
