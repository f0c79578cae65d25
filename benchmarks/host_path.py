"""The host path: engine → arena → engine, beside memcpy in the same minute."""

from __future__ import annotations

import asyncio
import ctypes
import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from kvbm_cli.stack import Stack
from kvbm_common.copying import COPIER, Places, thread_count
from kvbm_common.identity import SequenceHash
from kvbm_host_tier.shell.puller import MOVERS_MAX
from numpy.typing import NDArray

from benchmarks.baseline import memory_owner, page_aligned, ucx_read_two_processes
from benchmarks.harness import Row, info_row, rate_row
from benchmarks.probe import Probe

MIB = 1 << 20
BLOCKS = 256
ROUNDS = 5
PART = 64
ONBOARD_TARGET, OFFLOAD_TARGET = 0.7, 0.5
"""Of memcpy. Between two processes the kernel copies: one thread of it reaches a third."""
LIMIT_TARGET = 0.9
"""Of what as many threads reach that do nothing but pull and sum up."""
THREADS_TARGET = 1.7


def run() -> list[Row]:
    """1 MiB blocks, 256 MiB a round, rounds of path and reference in turn."""
    return asyncio.run(_run())


async def _run() -> list[Row]:
    size = (ROUNDS + 2) * BLOCKS * MIB / 1e9
    services = ("consolidator", "host-tier")
    async with Stack.private({"cpu_cache_gb": size}, services=services) as stack:
        return await asyncio.to_thread(_measure, stack)


def _measure(stack: Stack) -> list[Row]:
    source = Probe(stack.settings, "source", block_bytes=MIB, block_count=BLOCKS)
    target = Probe(stack.settings, "target", block_bytes=MIB, block_count=BLOCKS)
    memcpy = Memcpy()
    offload: list[float] = []
    onboard: list[float] = []
    reference: list[float] = []
    plain: list[float] = []
    pulls = KernelPulls()
    try:
        source.start()
        target.start()
        for number in range(ROUNDS + 1):
            names = source.chain(number, BLOCKS)
            reference.append(memcpy.rate())
            offload.append(_offload(source, names))
            onboard.append(_onboard(target, names, number))
            reference.append(memcpy.rate())
            plain += ucx_read_two_processes(MIB, BLOCKS, 1)
            pulls.measure()
    finally:
        pulls.close()
        target.close()
        source.close()
    roof = statistics.median(reference[2:])
    return [
        rate_row("offload, engine → arena, 1 MiB blocks, summed up and committed",
                 statistics.median(offload[1:]), unit="GB/s", reference=roof,
                 target=OFFLOAD_TARGET),
        pulls.row(statistics.median(offload[1:])),
        rate_row("onboard, arena → engine, 1 MiB blocks, verified",
                 statistics.median(onboard[1:]), unit="GB/s", reference=roof,
                 target=ONBOARD_TARGET),
        *_copier_rows(roof),
        info_row("plain NIXL UCX, READs from another process",
                 statistics.median(plain[1:]), unit="GB/s"),
    ]  # fmt: skip


class Memcpy:
    """Copies of 256 MiB at once, in one thread: the reference of both ways."""

    def __init__(self) -> None:
        self._source, self._target = page_aligned(BLOCKS * MIB), page_aligned(BLOCKS * MIB)
        self._source[:], self._target[:] = 1, 2

    def rate(self) -> float:
        """GB/s of one copy."""
        started = time.perf_counter()
        np.copyto(self._target, self._source)
        return BLOCKS * MIB / (time.perf_counter() - started) / 1e9


class _Piece(ctypes.Structure):
    """One `struct iovec`."""

    _fields_ = [("address", ctypes.c_void_p), ("bytes", ctypes.c_size_t)]


class KernelPulls:
    """The limit of an offload on one host: the kernel copies blocks of another process, and each is
    summed up. As many threads as the host tier pulls with, and nothing else."""

    def __init__(self) -> None:
        self._threads = min(MOVERS_MAX, thread_count())
        self._target = page_aligned(BLOCKS * MIB)
        self._owner = memory_owner(BLOCKS * MIB)
        self._address, _, self._pid = self._owner.__enter__()
        self._read = ctypes.CDLL(None, use_errno=True).process_vm_readv
        self._rates: list[float] = []

    def close(self) -> None:
        """End the other process."""
        self._owner.__exit__(None, None, None)

    def measure(self) -> None:
        """Pull 256 MiB once."""
        starts = np.array_split(np.arange(BLOCKS) * MIB, self._threads)
        with ThreadPoolExecutor(self._threads) as pool:
            started = time.perf_counter()
            for pulled in [pool.submit(self._pull, part.tolist()) for part in starts]:
                pulled.result()
            self._rates.append(BLOCKS * MIB / (time.perf_counter() - started) / 1e9)

    def row(self, offload: float) -> Row:
        """The rate of the offload beside this limit."""
        return rate_row(f"the same, beside {self._threads} threads of process_vm_readv and sums",
                        offload, unit="GB/s", reference=statistics.median(self._rates[1:]),
                        target=LIMIT_TARGET)  # fmt: skip

    def _pull(self, offsets: list[int]) -> None:
        for offset in offsets:
            here = _Piece(self._target.ctypes.data + offset, MIB)
            there = _Piece(self._address + offset, MIB)
            moved = self._read(self._pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
            assert moved == MIB, os.strerror(ctypes.get_errno())
            start = np.array([[here.address]], dtype=np.uint64)
            COPIER.sums(Places(start, np.array([MIB], dtype=np.uint64)))


def _copier_rows(roof: float) -> list[Row]:
    """The copy of blocks by itself: beside memcpy, and by two threads beside one."""
    source, target = page_aligned(BLOCKS * MIB), page_aligned(BLOCKS * MIB)
    source[:], target[:] = 1, 2
    pairs = [
        (_copied(source, target, threads=2), _copied(source, target, threads=1))
        for _ in range(ROUNDS)
    ]
    one = statistics.median(alone for _, alone in pairs)
    rows = [info_row(f"copy and checksum in one pass ({COPIER.name}), one thread, share of memcpy",
                     one / roof, unit="x")]  # fmt: skip
    if len(os.sched_getaffinity(0)) > 1:
        two = statistics.median(together for together, _ in pairs)
        plain = statistics.median(_memcpy_by_two(source, target) for _ in range(ROUNDS))
        rows += [
            rate_row("the same, two threads beside one", statistics.median(a / b for a, b in pairs),
                     unit="x", target=THREADS_TARGET),
            info_row("two threads, share of two threads of memcpy", two / plain, unit="x"),
        ]  # fmt: skip
    return rows


def _memcpy_by_two(source: NDArray[np.uint8], target: NDArray[np.uint8]) -> float:
    """GB/s of two threads that copy a half each: what the memory allows."""
    halves = [slice(0, len(source) // 2), slice(len(source) // 2, None)]
    with ThreadPoolExecutor(2) as pool:
        started = time.perf_counter()
        copies = [pool.submit(np.copyto, target[half], source[half]) for half in halves]
        for copy in copies:
            copy.result()
        return len(source) / (time.perf_counter() - started) / 1e9


def _copied(source: NDArray[np.uint8], target: NDArray[np.uint8], *, threads: int) -> float:
    """GB/s of a copy of all blocks, shared out evenly."""
    starts = np.arange(BLOCKS, dtype=np.uint64).reshape(-1, 1) * np.uint64(MIB)
    length = np.array([MIB], dtype=np.uint64)
    shares = np.array_split(starts, threads)
    with ThreadPoolExecutor(threads) as pool:
        started = time.perf_counter()
        copies = [
            pool.submit(
                COPIER.copy,
                Places(share + np.uint64(target.ctypes.data), length),
                Places(share + np.uint64(source.ctypes.data), length),
            )
            for share in shares
        ]
        assert len({checksum for copy in copies for checksum in copy.result()}) == 1
        return BLOCKS * MIB / (time.perf_counter() - started) / 1e9


def _offload(probe: Probe, names: list[SequenceHash]) -> float:
    started = time.perf_counter()
    stored = probe.offload(names)
    assert stored == BLOCKS, stored
    # The confirmation is on its way on the same socket: this answer comes after the commit.
    assert probe.lookup("committed", names[-1:]).blocks == 1
    probe.scheduler.forget("committed")
    return BLOCKS * MIB / (time.perf_counter() - started) / 1e9


def _onboard(probe: Probe, names: list[SequenceHash], number: int) -> float:
    """Parts of the chain side by side, as several requests would ask for them."""
    started = time.perf_counter()
    parts = range(0, BLOCKS, PART)
    for part in parts:
        request = f"{number}-{part}"
        hit = probe.lookup(request, names[part : part + PART])
        assert hit.blocks == PART, hit
        probe.start_load(request, range(part, part + PART))
    results = probe.wait_loads(len(parts))
    assert all(all(result.intact) for result in results), [r.reason for r in results]
    return BLOCKS * MIB / (time.perf_counter() - started) / 1e9
