"""The puller: carries out pulls over NIXL, and sums up what has arrived."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
from kvbm_common.arena import Arena
from kvbm_common.checksum import checksums
from kvbm_common.counters import BYTES_BUCKETS, Counters
from kvbm_common.errors import KvbmError
from kvbm_common.layout import chunks_of, device_pieces, slot_pieces
from kvbm_common.nixl import Moved, MoverThread, Registration, Spans, TransferError

from kvbm_host_tier.messages import (
    ArenaInfo,
    AttachPeer,
    PeerAttached,
    PeerFailed,
    PullDone,
    PullFailed,
    PullPart,
    PullSettled,
    StartPull,
)

CHECKSUM_THREADS = 1
"""xxh3 is faster than any pull; one thread keeps up and leaves the other cores to the engines."""
CALL_DEADLINE_S = 10.0
"""Registrations and metadata take milliseconds; a machine in trouble gets some more."""

log = logging.getLogger(__name__)


class Puller:
    """One NIXL agent and its arena. Its transfers run in its thread, its checksums in another."""

    def __init__(self, shm_dir: Path, *, name: str, counters: Counters) -> None:
        self._shm_dir, self._name = shm_dir, name
        self._arena: Arena | None = None
        self._registration: Registration | None = None
        self.on_settled: Callable[[PullSettled], None] = lambda _: None
        self.mover = MoverThread(name)
        self._summer = ThreadPoolExecutor(CHECKSUM_THREADS, thread_name_prefix="checksum")
        self._seconds = counters.histogram(
            "kvbm_transfer_seconds", "How long transfers took, by path.", labels=("path",)
        )
        self._bytes = counters.histogram(
            "kvbm_transfer_bytes",
            "How large transfers were, by path.",
            labels=("path",),
            bounds=BYTES_BUCKETS,
        )

    def make_arena(self, size_bytes: int) -> ArenaInfo:
        """Make the arena, in the place of one that nobody has seen yet.

        Raises ArenaNoSpace, ArenaUnavailable, and what NIXL says when it refuses the memory.
        """
        if self._arena is not None and self._registration is not None:
            self.mover.deregister(self._registration).result(CALL_DEADLINE_S)
            self._arena.close()
            self._arena = None
        arena = Arena.create(self._shm_dir, f"{self._name}-arena", size_bytes)
        try:
            registering = self.mover.register_memory(arena.address, arena.bytes)
            self._registration = registering.result(CALL_DEADLINE_S)
        except BaseException:
            arena.close()
            raise
        self._arena = arena
        arena.populate().add_done_callback(_populated)
        agent = self.mover.metadata().result(CALL_DEADLINE_S)
        return ArenaInfo(str(arena.path), arena.address, arena.bytes, agent)

    def close(self) -> None:
        """End both threads, and the arena."""
        self._summer.shutdown(wait=True, cancel_futures=True)
        self.mover.close()
        if self._arena is not None:
            self._arena.close()

    async def attach(self, effect: AttachPeer) -> PeerAttached | PeerFailed:
        """Learn where a worker's memory is."""
        try:
            async with asyncio.timeout(CALL_DEADLINE_S):
                peer = await asyncio.wrap_future(self.mover.add_peer(effect.agent))
        except TimeoutError:
            return PeerFailed(effect.engine, effect.rank, "NIXL did not answer")
        except KvbmError as error:
            return PeerFailed(effect.engine, effect.rank, str(error))
        return PeerAttached(effect.engine, effect.rank, peer)

    def detach(self, peer: str) -> None:
        """Forget a worker's memory."""
        self.mover.remove_peer(peer)

    async def pull(self, effect: StartPull, *, slot_bytes: int) -> PullDone | PullFailed:
        """Read every rank's part into the slots, chunk by chunk, and sum up what is in."""
        chunks = chunks_of(len(effect.slots), effect.block_bytes)
        pulls = [self._pull_chunk(effect, chunk, slot_bytes) for chunk in chunks]
        outcomes = await asyncio.gather(*pulls, return_exceptions=True)
        sums: list[int] = []
        failures: list[KvbmError] = []
        for outcome in outcomes:
            if isinstance(outcome, KvbmError):
                failures.append(outcome)
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                sums += outcome
        if failures:
            settling = [
                failure.settling
                for failure in failures
                if isinstance(failure, TransferError) and not failure.settled
            ]
            self._watch(effect.pull, [future for future in settling if future is not None])
            return PullFailed(effect.pull, failures[0].code, settled=not settling)
        return PullDone(effect.pull, tuple(sums))

    async def _pull_chunk(self, effect: StartPull, chunk: slice, slot_bytes: int) -> list[int]:
        slots, blocks = effect.slots[chunk], effect.blocks[chunk]
        deadline_s = effect.deadline_ms / 1000
        reads = [self._read(part, blocks, slots, slot_bytes, deadline_s) for part in effect.parts]
        moved = await asyncio.gather(*reads)
        self._seconds.observe(max(part.seconds for part in moved), path="d2h")
        self._bytes.observe(sum(part.bytes for part in moved), path="d2h")
        return await asyncio.get_running_loop().run_in_executor(
            self._summer, self._sum, slots, effect.block_bytes, slot_bytes
        )

    def _watch(self, pull: int, settling: list[Future[None]]) -> None:
        """Say so when the last late byte of a failed pull has landed."""
        left = len(settling)
        loop = asyncio.get_running_loop()

        def settled(_: asyncio.Future[None]) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                self.on_settled(PullSettled(pull))

        for future in settling:
            asyncio.wrap_future(future, loop=loop).add_done_callback(settled)

    def _read(
        self,
        part: PullPart,
        blocks: Sequence[int],
        slots: Sequence[int],
        slot_bytes: int,
        deadline_s: float,
    ) -> asyncio.Future[Moved]:
        source = device_pieces(part.regions, blocks)
        target = slot_pieces(
            part.regions,
            slots,
            arena_address=self._live.address,
            slot_bytes=slot_bytes,
            part_offset=part.slot_offset,
        )
        future = self.mover.read(
            part.peer, Spans.of_pieces(target), Spans.of_pieces(source), deadline_s=deadline_s
        )
        return asyncio.wrap_future(future)

    @property
    def _live(self) -> Arena:
        assert self._arena is not None, "a pull has slots, and those are of an arena"
        return self._arena

    def _sum(self, slots: Sequence[int], block_bytes: int, slot_bytes: int) -> list[int]:
        offsets = np.asarray(slots, dtype=np.uint64) * np.uint64(slot_bytes)
        return checksums(self._live.array, offsets, block_bytes)


def _populated(done: Future[None]) -> None:
    error = done.exception()
    if error is not None:
        log.error("the arena's memory cannot be taken in full: %s", error)
