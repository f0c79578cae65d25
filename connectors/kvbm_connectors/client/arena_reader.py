"""Arena readers: the ways in which a worker brings blocks out of the arena into its memory.

`MappedReader` maps the arena, read-only, and copies, where both share a host. `NixlReader` reads
the host tier's memory over NIXL, from wherever it is, into a buffer of ours and copies from there:
late bytes of a read that has failed land in the buffer. `CudaReader` copies into a GPU's memory.

Each sums up what it stores while it copies. The mapping goes first wherever it can be made: over
NIXL every byte is copied by the kernel and then once more.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np
from kvbm_common.copying import COPIER, Copier, Numbers, Places, copy_threads
from kvbm_common.copying.rank_pieces import BlockCopy
from kvbm_common.errors import KvbmError
from kvbm_common.memory.arena import Arena
from kvbm_common.nixl.layout import CHUNK_BYTES
from kvbm_common.nixl.mover_thread import (
    MoverClosed,
    MoverThread,
    TransferError,
    TransferFailed,
    Transferred,
    TransferTimeout,
)
from kvbm_common.wire.local import Welcome

from kvbm_connectors.client.bounce_pool import BouncePool

if TYPE_CHECKING:
    from kvbm_common.cuda.reading import DeviceReader, Gpu

log = logging.getLogger(__name__)

CALL_DEADLINE_S = 10.0
"""Registrations and metadata take milliseconds; a machine in trouble gets some more."""
MAPPED_CHUNK_BYTES = 4 * 1024 * 1024
"""One thread copies so much at a time: a load of some blocks is work for all threads."""


@dataclass(frozen=True, slots=True)
class Brought:
    """Blocks that are in our memory. `sums`: the checksums of what was stored, of the rank's parts
    of block after block; None where the reader cannot sum."""

    sums: list[int] | None
    begun: float
    """The time at which the bytes began to move, on the clock of `time.perf_counter`."""
    seconds: float


class ArenaReader(Protocol):
    """Copies blocks of the arena, which are in the host tier's addresses, into our memory."""

    name: str
    chunk_bytes: int
    """Bytes that one read shall move, at most: the caller cuts a load into parts of this size."""

    def read(self, copy: BlockCopy, *, deadline_s: float, summed: bool) -> Future[Brought]:
        """Copy block by block, out of the slots. The future fails with a TransferError; unless that
        has settled, late bytes may still reach the target."""

    def close(self) -> None:
        """Close the reader; the reads that were asked for before end first."""


class MappedReader:
    """Copies out of a read-only mapping of the arena, in threads of its own.

    Raises ArenaUnavailable when it cannot be mapped from here. The mapping outlives a host tier
    that was killed: its bytes stay what they were, and the lease's end still counts.
    """

    name = "mapped"
    chunk_bytes = MAPPED_CHUNK_BYTES

    def __init__(self, welcome: Welcome, *, copier: Copier = COPIER) -> None:
        self._arena = Arena.attach(welcome.arena_path, writable=False)
        self._arena.populate()
        self._theirs = welcome.arena_address
        self._copier = copier
        try:
            self._threads = copy_threads("arena")
        except RuntimeError:
            self._arena.close()
            raise

    def read(self, copy: BlockCopy, *, deadline_s: float, summed: bool) -> Future[Brought]:
        deadline = time.monotonic() + deadline_s
        try:
            return self._threads.submit(self._copy, copy, deadline, summed)
        except RuntimeError:  # Closed, since the arena is another one by now.
            refused: Future[Brought] = Future()
            refused.set_exception(MoverClosed("the mapping is closed"))
            return refused

    def _copy(self, copy: BlockCopy, deadline: float, summed: bool) -> Brought:
        if time.monotonic() >= deadline:
            raise TransferTimeout("the copy did not begin by its deadline")
        ours = self._arena.address
        pieces = copy.pieces.fine if summed else copy.pieces.coarse
        here = pieces.in_slots(copy.slots).moved(ours - self._theirs)
        if not here.inside(ours, self._arena.bytes):
            raise TransferFailed("the slots are not inside the arena")
        lanes = copy.pieces.lanes if summed else None
        begun = time.perf_counter()
        sums = self._copier.copy(pieces.on_device(copy.blocks), here, summed=summed, lanes=lanes)
        return Brought(sums, begun, time.perf_counter() - begun)

    def close(self) -> None:
        """Unmap when the last copy is over; what comes later is refused."""
        self._threads.shutdown(wait=True)
        self._arena.close()


Deliver = Callable[[Places, Places], None]
"""Copies blocks of a buffer to their target."""


@dataclass(slots=True, eq=False)
class _Read:
    copy: BlockCopy
    deadline: float
    summed: bool
    brought: Future[Brought] = field(default_factory=Future)


class NixlReader:
    """NIXL READs through the worker's agent into buffers of the pool, and copies from there."""

    name = "nixl"
    chunk_bytes = CHUNK_BYTES

    def __init__(
        self, mover: MoverThread, peer: str, pool: BouncePool, *, deliver: Deliver | None = None
    ) -> None:
        """Read the arena of `peer` through the buffers of `pool`. `deliver` is for a target that
        this process may not write to by itself."""
        self._mover, self._peer, self._pool = mover, peer, pool
        self._deliver = deliver
        self._threads = copy_threads("bounce")

    def read(self, copy: BlockCopy, *, deadline_s: float, summed: bool) -> Future[Brought]:
        read = _Read(copy, time.monotonic() + deadline_s, summed)
        if copy.bytes > self._pool.buffer_bytes:
            read.brought.set_exception(TransferFailed(f"{copy.bytes} bytes: more than a buffer"))
        else:
            self._pool.borrow(read.deadline).add_done_callback(partial(self._begin, read))
        return read.brought

    def _begin(self, read: _Read, borrowed: Future[int]) -> None:
        error = borrowed.exception()
        if error is not None:
            read.brought.set_exception(error)
            return
        buffer, copy = borrowed.result(), read.copy
        step = np.uint64(copy.pieces.bytes)
        starts = np.uint64(buffer) + np.arange(copy.count, dtype=np.uint64) * step
        runs = copy.pieces.runs
        moving = self._mover.read(
            self._peer,
            runs.back_to_back(starts).spans,
            runs.in_slots(copy.slots).spans,
            deadline_s=read.deadline - time.monotonic(),
        )
        moving.add_done_callback(partial(self._arrived, read, buffer, starts))

    def _arrived(
        self, read: _Read, buffer: int, starts: Numbers, moved: Future[Transferred]
    ) -> None:
        error = moved.exception()
        if error is None:
            with contextlib.suppress(RuntimeError):  # Closed.
                self._threads.submit(self._take, read, buffer, starts, moved.result())
                return
            error = MoverClosed("the reader is closed")
        settling = error.settling if isinstance(error, TransferError) else None
        self._pool.give_back(buffer, settling)
        if isinstance(error, TransferError):
            error = type(error)(str(error))  # Settled: late bytes land in the buffer.
        read.brought.set_exception(error)

    def _take(self, read: _Read, buffer: int, starts: Numbers, moved: Transferred) -> None:
        begun = time.perf_counter()
        try:
            sums = self._copy(read.copy, starts, read.summed)
        except Exception as error:  # Of a GPU, say. The caller waits for an end, whatever it is.
            settling = error.settling if isinstance(error, TransferError) else None
            self._pool.give_back(buffer, settling)
            read.brought.set_exception(error)
            return
        self._pool.give_back(buffer)
        seconds = moved.seconds + time.perf_counter() - begun
        read.brought.set_result(Brought(sums, begun - moved.seconds, seconds))

    def _copy(self, copy: BlockCopy, starts: Numbers, summed: bool) -> list[int]:
        """Copy out of a buffer, and sum up what is copied if asked to."""
        pieces = copy.pieces
        lanes = pieces.lanes if summed else None
        cut = pieces.fine if summed else pieces.coarse
        buffered = cut.back_to_back(starts)
        if self._deliver is None:
            return COPIER.copy(cut.on_device(copy.blocks), buffered, summed=summed, lanes=lanes)
        sums = COPIER.sums(buffered, lanes=lanes) if summed else []
        self._deliver(copy.device, pieces.coarse.back_to_back(starts))
        return sums

    def close(self) -> None:
        """Fail the reads in flight, and wait for the copies to end."""
        self._mover.remove_peer(self._peer)
        self._threads.shutdown(wait=True)


class CudaReader:
    """Copies out of the pinned mapping into a GPU's memory, which sums up by itself."""

    name = "cuda"
    chunk_bytes = CHUNK_BYTES

    def __init__(self, reader: DeviceReader) -> None:
        self._reader = reader

    def read(self, copy: BlockCopy, *, deadline_s: float, summed: bool) -> Future[Brought]:
        brought: Future[Brought] = Future()
        moving = self._reader.read(copy.device.spans, copy.arena.spans, deadline_s=deadline_s)
        moving.add_done_callback(lambda moved: _pass_on(moved, brought))
        return brought

    def close(self) -> None:
        self._reader.close()


def _pass_on(moved: Future[Transferred], brought: Future[Brought]) -> None:
    error = moved.exception()
    if error is not None:
        brought.set_exception(error)
    else:
        seconds = moved.result().seconds
        brought.set_result(Brought(None, time.perf_counter() - seconds, seconds))


def reader_of(
    welcome: Welcome,
    mover: MoverThread,
    pool: BouncePool,
    *,
    wanted: str,
    gpu: Gpu | None = None,
) -> ArenaReader:
    """Return the reader of this arena. `wanted` is `mapped`, `nixl` or `auto`; an arena that cannot
    be mapped is read by NIXL. Only then is the host tier added as a peer: it polls for those that
    may read over TCP. Raises KvbmError and TimeoutError."""
    if wanted != "nixl":
        try:
            return MappedReader(welcome) if gpu is None else _cuda_reader(welcome, gpu)
        except (KvbmError, OSError) as error:  # OSError: no room in our address space.
            level = logging.WARNING if wanted == "mapped" or gpu is not None else logging.INFO
            log.log(level, "the arena cannot be mapped, using NIXL: %s", error)
    peer = mover.add_peer(welcome.agent).result(CALL_DEADLINE_S)
    return NixlReader(mover, peer, pool, deliver=gpu.deliver if gpu is not None else None)


def _cuda_reader(welcome: Welcome, gpu: Gpu) -> ArenaReader:
    from kvbm_common.cuda.reading import DeviceReader  # Only where there is a GPU.

    reader = DeviceReader(gpu, arena_path=welcome.arena_path, arena_address=welcome.arena_address)
    return CudaReader(reader)
