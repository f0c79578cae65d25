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
from concurrent.futures import Future

import numpy as np
from kvbm_common.checksum import block_checksum, parts_checksum
from kvbm_common.errors import KvbmError
from kvbm_common.identity import Namespace
from kvbm_common.layout import device_pieces, part_bytes, slot_pieces
from kvbm_common.nixl import Moved, MoverThread, Spans
from kvbm_common.wire.local import (
    Beat,
    FromHostTier,
    Hello,
    Region,
    Welcome,
    from_host_tier,
    to_host_tier,
)

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
        self._verify_next = 0
        self._on_news = on_news
        self._mover = MoverThread(f"{engine}-{incarnation}-{rank}")
        for region in regions:
            length = region.stride * region.blocks
            self._mover.register_memory(region.address, length).result(CALL_DEADLINE_S)
        self._welcome: Welcome | None = None
        self._peer = ""
        self._lock = threading.Lock()
        self._ended: deque[LoadResult] = deque()
        self._loading = 0
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
        """End both threads; loads in flight fail."""
        self._thread.close()
        self._mover.close()

    @property
    def loading(self) -> int:
        """Loads in flight."""
        return self._loading

    def start_load(self, load: Load) -> None:
        """Pull the blocks of a load. Its result comes once, by `drain_ended`, whatever happens."""
        with self._lock:
            welcome, peer = self._welcome, self._peer
            self._loading += 1
        left_s = (load.deadline_ms - _now_ms()) / 1000
        if welcome is None or welcome.epoch != load.epoch:
            self._end(_failed(load, "arena_changed"))
        elif left_s <= 0:
            self._end(_failed(load, "lease_ended"))
        else:
            self._pull(load, welcome, peer, left_s)

    def _pull(self, load: Load, welcome: Welcome, peer: str, left_s: float) -> None:
        target = device_pieces(self._regions, load.blocks)
        source = slot_pieces(
            self._regions,
            load.slots,
            arena_address=welcome.arena_address,
            slot_bytes=welcome.slot_bytes,
            part_offset=self._part_offset,
        )
        try:
            future = self._mover.read(
                peer, Spans.of_pieces(target), Spans.of_pieces(source), deadline_s=left_s
            )
        except KvbmError as error:
            self._end(_failed(load, error.code))
            return
        future.add_done_callback(lambda done: self._pulled(load, done))

    def _pulled(self, load: Load, future: Future[Moved]) -> None:
        error = future.exception()
        if error is not None:
            reason = error.code if isinstance(error, KvbmError) else type(error).__name__
            self._end(_failed(load, reason))
            return
        corrupt = self._corrupt(load)
        if _now_ms() >= load.deadline_ms:
            self._end(_failed(load, "lease_ended"))
            return
        intact = tuple(index not in corrupt for index in range(len(load.blocks)))
        self.counts["bytes.h2d"] += len(load.blocks) * load.block_bytes
        reason = "corrupt" if corrupt else ""
        self._end(LoadResult(load, intact, tuple(sorted(corrupt)), reason))

    def _corrupt(self, load: Load) -> set[int]:
        """Indices of blocks whose bytes are not those that were stored."""
        if self._read_block is None:
            return set()
        self._verify_next -= 1
        if self._verify_next >= 0:
            return set()
        self._verify_next += self._verify_every
        read = self._read_block
        found = [_checksum(read(block)) for block in load.blocks]
        self.counts["verified_blocks"] += len(found)
        pairs = zip(found, load.checksums, strict=True)
        return {index for index, (ours, theirs) in enumerate(pairs) if ours != theirs}

    def _end(self, result: LoadResult) -> None:
        if result.reason:
            self.counts[f"loads_failed.{result.reason}"] += 1
            log.warning("load of %s failed: %s", result.load.request, result.reason)
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
        with self._lock:
            previous, self._peer, self._welcome = self._peer, peer, message
        if previous:
            self._mover.remove_peer(previous)


def _checksum(parts: memoryview | np.ndarray | Sequence[np.ndarray]) -> int:
    return block_checksum(parts) if hasattr(parts, "nbytes") else parts_checksum(parts)


def _failed(load: Load, reason: str) -> LoadResult:
    return LoadResult(load, (False,) * len(load.blocks), (), reason)


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000
