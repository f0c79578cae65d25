"""Arena readers: the two ways in which a worker pulls blocks out of the arena.

`NixlReader` reads the host tier's memory over NIXL, from wherever it is. `MappedReader` maps the
arena, read-only, and copies: possible where both share a host. Which is faster depends on kernel
and processor, so a worker begins with the mapping and measures both while it works.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
from kvbm_common.arena import Arena, ArenaUnavailable
from kvbm_common.errors import KvbmError
from kvbm_common.nixl import (
    Moved,
    MoverClosed,
    MoverThread,
    Registration,
    Spans,
    TransferError,
    TransferFailed,
    TransferTimeout,
)
from kvbm_common.wire.local import Welcome

if TYPE_CHECKING:
    from kvbm_common.cuda.reading import Gpu

log = logging.getLogger(__name__)

PROBE_BYTES = 16 * 1024 * 1024
"""Beyond the caches of one core, and read in a few milliseconds."""
PROBE_ROUNDS = 3
PROBE_DEADLINE_S = 5.0
"""The first NIXL transfer sets a connection up: up to 0.2 s. It is warm after the probe."""


class ArenaReader(Protocol):
    """Copies spans of the arena, in the host tier's addresses, into our memory."""

    name: str

    def read(self, target: Spans, source: Spans, *, deadline_s: float) -> Future[Moved]:
        """Copy row by row. The future fails with a TransferError."""

    def close(self) -> None:
        """What was asked for before ends first."""


class NixlReader:
    """NIXL READs through the worker's agent, into the memory of GPU `device` if there is one."""

    name = "nixl"

    def __init__(self, mover: MoverThread, peer: str, device: int | None = None) -> None:
        self._mover = mover
        self._peer = peer
        self._device = device

    def read(self, target: Spans, source: Spans, *, deadline_s: float) -> Future[Moved]:
        if self._device is not None:
            target = target.on_device(self._device)
        return self._mover.read(self._peer, target, source, deadline_s=deadline_s)

    def close(self) -> None:
        self._mover.remove_peer(self._peer)


class MappedReader:
    """Copies out of a read-only mapping of the arena, in a thread of its own.

    Raises ArenaUnavailable when it cannot be mapped from here. The mapping outlives a host tier
    that was killed: its bytes stay what they were, and the lease's end still counts.
    """

    name = "mapped"

    def __init__(self, welcome: Welcome) -> None:
        self._arena = Arena.attach(welcome.arena_path, writable=False)
        self._arena.populate()
        self._theirs = welcome.arena_address
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="arena")
        self._thread.submit(lambda: None)  # Here, not in the engine's thread, which may be bound.
        self._is_unmapped = False  # Only the thread of its own looks at it.

    def read(self, target: Spans, source: Spans, *, deadline_s: float) -> Future[Moved]:
        try:
            return self._thread.submit(self._copy, target, source, time.monotonic() + deadline_s)
        except RuntimeError:  # Closed, since the arena is another one by now.
            refused: Future[Moved] = Future()
            refused.set_exception(MoverClosed("the mapping is closed"))
            return refused

    def _copy(self, target: Spans, source: Spans, deadline: float) -> Moved:
        if self._is_unmapped:  # Asked for while `close` was between its two steps.
            raise MoverClosed("the mapping is closed")
        if time.monotonic() >= deadline:
            raise TransferTimeout("the copy did not begin by its deadline")
        offsets = source.rows[:, 0].astype(np.int64) - self._theirs
        if int(offsets.min()) < 0 or int((offsets + source.rows[:, 1].astype(np.int64)).max()) > (
            self._arena.bytes
        ):
            raise TransferFailed("the slots are not inside the arena")
        started = time.perf_counter()
        ours = self._arena.address
        addresses = target.rows[:, 0].tolist()
        rows = zip(addresses, offsets.tolist(), target.rows[:, 1].tolist(), strict=True)
        for address, offset, length in rows:
            ctypes.memmove(address, ours + offset, length)  # Without the GIL.
        return Moved(target.bytes, time.perf_counter() - started)

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):  # Closed before.
            self._thread.submit(self._unmap)
        self._thread.shutdown(wait=True)

    def _unmap(self) -> None:
        self._is_unmapped = True
        self._arena.close()


def readers_of(
    welcome: Welcome, mover: MoverThread, peer: str, *, wanted: str, gpu: Gpu | None = None
) -> list[ArenaReader]:
    """The readers that this arena can be read by, the one to begin with first.

    `wanted` is `mapped`, `nixl` or `auto`. NIXL is always there. With a `gpu`, whose copies have
    measured themselves, there is one reader.
    """
    if gpu is not None:
        return [_device_reader(welcome, mover, peer, gpu, wanted=wanted)]
    nixl = NixlReader(mover, peer)
    if wanted == "nixl":
        return [nixl]
    try:
        mapped = MappedReader(welcome)
    except (ArenaUnavailable, OSError) as error:  # OSError: no room in our address space.
        if wanted == "mapped":
            log.warning("the arena cannot be mapped, using NIXL: %s", error)
        return [nixl]
    return [mapped] if wanted == "mapped" else [mapped, nixl]


def _device_reader(
    welcome: Welcome, mover: MoverThread, peer: str, gpu: Gpu, *, wanted: str
) -> ArenaReader:
    from kvbm_common.cuda.reading import DeviceReader  # Only where there is a GPU.

    if wanted != "nixl":
        try:
            return DeviceReader(
                gpu, arena_path=welcome.arena_path, arena_address=welcome.arena_address
            )
        except (KvbmError, OSError) as error:
            log.warning("the arena cannot be mapped for the GPU, using NIXL: %s", error)
    return NixlReader(mover, peer, gpu.runtime.device)


def fastest(readers: list[ArenaReader], mover: MoverThread, welcome: Welcome) -> ArenaReader:
    """Measure, and choose. Takes some milliseconds, or until a dead arena's deadline."""
    rates = {reader.name: _gb_per_s(reader, mover, welcome) for reader in readers}
    log.info("reading the arena, GB/s: %s", rates)
    return max(readers, key=lambda reader: rates[reader.name])


def _gb_per_s(reader: ArenaReader, mover: MoverThread, welcome: Welcome) -> float:
    """The best of a few reads of the arena's beginning; 0 when it cannot be read this way."""
    size = min(PROBE_BYTES, welcome.slot_bytes * welcome.slot_count)
    scratch = np.zeros(size, dtype=np.uint8)
    target = Spans.of([scratch.ctypes.data], size)
    source = Spans.of([welcome.arena_address], size)
    known: Registration | None = None
    settling: Future[None] | None = None
    best = 0.0
    try:
        known = mover.register_memory(scratch.ctypes.data, size).result(PROBE_DEADLINE_S)
        for _ in range(PROBE_ROUNDS):
            started = time.perf_counter()
            reader.read(target, source, deadline_s=PROBE_DEADLINE_S).result(2 * PROBE_DEADLINE_S)
            best = max(best, size / (time.perf_counter() - started) / 1e9)
    except (KvbmError, TimeoutError) as error:
        log.warning("the arena cannot be read by %s: %s", reader.name, error)
        settling = error.settling if isinstance(error, TransferError) else None
        best = 0.0
    _give_up(scratch, known, mover, settling)
    return round(best, 2)


def _give_up(
    scratch: npt.NDArray[np.uint8],
    known: Registration | None,
    mover: MoverThread,
    settling: Future[None] | None,
) -> None:
    """Free the memory of a probe when no late byte can reach it any more."""
    if known is None:
        return
    registration = known

    def free(_: object = None) -> None:
        assert len(scratch)  # Kept until here.
        mover.deregister(registration)

    if settling is None:
        free()
    else:
        settling.add_done_callback(free)
