"""The worker: lends one rank's KV pool to the host tier, and carries out promised loads.

A load is a copy out of memory that this process has mapped, done when `start_load_kv` returns, in
the engine's own thread: before the step's computation, and before the blocks can be freed.
What cannot be copied was promised all the same, so that it raises: computing on whatever is in
those blocks would be worse than a failed step. Each rank compares what it has copied with the
checksums of its parts, in the same pass or on its GPU: the promised bytes have lain in memory that
they share since the leader verified them.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

from kvbm_common.checksum import unpack_sums
from kvbm_common.config.settings import Settings
from kvbm_common.copying import COPIER, Places, clear
from kvbm_common.copying.rank_pieces import RankPieces, slot_starts
from kvbm_common.errors import KvbmError
from kvbm_common.identity import Namespace
from kvbm_common.tier.parts import share_of_rank
from kvbm_common.wire.local import Region

from kvbm_connectors.client.lending import MakeGpu
from kvbm_connectors.client.worker import WorkerHalf
from kvbm_connectors.trtllm.identity import Life
from kvbm_connectors.trtllm.promises import PromisedLoad, PromisePlan, PromiseReader

if TYPE_CHECKING:
    from kvbm_common.cuda.reading import DeviceReader, Gpu, SumsOfBlocks

log = logging.getLogger(__name__)


COPY_DEADLINE_S = 10.0
"""A step's load is some hundred milliseconds of a GPU's bus: after so long it will never end."""


class PromiseBroken(KvbmError):
    """A promised load could not be carried out: the step must not go on."""

    code = "promise_broken"


class WorkerSide:
    """One rank. Until memory has been lent, nothing is promised."""

    def __init__(
        self,
        life: Life,
        namespace: Namespace,
        settings: Settings,
        *,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._life, self._namespace, self._settings = life, namespace, settings
        self._rank, self._world_size = rank, world_size
        self._half: WorkerHalf | None = None
        self._promises: PromiseReader | None = None
        self._device: DeviceReader | None = None
        """Reads the same memory into a GPU's."""
        self._gpu: Gpu | None = None
        self._sums: SumsOfBlocks | None = None
        self._summer: ThreadPoolExecutor | None = None
        """The engine's own thread keeps its CUDA context."""
        self._pieces: RankPieces | None = None
        self._blocks = 0
        """Blocks of the engine's pool."""
        self._plan_number = 0
        self._saving: dict[int, None] = {}
        """Finished requests that the engine keeps until we call them saved."""

    def register(self, regions: Sequence[Region], make_gpu: MakeGpu | None = None) -> None:
        """Lend this memory, in place of any other. Raises KvbmError or TimeoutError.

        With `make_gpu` it is a GPU's. The promises are mapped first: the host tier, and so the
        leader, hears of a worker only when it can read what it may be promised.
        """
        self.close()
        self._gpu = gpu = make_gpu() if make_gpu is not None else None
        self._promises = PromiseReader(self._settings.shm_dir, self._life.incarnation)
        pieces = RankPieces(regions, share_of_rank(self._rank, self._world_size))
        if gpu is not None:
            self._device = _device_reader(gpu, self._promises)
            self._sums = gpu.sums(pieces)
            self._summer = ThreadPoolExecutor(1, thread_name_prefix="promise-sums")
        half = WorkerHalf(
            engine=self._life.engine,
            incarnation=self._life.incarnation,
            namespace=self._namespace,
            regions=regions,
            host_tier_endpoint=self._settings.host_tier_endpoint,
            rank=self._rank,
            world_size=self._world_size,
            gpu=gpu,
            verify_every=0,
            verify="always",  # By the leader, before it promises a block.
            offer_deadline_ms=self._settings.offer_deadline_ms,
            # The promises are read in its place. UCX ends this process where a host tier dies
            # while both connect to each other.
            reads_arena=False,
        )
        self._half, self._pieces, self._blocks = half, pieces, regions[0].blocks
        half.start()
        log.info("%d blocks of %d bytes are lent", self._blocks, pieces.bytes)

    def start(self, plan: PromisePlan, *, compute_stream: int | None = None) -> None:
        """Carry a plan out, once, after what is in the stream by now. Raises PromiseBroken."""
        if plan.number <= self._plan_number:
            return
        self._plan_number = plan.number
        if self._gpu is not None and compute_stream is not None:
            self._gpu.computes_on(compute_stream)
        if self._half is not None:
            self._half.expect_reads(expected=plan.offering)
        for load in plan.loads:
            self._copy(load, plan.slot_bytes)

    def _copy(self, load: PromisedLoad, slot_bytes: int) -> None:
        promises, pieces = self._promises, self._pieces
        if promises is None or pieces is None:
            raise PromiseBroken(f"request {load.request}: no memory was lent")
        if not all(0 <= block < self._blocks for block in load.blocks):
            raise PromiseBroken(f"request {load.request}: blocks {load.blocks} are not in the pool")
        starts = slot_starts(load.slots, arena_address=promises.address, slot_bytes=slot_bytes)
        target = pieces.fine.on_device(load.blocks)
        source = pieces.fine.in_slots(starts)
        try:
            if self._device is None:
                found = COPIER.copy(target, source, lanes=pieces.lanes)
            else:
                self._copy_to_device(self._device, load.request, target, source)
                found = self._sums_on_device(load)
            self._verify(load, found)
        except PromiseBroken:
            self._clear(target)
            raise
        self.counts["copied_blocks"] += len(load.blocks)
        self.counts["bytes.h2d"] += len(load.blocks) * pieces.bytes

    def _copy_to_device(
        self, device: DeviceReader, request: int, target: Places, source: Places
    ) -> None:
        """Wait for the copy, which begins after whatever the engine computes by now."""
        gpu = self._gpu
        assert gpu is not None
        read = device.read(target.spans, source.spans, deadline_s=COPY_DEADLINE_S)
        try:
            read.result(2 * COPY_DEADLINE_S)
        except (KvbmError, TimeoutError) as error:
            late = getattr(error, "settling", None) or read
            late.add_done_callback(lambda _: self._zero(gpu.clear, target))
            raise PromiseBroken(f"request {request}: {error!r}") from error

    def _clear(self, target: Places) -> None:
        """Zero what was refused: no byte that failed its checksum stays in device memory."""
        gpu, summer = self._gpu, self._summer
        if gpu is None or summer is None:
            self._zero(clear, target)
        else:  # Not in the engine's own thread, which may capture graphs.
            wait([summer.submit(self._zero, gpu.clear, target)], COPY_DEADLINE_S)

    def _zero(self, zero: Callable[[Places], object], target: Places) -> None:
        self.counts["cleared_blocks"] += len(target.addresses)
        try:
            zero(target)
        except KvbmError as error:  # A GPU that is lost takes the engine with it.
            log.warning("%d blocks could not be zeroed: %s", len(target.addresses), error)

    def _sums_on_device(self, load: PromisedLoad) -> list[int]:
        sums, summer = self._sums, self._summer
        assert sums is not None
        assert summer is not None
        try:
            return summer.submit(sums, load.blocks).result(COPY_DEADLINE_S)
        except (KvbmError, TimeoutError) as error:
            raise PromiseBroken(f"request {load.request}: {error!r}") from error

    def _verify(self, load: PromisedLoad, found: Sequence[int]) -> None:
        """Compare this rank's parts with their checksums, which the arena's had when promised."""
        promised = [unpack_sums(packed)[self._rank] for packed in load.checksums]
        if list(found) != promised:
            self.counts["promises_corrupt"] += 1
            raise PromiseBroken(f"request {load.request}: a block is not what was promised")

    def finished(self, finished: Iterable[int]) -> list[int]:
        """Return the requests that are finished, now or before, and whose blocks may be freed.

        The engine waits for all ranks. Rank 0 is where the leader is and asks it, so that the other
        ranks need not know, and blocks come free in a step without a plan, too: in one that has no
        room for any request until they do.
        """
        self._saving.update(dict.fromkeys(finished))
        leader = self._life.leader if self._rank == 0 else None
        saved = list(self._saving) if leader is None else leader.saved(list(self._saving))
        for request in saved:
            del self._saving[request]
        return saved

    def close(self) -> None:
        """Take the memory back."""
        half, self._half = self._half, None
        promises, self._promises = self._promises, None
        device, self._device = self._device, None
        summer, self._summer = self._summer, None
        self._gpu = self._sums = None
        if summer is not None:
            summer.shutdown()
        if half is not None:
            half.close()
        if device is not None:
            device.close()
        if promises is not None:
            promises.close()


def _device_reader(gpu: Gpu, promises: PromiseReader) -> DeviceReader:
    from kvbm_common.cuda.reading import DeviceReader  # Only where there is a GPU.

    return DeviceReader(gpu, arena_path=promises.path, arena_address=promises.address)
