"""The worker half: one rank's device memory, lent to the host tier, filled from the arena.

Offload needs nothing from a worker but its registered memory: the host tier pulls. Onboard is a
pull by the worker, since it owns the destination. What it has pulled it verifies, and a pull that
ends after its lease has failed, however good the bytes look.

A load names the life of the host tier that it is from. The scheduler half may have been welcomed by
that life before this worker: such a load is parked until the worker has its arena too.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from kvbm_common.checksum import block_checksum, parts_checksum
from kvbm_common.errors import KvbmError
from kvbm_common.identity import Namespace
from kvbm_common.layout import chunks_of, device_pieces, part_bytes, slot_pieces
from kvbm_common.logs import OncePerKind
from kvbm_common.nixl import Moved, MoverThread, Spans, TransferError
from kvbm_common.wire.local import (
    Beat,
    FromHostTier,
    Hello,
    Region,
    Welcome,
    from_host_tier,
    to_host_tier,
)

from kvbm_connectors.arena_access import CALL_DEADLINE_S, Access, ArenaAccess, Attached
from kvbm_connectors.link import Link, LinkThread
from kvbm_connectors.messages import Load, LoadResult

if TYPE_CHECKING:
    from kvbm_common.cuda.reading import Gpu

log = logging.getLogger(__name__)

ReadBlock = Callable[[int], "memoryview | np.ndarray | Sequence[np.ndarray]"]
"""Gives the bytes of a device block of this rank, for verification: one contiguous buffer, or one
for each region, in their order."""
SumBlocks = Callable[[Sequence[int]], list[int]]
"""Gives the checksums of device blocks of this rank."""
VERIFY_SAMPLE = 16
"""`sampled` verifies one load in so many: a wrong arena is noticed soon, at 6 % of the price."""


@dataclass(slots=True)
class _Pulling:
    """A load on its way; only the verifier's thread writes to it."""

    load: Load
    intact: list[bool]
    chunks_left: int
    corrupt: set[int] = field(default_factory=set)
    reason: str = ""
    seconds: float = 0.0


class WorkerHalf:
    """One rank of one engine. Owns a NIXL agent and a link, each in its own thread."""

    def __init__(
        self,
        *,
        engine: str,
        incarnation: str,
        namespace: Namespace,
        regions: Sequence[Region],
        host_tier_endpoint: str,
        rank: int = 0,
        world_size: int = 1,
        read_block: ReadBlock | None = None,
        sum_blocks: SumBlocks | None = None,
        verify_every: int = 1,
        onboard_mover: str = "auto",
        on_news: Callable[[], None] = lambda: None,
        gpu: Gpu | None = None,
    ) -> None:
        """`read_block` or `sum_blocks` turns verification on, for one load in `verify_every`; it
        needs a block whole, so `world_size` 1. With a `gpu` the regions are in its memory, which
        nobody here may touch: `sum_blocks`, then. Raises KvbmError or TimeoutError when the memory
        cannot be lent.
        """
        if read_block is not None:
            assert gpu is None
            assert sum_blocks is None
            sum_blocks = partial(_sums, read_block)
        assert sum_blocks is None or world_size == 1
        assert verify_every > 0
        self.counts: Counter[str] = Counter()
        self._regions = tuple(regions)
        self._part_offset = rank * part_bytes(regions)
        self._sum_blocks = sum_blocks
        self._gpu = gpu
        self._verify_every = verify_every
        self._verify_next = 0
        self._on_news = on_news
        self._limiter = OncePerKind(log)
        self._mover = MoverThread(f"{engine}-{incarnation}-{rank}")
        try:
            agent = self._lend(regions)
        except BaseException:
            self._mover.close()
            raise
        self._verifier = ThreadPoolExecutor(1, thread_name_prefix=f"verify-{engine}-{rank}")
        self._arena = ArenaAccess(
            self._mover,
            wanted=onboard_mover,
            name=f"{engine}-{rank}",
            counts=self.counts,
            on_change=self._look_at_parked,
            gpu=gpu,
        )
        self._lock = threading.Lock()
        self._ended: deque[LoadResult] = deque()
        self._parked: list[Load] = []
        self._given_up = 0
        """The life whose arena some load has awaited in vain: no other one waits for it."""
        self._loading = 0
        self._expects_reads = True
        self._closed = False
        hello = Hello(
            engine=engine,
            incarnation=incarnation,
            role="worker",
            namespace=namespace,
            rank=rank,
            world_size=world_size,
            agent=agent,
            regions=list(regions),
        )
        self._link = Link(
            f"{engine}: worker {rank}",
            host_tier_endpoint,
            to_host_tier,
            from_host_tier,
            lambda: hello,
            Beat(engine=engine, incarnation=incarnation),
            self._from_host_tier,
            on_moved=self._host_moved,
            may_leave=lambda: self._loading == 0,
        )
        self._thread = LinkThread(
            [self._link], name=f"kvbm-{engine}-worker-{rank}", on_tick=self._tick
        )

    def _lend(self, regions: Sequence[Region]) -> bytes:
        """Register the device memory; returns what others need to read it."""
        if self._gpu is not None:
            from kvbm_common.cuda.lending import wrap  # Only where there is a GPU.

            return wrap(self._register_vram(regions), self._gpu.export(regions))
        for region in regions:
            registering = self._mover.register_memory(region.address, _reach(region))
            registering.result(CALL_DEADLINE_S)
        return self._mover.metadata().result(CALL_DEADLINE_S)

    def _register_vram(self, regions: Sequence[Region]) -> bytes:
        """NIXL's metadata. Where it does not take the memory it is that from before: nobody can
        read the metadata of an agent that has failed to register something."""
        assert self._gpu is not None
        device = self._gpu.runtime.device
        before = self._mover.metadata().result(CALL_DEADLINE_S)
        try:
            for region in regions:
                self._mover.register_memory(
                    region.address, _reach(region), kind="VRAM", device=device
                ).result(CALL_DEADLINE_S)
        except TransferError as error:  # A host tier that shares the GPU needs CUDA IPC alone.
            self._limiter.warning("vram", f"NIXL does not take the GPU's memory: {error}")
            return before
        return self._mover.metadata().result(CALL_DEADLINE_S)

    def start(self) -> None:
        """Begin to attach."""
        self._thread.start()

    def close(self) -> None:
        """End both threads; loads in flight end first, or fail."""
        with self._lock:
            self._closed = True
            parked, self._parked = self._parked, []
        for load in parked:
            self._end(_failed(load, "closed"))
        self._thread.close()
        self._arena.close()
        self._mover.close()  # Ends every load's future, so that nothing is submitted after it.
        self._arena.wait_closed()
        self._verifier.shutdown(wait=True)

    @property
    def loading(self) -> int:
        """Loads in flight."""
        return self._loading

    @property
    def epoch(self) -> int:
        """The life of the host tier whose arena is read now; 0 for none."""
        attached = self._arena.attached()
        return 0 if attached is None else attached.welcome.epoch

    def expect_reads(self, *, expected: bool) -> None:
        """Is anything on offer? If not, no mover needs to stand ready for the host tier."""
        if expected != self._expects_reads:
            self._expects_reads = expected
            self._mover.attend(expected=expected)

    def start_load(self, load: Load) -> None:
        """Pull the blocks of a load. Its result comes once, by `drain_ended`, whatever happens."""
        with self._lock:
            self._loading += 1
        self._begin(load)

    def _begin(self, load: Load) -> None:
        """Pull, park, or say why neither."""
        now_ms = _now_ms()
        with self._lock:
            is_closed = self._closed
            access = self._arena.access(load.epoch)
            is_coming = access is Access.COMING and load.epoch != self._given_up
            if is_coming and now_ms < load.deadline_ms and not is_closed:
                self._parked.append(load)
                return
            if access is Access.COMING:
                self._given_up = load.epoch
        attached = self._arena.attached()
        if is_closed:
            self._end(_failed(load, "closed"))
        elif access is Access.GONE:
            self._end(_failed(load, "arena_changed"))
        elif access is not Access.READY or attached is None:
            self._end(_failed(load, "no_arena"))
        elif now_ms >= load.deadline_ms:
            self._end(_failed(load, "lease_ended"))
        else:
            self._pull(load, attached, (load.deadline_ms - now_ms) / 1000)

    def _look_at_parked(self) -> None:
        """Something may have changed for the loads that wait for their arena."""
        with self._lock:
            parked, self._parked = self._parked, []
        for load in parked:
            self._begin(load)

    def _tick(self, now_ms: int) -> None:
        self._arena.tick(now_ms)
        self._look_at_parked()

    def _pull(self, load: Load, attached: Attached, left_s: float) -> None:
        """Read chunk by chunk: each is verified while it is in the cache and the next one flies."""
        chunks = chunks_of(len(load.blocks), load.block_bytes)
        pulling = _Pulling(load, [False] * len(load.blocks), chunks_left=len(chunks))
        for chunk in chunks:
            target = device_pieces(self._regions, load.blocks[chunk])
            source = slot_pieces(
                self._regions,
                load.slots[chunk],
                arena_address=attached.welcome.arena_address,
                slot_bytes=attached.welcome.slot_bytes,
                part_offset=self._part_offset,
            )
            future = attached.reader.read(
                Spans.of_pieces(target), Spans.of_pieces(source), deadline_s=left_s
            )
            future.add_done_callback(partial(self._hand_over, pulling, chunk))

    def _hand_over(self, pulling: _Pulling, chunk: slice, future: Future[Moved]) -> None:
        """Out of the mover's thread: other transfers would wait for these checksums.

        A read that may still write into our blocks has not ended: it is handed over when it has.
        """
        error = future.exception()
        if isinstance(error, TransferError) and error.settling is not None:
            error.settling.add_done_callback(
                lambda _: self._verifier.submit(self._chunk_ended, pulling, chunk, future)
            )
        else:
            self._verifier.submit(self._chunk_ended, pulling, chunk, future)

    def _chunk_ended(self, pulling: _Pulling, chunk: slice, future: Future[Moved]) -> None:
        """In the verifier's one thread, so that a load's chunks end one after the other."""
        try:
            self._take_chunk(pulling, chunk, future.result())
        except KvbmError as error:
            pulling.reason = error.code
        except Exception as error:  # The engine waits for the end of this load, whatever it is.
            log.exception("load of %s: a chunk could not be taken", pulling.load.request)
            pulling.reason = type(error).__name__
        pulling.chunks_left -= 1
        if pulling.chunks_left == 0:
            self._end(self._result(pulling))

    def _take_chunk(self, pulling: _Pulling, chunk: slice, moved: Moved) -> None:
        pulling.seconds += moved.seconds
        corrupt = self._corrupt(pulling.load, chunk)
        pulling.corrupt |= corrupt
        for index in range(chunk.start, chunk.stop):
            pulling.intact[index] = index not in corrupt

    def _result(self, pulling: _Pulling) -> LoadResult:
        load = pulling.load
        self._verify_next = (self._verify_next + 1) % self._verify_every
        if _now_ms() >= load.deadline_ms:
            return _failed(load, "lease_ended")
        self.counts["bytes.h2d"] += sum(pulling.intact) * load.block_bytes
        reason = pulling.reason or ("corrupt" if pulling.corrupt else "")
        corrupt = tuple(sorted(pulling.corrupt))
        return LoadResult(load, tuple(pulling.intact), corrupt, reason, pulling.seconds)

    def _corrupt(self, load: Load, chunk: slice) -> set[int]:
        """Indices of blocks whose bytes are not those that were stored."""
        if self._sum_blocks is None or self._verify_next:
            return set()
        found = self._sum_blocks(load.blocks[chunk])
        self.counts["verified_blocks"] += len(found)
        pairs = zip(found, load.checksums[chunk], strict=True)
        return {chunk.start + index for index, (ours, theirs) in enumerate(pairs) if ours != theirs}

    def _end(self, result: LoadResult) -> None:
        if result.reason:
            self.counts[f"loads_failed.{result.reason}"] += 1
            self._limiter.warning(
                result.reason, f"load of {result.load.request} failed", request=result.load.request
            )
        with self._lock:
            self._ended.append(result)
            self._loading -= 1
        self._on_news()

    def drain_ended(self) -> list[LoadResult]:
        """The loads that have ended since the last call."""
        ended: list[LoadResult] = []
        while self._ended:
            ended.append(self._ended.popleft())
        return ended

    def _host_moved(self, _moved: object) -> None:
        self._arena.leaving()

    def _from_host_tier(self, message: FromHostTier) -> None:
        if isinstance(message, Welcome):
            self._arena.welcomed(message)


def _reach(region: Region) -> int:
    """Not beyond the last piece: regions may be interleaved up to the end of a storage."""
    return region.stride * (region.blocks - 1) + region.piece_bytes


def _sums(read: ReadBlock, blocks: Sequence[int]) -> list[int]:
    return [_checksum(read(block)) for block in blocks]


def _checksum(parts: memoryview | np.ndarray | Sequence[np.ndarray]) -> int:
    if isinstance(parts, memoryview | np.ndarray):
        return block_checksum(parts)
    return parts_checksum(parts)


def _failed(load: Load, reason: str) -> LoadResult:
    return LoadResult(load, (False,) * len(load.blocks), (), reason)


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000
