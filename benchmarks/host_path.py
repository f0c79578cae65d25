"""The host path: engine → arena → engine, beside plain NIXL UCX reads between two processes."""

from __future__ import annotations

import asyncio
import statistics
import time

from kvbm_common.identity import SequenceHash
from kvbm_common.stack import Stack

from benchmarks.baseline import memcpy_gb_per_s, ucx_read_two_processes
from benchmarks.harness import Row, info_row, rate_row
from benchmarks.probe import Probe

MIB = 1 << 20
BLOCKS = 256
ROUNDS = 5
PART = 64
TARGET = 0.7


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
    offload: list[float] = []
    onboard: list[float] = []
    reference: list[float] = []
    try:
        source.start()
        target.start()
        for number in range(ROUNDS + 1):
            names = source.chain(number, BLOCKS)
            offload.append(_offload(source, names))
            onboard.append(_onboard(target, names, number))
            reference += ucx_read_two_processes(MIB, BLOCKS, 1)
    finally:
        target.close()
        source.close()
    plain = statistics.median(reference[1:])
    return [
        rate_row("offload, engine → arena, 1 MiB blocks, summed up and committed",
                 statistics.median(offload[1:]), unit="GB/s", reference=plain, target=TARGET),
        rate_row("onboard, arena → engine, 1 MiB blocks, verified",
                 statistics.median(onboard[1:]), unit="GB/s", reference=plain, target=TARGET),
        info_row("memcpy, for scale", memcpy_gb_per_s(), unit="GB/s"),
    ]  # fmt: skip


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
