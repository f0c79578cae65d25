"""Measure: the smallest piece, each way, for which the copy engine is fast enough.

Taken once at the start, with some megabytes of memory of its own, and for `kvbm doctor`. The kernel
takes multiprocessors: beside it a matrix product takes up to twice its time, beside the copy engine
1 % more (docs/gpu.md). It is for pieces that the copy engine is much slower with.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvbm_common.cuda.copies import KERNEL_ROW_BYTES, Copies
from kvbm_common.cuda.runtime import CudaError, CudaUnavailable, CupyRuntime, Runtime, put

PIECES_BYTES = (4 << 10, 8 << 10, 16 << 10, 32 << 10, 64 << 10, 256 << 10)
MOVED_BYTES = 16 << 20
"""Bytes that are moved: as much as one chunk of a transfer."""
CHUNKS = 2
"""Put in a row: the device copies one while the next is put, as with a transfer."""
ENGINE_SHARE = {"d2h": 0.25, "h2d": 0.5}
"""The part of the kernel's rate that the copy engine must reach to be chosen. A request waits for a
load, and none for an offload."""
ROUNDS = 3
DEADLINE_S = 5.0
"""For one copy of 16 MiB: a device that takes longer is not measured, but broken."""
SPIN_S = 0.005
"""The time to look without a pause: 32 MiB take 0.6 ms, a pause a tenth."""
POLL_S = 0.00002


@dataclass(frozen=True, slots=True)
class Rate:
    """GB/s of pieces of one size; `direction` is `d2h` or `h2d`."""

    direction: str
    piece_bytes: int
    engine: float
    kernel: float


def choose(rates: Sequence[Rate], direction: str) -> int:
    """Return the smallest size from which on the engine is fast enough, despite noise below.

    If it never is, return one byte more than the largest size that was measured.
    """
    ours = sorted((r for r in rates if r.direction == direction), key=lambda r: r.piece_bytes)
    threshold = ours[-1].piece_bytes + 1 if ours else 0
    for rate in reversed(ours):
        if rate.engine < ENGINE_SHARE[direction] * rate.kernel:
            break
        threshold = rate.piece_bytes
    return threshold


def describe(rates: Sequence[Rate]) -> str:
    """Describe for an operator the best rate of both directions, and who moves which pieces."""
    parts: list[str] = []
    for direction in ("d2h", "h2d"):
        best = max((max(r.engine, r.kernel) for r in rates if r.direction == direction), default=0)
        kib = choose(rates, direction) // 1024
        parts.append(f"{direction} {best} GB/s, by a kernel below {kib} KiB a piece")
    return "; ".join(parts)


def measure(runtime: Runtime, *, moved_bytes: int | None = None) -> list[Rate]:
    """Measure every size in both directions with both methods. Raises CudaError."""
    moved_bytes = moved_bytes or MOVED_BYTES
    host = runtime.pinned(moved_bytes)
    device, table = runtime.allocate(moved_bytes), runtime.allocate(_table_bytes(moved_bytes))
    stream = runtime.stream(urgent=False)
    rates: list[Rate] = []
    try:
        runtime.batches = runtime.batches and _batches_work(runtime, host, device, stream)
        for direction in ("d2h", "h2d"):
            for piece_bytes in PIECES_BYTES:
                copies = _copies(host.ctypes.data, device, moved_bytes, piece_bytes, direction)
                engine = _rate(runtime, copies, stream, table=None)
                kernel = 0.0
                if runtime.kernels_reach_host:
                    kernel = _rate(runtime, copies, stream, table=table)
                rates.append(Rate(direction, piece_bytes, engine, kernel))
    finally:
        runtime.end_stream(stream)
        runtime.free(table)
        runtime.free(device)
    return rates


def _batches_work(runtime: Runtime, host: NDArray[np.uint8], device: int, stream: int) -> bool:
    """Try two batches, there and back: the driver's call is known from its header only."""
    half = PIECES_BYTES[0]
    places = np.array([0, half])
    host[: 2 * half] = np.arange(2 * half) % 251
    there = Copies.of(device + places[::-1], host.ctypes.data + places, half)
    back = Copies.of(host.ctypes.data + 2 * half + places, device + places, half)
    try:
        for copies in (there, back):
            _seconds(runtime, copies, stream, None)
    except CudaError:
        return False
    first, second = host[: 2 * half], host[2 * half : 4 * half]
    return bool(np.array_equal(np.roll(first, half), second))


def _copies(host: int, device: int, moved_bytes: int, piece_bytes: int, direction: str) -> Copies:
    """Return copies of pieces in a mixed order, as blocks of a cache are."""
    order = np.random.default_rng(0).permutation(moved_bytes // piece_bytes)
    ours = host + np.arange(len(order)) * piece_bytes
    theirs = device + order * piece_bytes
    target, source = (ours, theirs) if direction == "d2h" else (theirs, ours)
    return Copies.of(target, source, piece_bytes)


def _table_bytes(moved_bytes: int) -> int:
    return moved_bytes // min(*PIECES_BYTES, KERNEL_ROW_BYTES) * 24


def _rate(runtime: Runtime, copies: Copies, stream: int, *, table: int | None) -> float:
    seconds = min(_seconds(runtime, copies, stream, table) for _ in range(ROUNDS))
    return round(CHUNKS * copies.bytes / seconds / 1e9, 2)


def _seconds(runtime: Runtime, copies: Copies, stream: int, table: int | None) -> float:
    rows = copies.cut_to(KERNEL_ROW_BYTES).rows
    staging = runtime.pinned(rows.nbytes)
    staging.view(np.uint64).reshape(-1, 3)[:] = rows
    event = runtime.event()
    started = time.perf_counter()
    for _ in range(CHUNKS):
        if table is None:
            put(runtime, copies, stream)
        else:
            runtime.copy(table, staging.ctypes.data, rows.nbytes, stream)
            runtime.copy_rows(table, len(rows), stream)
    runtime.record(event, stream)
    while not runtime.is_done(event):
        waited_s = time.perf_counter() - started
        if waited_s > DEADLINE_S:
            raise CudaError(f"{copies.bytes} bytes were not copied in {DEADLINE_S} s")
        if waited_s > SPIN_S:
            time.sleep(POLL_S)
    taken_s = time.perf_counter() - started
    runtime.end_event(event)
    return taken_s


def look(gpu_count: int) -> tuple[tuple[str, ...], str]:
    """Return a line for each GPU, and why one could not be used. Takes half a second each."""
    lines: list[str] = []
    for device in range(gpu_count):
        try:
            runtime = CupyRuntime(device)
            lines.append(f"{runtime.bus_id()}: {describe(measure(runtime))}")
        except (CudaUnavailable, CudaError) as error:
            return tuple(lines), str(error)
    return tuple(lines), ""
