"""The worker half: one rank's device memory, lent to the host tier, filled from the arena.

Offload needs nothing from a worker but its registered memory: the host tier pulls. Onboard is a
pull by the worker, since it owns the destination. What it has pulled it verifies, and a pull that
ends after its lease has failed, however good the bytes look.
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

from kvbm_connectors.arena_reader import ArenaReader, fastest, readers_of
from kvbm_connectors.link import Link, LinkThread
from kvbm_connectors.messages import Load, LoadResult

CALL_DEADLINE_S = 10.0
"""Registrations and metadata take milliseconds; a machine in trouble gets some more."""

log = logging.getLogger(__name__)

ReadBlock = Callable[[int], "memoryview | np.ndarray | Sequence[np.ndarray]"]
"""Gives the bytes of a device block of this rank, for verification: one contiguous buffer, or one
for each region, in their order."""
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
        verify_every: int = 1,
        onboard_mover: str = "auto",
        on_news: Callable[[], None] = lambda: None,
    ) -> None:
        """`read_block` turns verification on, for one load in `verify_every`; it needs a block
        whole, so `world_size` 1."""
        assert read_block is None or world_size == 1
        assert verify_every > 0
        self.counts: Counter[str] = Counter()
        self._regions = tuple(regions)
        self._part_offset = rank * part_bytes(regions)
        self._read_block = read_block
        self._verify_every = verify_every
        self._onboard_mover = onboard_mover
        self._verify_next = 0
        self._on_news = on_news
        self._limiter = OncePerKind(log)
        self._mover = MoverThread(f"{engine}-{incarnation}-{rank}")
        for region in regions:
            # Not beyond the last piece: regions may be interleaved up to the end of a storage.
            length = region.stride * (region.blocks - 1) + region.piece_bytes
            self._mover.register_memory(region.address, length).result(CALL_DEADLINE_S)
        self._verifier = ThreadPoolExecutor(1, thread_name_prefix=f"verify-{engine}-{rank}")
        self._welcome: Welcome | None = None
        self._reader: ArenaReader | None = None
        self._readers: list[ArenaReader] = []
        self._lock = threading.Lock()
        self._ended: deque[LoadResult] = deque()
        self._loading = 0
        self._closed = False
        hello = Hello(
            engine=engine,
            incarnation=incarnation,
            role="worker",
            namespace=namespace,
            rank=rank,
            world_size=world_size,
            agent=self._mover.metadata().result(CALL_DEADLINE_S),
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
        )
        self._thread = LinkThread([self._link], name=f"kvbm-{engine}-worker-{rank}")

    def start(self) -> None:
        """Begin to attach."""
        self._thread.start()

    def close(self) -> None:
        """End both threads; loads in flight end first, or fail."""
        with self._lock:
            self._closed = True
        self._thread.close()
        for reader in self._readers:
            reader.close()
        self._mover.close()  # Ends every load's future, so that nothing is submitted after it.
        self._verifier.shutdown(wait=True)

    @property
    def loading(self) -> int:
        """Loads in flight."""
        return self._loading

    def start_load(self, load: Load) -> None:
        """Pull the blocks of a load. Its result comes once, by `drain_ended`, whatever happens."""
        with self._lock:
            welcome, reader = self._welcome, self._reader
            is_closed = self._closed
            self._loading += 1
        left_s = (load.deadline_ms - _now_ms()) / 1000
        if is_closed:
            self._end(_failed(load, "closed"))
        elif welcome is None or reader is None or welcome.epoch != load.epoch:
            self._end(_failed(load, "arena_changed"))
        elif left_s <= 0:
            self._end(_failed(load, "lease_ended"))
        else:
            self._pull(load, welcome, reader, left_s)

    def _pull(self, load: Load, welcome: Welcome, reader: ArenaReader, left_s: float) -> None:
        """Read chunk by chunk: each is verified while it is in the cache and the next one flies."""
        chunks = chunks_of(len(load.blocks), load.block_bytes)
        pulling = _Pulling(load, [False] * len(load.blocks), chunks_left=len(chunks))
        for chunk in chunks:
            target = device_pieces(self._regions, load.blocks[chunk])
            source = slot_pieces(
                self._regions,
                load.slots[chunk],
                arena_address=welcome.arena_address,
                slot_bytes=welcome.slot_bytes,
                part_offset=self._part_offset,
            )
            future = reader.read(
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
        if self._read_block is None or self._verify_next:
            return set()
        read = self._read_block
        found = [_checksum(read(block)) for block in load.blocks[chunk]]
        self.counts["verified_blocks"] += len(found)
        pairs = zip(found, load.checksums[chunk], strict=True)
        return {chunk.start + index for index, (ours, theirs) in enumerate(pairs) if ours != theirs}

    def _end(self, result: LoadResult) -> None:
        if result.reason:
            self.counts[f"loads_failed.{result.reason}"] += 1
            self._limiter.warning(result.reason, f"load of {result.load.request} failed")
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

    def _from_host_tier(self, message: FromHostTier) -> None:
        if not isinstance(message, Welcome):
            return
        known = self._welcome
        if known is not None and known.epoch == message.epoch:
            return
        try:
            peer = self._mover.add_peer(message.agent).result(CALL_DEADLINE_S)
        except (KvbmError, TimeoutError) as error:
            log.error("the host tier's memory cannot be reached: %s", error)
            return
        readers = readers_of(message, self._mover, peer, wanted=self._onboard_mover)
        with self._lock:
            previous, self._readers = self._readers, readers
            self._reader, self._welcome = readers[0], message
        for reader in previous:
            reader.close()
        if len(readers) > 1:
            self._verifier.submit(self._choose, readers, message)

    def _choose(self, readers: list[ArenaReader], welcome: Welcome) -> None:
        chosen = fastest(readers, self._mover, welcome)
        with self._lock:
            if self._welcome is welcome:
                self._reader = chosen


def _checksum(parts: memoryview | np.ndarray | Sequence[np.ndarray]) -> int:
    if isinstance(parts, memoryview | np.ndarray):
        return block_checksum(parts)
    return parts_checksum(parts)


def _failed(load: Load, reason: str) -> LoadResult:
    return LoadResult(load, (False,) * len(load.blocks), (), reason)


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000
