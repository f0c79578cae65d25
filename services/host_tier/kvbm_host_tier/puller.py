"""The puller: carries out pulls over NIXL, and sums up what has arrived."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from kvbm_common.arena import Arena
from kvbm_common.checksum import checksums
from kvbm_common.counters import BYTES_BUCKETS, Counters
from kvbm_common.errors import KvbmError
from kvbm_common.layout import chunks_of, device_pieces, slot_pieces
from kvbm_common.nixl import Moved, MoverThread, Spans, TransferError

from kvbm_host_tier.messages import (
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


class Puller:
    """One NIXL agent over one arena. Its transfers run in its thread, its checksums in another."""

    def __init__(self, arena: Arena, *, name: str, counters: Counters) -> None:
        self.arena = arena
        self.on_settled: Callable[[PullSettled], None] = lambda _: None
        self.mover = MoverThread(name)
        self.mover.register_memory(arena.address, arena.bytes).result(CALL_DEADLINE_S)
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

    def metadata(self) -> bytes:
        """What others need to read the arena."""
        return self.mover.metadata().result(CALL_DEADLINE_S)

    def close(self) -> None:
        """End both threads."""
        self._summer.shutdown(wait=True, cancel_futures=True)
        self.mover.close()

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
            arena_address=self.arena.address,
            slot_bytes=slot_bytes,
            part_offset=part.slot_offset,
        )
        future = self.mover.read(
            part.peer, Spans.of_pieces(target), Spans.of_pieces(source), deadline_s=deadline_s
        )
        return asyncio.wrap_future(future)

    def _sum(self, slots: Sequence[int], block_bytes: int, slot_bytes: int) -> list[int]:
        offsets = np.asarray(slots, dtype=np.uint64) * np.uint64(slot_bytes)
        return checksums(self.arena.array, offsets, block_bytes)
