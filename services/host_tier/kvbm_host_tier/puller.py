"""The puller: carries out pulls over NIXL, and sums up what has arrived."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from kvbm_common.arena import Arena
from kvbm_common.checksum import checksums
from kvbm_common.counters import Counters, TransferFigures
from kvbm_common.cuda.lending import DeviceMemory, unwrap
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

if TYPE_CHECKING:
    from kvbm_common.cuda.pulling import DevicePuller

CHECKSUM_THREADS = 1
"""xxh3 is faster than any pull; one thread keeps up and leaves the other cores to the engines."""
CALL_DEADLINE_S = 10.0
"""Registrations and metadata take milliseconds; a machine in trouble gets some more."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Pulling:
    """A pull on its way. Only the checksum thread changes it."""

    effect: StartPull
    slot_bytes: int
    parts_left: list[int]
    """Reads that have not ended, by chunk."""
    sums: dict[int, int] = field(default_factory=dict)
    moved: list[tuple[float, int]] = field(default_factory=list)
    """Seconds and bytes of each read."""
    failures: list[BaseException] = field(default_factory=list)
    ended: Future[None] = field(default_factory=Future)


class Puller:
    """One NIXL agent and its arena. Its transfers run in its thread, its checksums in another."""

    def __init__(self, shm_dir: Path, *, name: str, counters: Counters) -> None:
        self._shm_dir, self._name = shm_dir, name
        self._arena: Arena | None = None
        self._registration: Registration | None = None
        self._device_puller: DevicePuller | None = None
        self._opening = threading.Lock()
        self._on_gpu: dict[str, int] = {}
        """Peers whose memory is their GPU's, and is not open here: NIXL reads it."""
        self.on_settled: Callable[[PullSettled], None] = lambda _: None
        self.mover = MoverThread(name)
        self._summer = ThreadPoolExecutor(CHECKSUM_THREADS, thread_name_prefix="checksum")
        self._figures = TransferFigures(counters)

    def make_arena(self, size_bytes: int) -> ArenaInfo:
        """Make the arena, in the place of one that nobody has seen yet.

        Raises ArenaNoSpace, ArenaUnavailable, and what NIXL says when it refuses the memory.
        """
        if self._arena is not None and self._registration is not None:
            self.mover.deregister(self._registration).result(CALL_DEADLINE_S)
            self._close_devices()
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
        self.mover.close()  # Ends every read, so that nothing is submitted after it.
        self._close_devices()
        self._summer.shutdown(wait=True)
        if self._arena is not None:
            self._arena.close()

    async def attach(self, effect: AttachPeer) -> PeerAttached | PeerFailed:
        """Learn where a worker's memory is."""
        try:
            agent, memory = unwrap(effect.agent)
            async with asyncio.timeout(CALL_DEADLINE_S):
                peer = await asyncio.wrap_future(self.mover.add_peer(agent))
        except TimeoutError:
            return PeerFailed(effect.engine, effect.rank, "NIXL did not answer")
        except KvbmError as error:
            return PeerFailed(effect.engine, effect.rank, str(error))
        if memory is not None:
            await asyncio.to_thread(self._open, peer, memory)
        return PeerAttached(effect.engine, effect.rank, peer)

    def _open(self, peer: str, memory: DeviceMemory) -> None:
        """A worker's memory is on a GPU: by CUDA, or, where that cannot be, by NIXL."""
        from kvbm_common.cuda.pulling import DevicePuller  # Only where there is a GPU.

        with self._opening:  # Several ranks come at once.
            if self._device_puller is None:
                self._device_puller = DevicePuller(self._live.address, self._live.bytes)
        try:
            self._device_puller.attach(peer, memory)
        except KvbmError as error:
            self._on_gpu[peer] = memory.device
            log.warning("%s cannot be read by CUDA, using NIXL: %s", peer, error)

    def _close_devices(self) -> None:
        if self._device_puller is not None:
            self._device_puller.close()
            self._device_puller = None

    def detach(self, peer: str) -> None:
        """Forget a worker's memory."""
        if self._device_puller is not None:
            self._device_puller.detach(peer)
        self._on_gpu.pop(peer, None)
        self.mover.remove_peer(peer)

    async def pull(self, effect: StartPull, *, slot_bytes: int) -> PullDone | PullFailed:
        """Read every rank's part into the slots, chunk by chunk, and sum up what is in.

        A chunk is summed up while it is in the cache and the next one flies. Returns when every
        read has ended, so that no byte is on its way that nobody watches.
        """
        chunks = chunks_of(len(effect.slots), effect.block_bytes)
        pulling = _Pulling(effect, slot_bytes, [len(effect.parts)] * len(chunks))
        for number, chunk in enumerate(chunks):
            for part in effect.parts:
                read = self._read(effect, part, chunk, slot_bytes)
                read.add_done_callback(partial(self._hand_over, pulling, number, chunk))
        await asyncio.wrap_future(pulling.ended)
        for seconds, size in pulling.moved:
            self._figures.observe("d2h", seconds, size)
        if pulling.failures:
            return self._failed(effect.pull, pulling.failures)
        return PullDone(effect.pull, tuple(pulling.sums[slot] for slot in effect.slots))

    def _hand_over(self, pulling: _Pulling, number: int, chunk: slice, read: Future[Moved]) -> None:
        """Out of the mover's thread: other transfers would wait for these checksums."""
        self._summer.submit(self._part_ended, pulling, number, chunk, read)

    def _part_ended(
        self, pulling: _Pulling, number: int, chunk: slice, read: Future[Moved]
    ) -> None:
        """In the one checksum thread, so that a pull's parts end one after the other."""
        error = read.exception()
        if error is None:
            pulling.moved.append((read.result().seconds, read.result().bytes))
        else:
            pulling.failures.append(error)
        pulling.parts_left[number] -= 1
        try:
            if not pulling.parts_left[number] and not pulling.failures:
                slots = pulling.effect.slots[chunk]
                sums = self._sum(slots, pulling.effect.block_bytes, pulling.slot_bytes)
                pulling.sums.update(zip(slots, sums, strict=True))
        except Exception as mistake:
            pulling.failures.append(mistake)
        if not any(pulling.parts_left):
            pulling.ended.set_result(None)

    def _failed(self, pull: int, failures: Sequence[BaseException]) -> PullFailed:
        for failure in failures:
            if not isinstance(failure, KvbmError):
                raise failure
        settling = [
            failure.settling
            for failure in failures
            if isinstance(failure, TransferError)
            and failure.settling is not None
            and not failure.settled
        ]
        self._watch(pull, settling)
        reason = failures[0].code if isinstance(failures[0], KvbmError) else "mistake"
        return PullFailed(pull, reason, settled=not settling)

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
        self, effect: StartPull, part: PullPart, chunk: slice, slot_bytes: int
    ) -> Future[Moved]:
        target = slot_pieces(
            part.regions,
            effect.slots[chunk],
            arena_address=self._live.address,
            slot_bytes=slot_bytes,
            part_offset=part.slot_offset,
        )
        source = Spans.of_pieces(device_pieces(part.regions, effect.blocks[chunk]))
        deadline_s = effect.deadline_ms / 1000
        puller = self._device_puller
        if puller is not None and puller.knows(part.peer):
            return puller.read(part.peer, Spans.of_pieces(target), source, deadline_s=deadline_s)
        if part.peer in self._on_gpu:
            source = source.on_device(self._on_gpu[part.peer])
        return self.mover.read(part.peer, Spans.of_pieces(target), source, deadline_s=deadline_s)

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
