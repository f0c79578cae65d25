"""The puller: carries out pulls over NIXL, and computes the checksums of the blocks that come.

A pull is as fast as the kernel copies from one process to another, and a thread makes one copy at a
time. So two movers, each an agent in a thread of its own, share the chunks where there is a second
processor. Each computes a chunk's checksums while the bytes are still in its core's cache.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from kvbm_common.copying import COPIER, thread_count
from kvbm_common.copying.rank_pieces import BlockCopy, RankPieces, slot_starts
from kvbm_common.cuda.lending import DeviceMemory, unwrap
from kvbm_common.errors import KvbmError
from kvbm_common.memory.arena import Arena
from kvbm_common.nixl.layout import chunks_of
from kvbm_common.nixl.mover_thread import MoverThread, TransferError, Transferred
from kvbm_common.nixl.pump import QUIET_POLL_S
from kvbm_common.nixl.spans import Registration
from kvbm_common.runtime.metrics import Metrics, TransferFigures
from kvbm_common.tier.layout import UNIT_BYTES
from numpy.typing import NDArray

from kvbm_host_tier.core.messages import (
    NO_ARENA,
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

BLOCKS_SETTING = "DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS"
MOVERS_MAX = 2
"""Movers that pull at the same time, if there are processors for them."""
PULL_CHUNK_BYTES = 16 * 1024 * 1024
"""One transfer of one mover, which its last cache holds. Smaller ones cost more than they save: a
pull of 64 MiB took 44, 37, 35 and 33 ms of processor time with chunks of 2, 4, 8 and 16 MiB."""
CALL_DEADLINE_S = 10.0
"""Deadline of registrations and metadata, which take milliseconds on a healthy machine."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Pulling:
    """A pull under way; its reads end in several threads."""

    effect: StartPull
    reads_left: int
    sums: NDArray[np.uint64]
    """Checksums by slot and part of the block."""
    moved: list[tuple[float, int]] = field(default_factory=list)
    """Seconds and bytes of each read."""
    failures: list[BaseException] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    ended: Future[None] = field(default_factory=Future)


class Puller:
    """The arena, and the movers that pull into it. The first one is the agent that peers read from;
    the others are never read from."""

    def __init__(self, shm_dir: Path, *, name: str, counters: Metrics) -> None:
        self._shm_dir, self._name = shm_dir, name
        self._arena: Arena | None = None
        self.info = NO_ARENA
        """The present arena, as the core knows it."""
        self._registrations: list[Registration] = []
        self._device_puller: DevicePuller | None = None
        self._opening = threading.Lock()
        self._making = threading.Lock()
        self._stop = threading.Event()
        self._on_gpu: dict[str, int] = {}
        """Peer whose GPU memory cannot be opened here, so that NIXL reads it → its device."""
        self.on_settled: Callable[[PullSettled], None] = lambda _: None
        names = [name, *(f"{name}-{i + 2}" for i in range(min(MOVERS_MAX, thread_count()) - 1))]
        self.movers = [MoverThread(one) for one in names]
        self.mover = self.movers[0]
        for mover in self.movers:
            mover.attend(0)
            mover.look_out(None)
        self._attends_until = 0.0
        self._unread = [0] * len(self.movers)
        """Bytes that each mover was given, and that are not read and summed up yet."""
        self._giving = threading.Lock()
        self._summer = ThreadPoolExecutor(1, thread_name_prefix="checksum")
        """Computes the checksums for a GPU's mover, which is busy with other waves."""
        self._figures = TransferFigures(counters)

    def make_arena(self, size_bytes: int, *, setting: str = "DYN_KVBM_CPU_CACHE_GB") -> ArenaInfo:
        """Make the arena, in the place of one that no engine has seen yet. Takes seconds.

        Raises ArenaNoSpace, which names `setting`, ArenaUnavailable, ArenaStopped after
        `stop_making`, and what NIXL says when it refuses the memory. `info` says what is left then:
        an arena goes only for one that should fit in its place.
        """
        with self._making:
            return self._make_arena(size_bytes, setting)

    def _make_arena(self, size_bytes: int, setting: str) -> ArenaInfo:
        if self._arena is not None:
            self._arena.check_successor(size_bytes, setting)
            self.info = NO_ARENA
            for mover, registration in zip(self.movers, self._registrations, strict=True):
                mover.deregister(registration).result(CALL_DEADLINE_S)
            _close_after(self._close_devices(), self._arena)
            self._arena = None
        arena = Arena.create(
            self._shm_dir, f"{self._name}-arena", size_bytes, setting=setting, stop=self._stop
        )
        try:
            registering = [
                mover.register_memory(arena.address, arena.bytes) for mover in self.movers
            ]
            self._registrations = [known.result(CALL_DEADLINE_S) for known in registering]
        except BaseException:
            arena.close()
            raise
        self._arena = arena
        arena.populate().add_done_callback(_populated)
        agent = self.mover.metadata().result(CALL_DEADLINE_S)
        self.info = ArenaInfo(str(arena.path), arena.address, arena.bytes, agent)
        return self.info

    def expect_reads(self, seconds: float) -> None:
        """Have the arena's agent stand ready for engines that cannot map the arena, and read it
        over TCP. Those have added it; without any it rests."""
        now = time.monotonic()
        if now + seconds / 2 > self._attends_until:
            self._attends_until = now + seconds
            self.mover.attend(seconds, if_added=True)

    def stop_making(self) -> None:
        """Have an allocation under way end soon, and let none begin."""
        self._stop.set()

    def close(self) -> None:
        """End all threads, and the arena."""
        self.stop_making()
        for mover in self.movers:
            mover.close()  # Ends every read, so that nothing is submitted after it.
        over = self._close_devices()
        self._summer.shutdown(wait=True)
        with self._making:
            if self._arena is not None:
                _close_after(over, self._arena)

    async def attach(self, effect: AttachPeer) -> PeerAttached | PeerFailed:
        """Learn where a worker's memory is."""
        try:
            agent, memory = unwrap(effect.agent)
        except KvbmError as error:
            return PeerFailed(effect.engine, effect.rank, str(error))
        self.mover.look_out(QUIET_POLL_S)  # From now on the worker may read from here.
        adding = [(mover, mover.add_peer(agent)) for mover in self.movers]
        try:
            async with asyncio.timeout(CALL_DEADLINE_S):
                added = [asyncio.shield(asyncio.wrap_future(future)) for _, future in adding]
                peer = (await asyncio.gather(*added))[0]
        except (TimeoutError, KvbmError) as error:
            for mover, future in adding:
                future.add_done_callback(partial(_remove_added, mover))
            reason = str(error) or "NIXL did not answer"
            return PeerFailed(effect.engine, effect.rank, reason)
        if memory is not None:
            await asyncio.to_thread(self._open, peer, memory)
            self.mover.expect_peer()  # That may have taken a while, and the worker adds us now.
        return PeerAttached(effect.engine, effect.rank, peer)

    def _open(self, peer: str, memory: DeviceMemory) -> None:
        """Attach a worker's memory on a GPU by CUDA, or, where that cannot be, by NIXL."""
        from kvbm_common.cuda.pulling import DevicePuller  # Only where there is a GPU.

        with self._opening:  # Several ranks come at once.
            if self._device_puller is None:
                self._device_puller = DevicePuller(self._live.address, self._live.bytes)
        try:
            self._device_puller.attach(peer, memory)
        except KvbmError as error:
            self._on_gpu[peer] = memory.device
            log.warning("%s cannot be read by CUDA, using NIXL: %s", peer, error)

    def _close_devices(self) -> Future[None]:
        """End the pulls from GPUs. A copy may be late: keep the arena until the future ends."""
        puller, self._device_puller = self._device_puller, None
        if puller is not None:
            return puller.close()
        over: Future[None] = Future()
        over.set_result(None)
        return over

    def detach(self, peer: str) -> None:
        """Forget a worker's memory."""
        if self._device_puller is not None:
            self._device_puller.detach(peer)
        self._on_gpu.pop(peer, None)
        for mover in self.movers:
            mover.remove_peer(peer)

    async def pull(self, effect: StartPull) -> PullDone | PullFailed:
        """Read every rank's part into the slots, chunk by chunk, and sum up what is in.

        Returns when every read has ended, so that no byte is on its way unwatched.
        """
        ranks = [(part.peer, _pieces_of(part)) for part in effect.parts]
        reads = [
            (peer, pieces, chunk)
            for peer, pieces in ranks
            for chunk in chunks_of(len(effect.slots), pieces.bytes, PULL_CHUNK_BYTES)
        ]
        part_count = effect.parts[0].share.grid.count
        sums = np.zeros((len(effect.slots), part_count), dtype="<u8")
        pulling = _Pulling(effect, len(reads), sums)
        for peer, pieces, chunk in reads:
            self._start(pulling, peer, pieces, chunk)
        await asyncio.wrap_future(pulling.ended)
        for seconds, size in pulling.moved:
            self._figures.observe("d2h", seconds, size)
        if pulling.failures:
            return self._failed(effect.pull, pulling.failures)
        return PullDone(effect.pull, tuple(parts.tobytes() for parts in pulling.sums))

    def _start(self, pulling: _Pulling, peer: str, pieces: RankPieces, chunk: slice) -> None:
        effect = pulling.effect
        starts = slot_starts(
            effect.slots[chunk], arena_address=self._live.address, slot_bytes=UNIT_BYTES
        )
        copy = BlockCopy(pieces, effect.blocks[chunk], starts)
        ended = partial(self._read_ended, pulling, copy, chunk)
        into, theirs = copy.arena.spans, copy.device.spans
        deadline_s, puller = effect.deadline_ms / 1000, self._device_puller
        if puller is not None and puller.knows(peer):
            read = puller.read(peer, into, theirs, deadline_s=deadline_s)
            read.add_done_callback(lambda done: self._summer.submit(ended, done))
            return
        if peer in self._on_gpu:
            theirs = theirs.on_device(self._on_gpu[peer])
        # In turn is not enough: commits come between, and one mover was left with the last three.
        mover = self._give(into.bytes)
        read = self.movers[mover].read(peer, into, theirs, deadline_s=deadline_s)
        read.add_done_callback(ended)  # In the mover's thread, whose core has just brought it.
        read.add_done_callback(lambda _: self._taken(mover, into.bytes))

    def _give(self, size: int) -> int:
        """Return the index of the mover with the fewest bytes to bring; it has `size` more now."""
        with self._giving:
            mover = self._unread.index(min(self._unread))
            self._unread[mover] += size
        return mover

    def _taken(self, mover: int, size: int) -> None:
        with self._giving:
            self._unread[mover] -= size

    def _read_ended(
        self,
        pulling: _Pulling,
        copy: BlockCopy,
        chunk: slice,
        read: Future[Transferred],
    ) -> None:
        error = read.exception()
        try:
            if error is None:
                pieces = copy.pieces
                sums = COPIER.sums(pieces.fine.in_slots(copy.slots), lanes=pieces.lanes)
                parts = list(pieces.share.parts)
                found = np.array(sums, dtype="<u8").reshape(copy.count, len(parts))
                pulling.sums[chunk, parts] = found
        except Exception as mistake:  # Whatever it is, the pull comes to an end.
            error = mistake
        with pulling.lock:
            if error is not None:
                pulling.failures.append(error)
            else:
                pulling.moved.append((read.result().seconds, read.result().bytes))
            pulling.reads_left -= 1
            is_last = pulling.reads_left == 0
        if is_last:
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

    @property
    def _live(self) -> Arena:
        assert self._arena is not None, "a pull has slots, and those are of an arena"
        return self._arena


@lru_cache(maxsize=256)
def _pieces_of(part: PullPart) -> RankPieces:
    """Return the pieces of a rank, which every pull from it has."""
    return RankPieces(part.regions, part.share)


def _close_after(over: Future[None], arena: Arena) -> None:
    over.add_done_callback(lambda _: arena.close())


def _populated(done: Future[None]) -> None:
    error = done.exception()
    if error is not None:
        log.warning("the first transfers will pay for page faults: %s", error)


def _remove_added(mover: MoverThread, added: Future[str]) -> None:
    """Remove a peer that one mover has added, now or late, while another has failed."""
    if not added.cancelled() and added.exception() is None:
        mover.remove_peer(added.result())
