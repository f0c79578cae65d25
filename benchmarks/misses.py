"""Lookups that find nothing: answered in the engine's call, and what the filter behind it costs.

On a machine with other work the time that passes is the others' too; the processor's time is not.
"""

from __future__ import annotations

import asyncio
import time

import numpy as np
from kvbm_cli.stack import Stack
from kvbm_common.identity import HASH_BYTES, SequenceHash
from kvbm_common.memory.miss_filter import FilterState, MissFilter, MissFilterReader, size_of

from benchmarks.harness import Row, info_row, percentile, time_row, wait_for
from benchmarks.probe import Probe

LOOKUP_BLOCKS = 512
LOOKUPS = 5_000
BLOCK_BYTES = 4096
CAPACITY = 1_000_000
STEP_LOOKUPS, STEP_S = 8, 0.005
"""Requests that a step of an engine admits, and how long it computes then."""
BATCH = 16
"""Blocks that one step of a host tier commits or evicts."""
PROBES = 200_000


def run() -> list[Row]:
    """Return the rows of an engine, and of the filter by itself."""
    return [*asyncio.run(_engine()), *_filter()]


async def _engine() -> list[Row]:
    services = ("consolidator", "index", "host-tier")
    async with Stack.private({"cpu_cache_gb": 0.1}, services=services) as stack:
        probe = Probe(stack.settings, "probe", block_bytes=BLOCK_BYTES, block_count=LOOKUP_BLOCKS)
        try:
            await asyncio.to_thread(probe.start)
            return await asyncio.to_thread(_misses, probe)
        finally:
            probe.close()


def _misses(probe: Probe) -> list[Row]:
    """Look up sequences that no tier has, as a scheduler does: once, and forget them."""
    assert probe.offload(probe.chain(0, LOOKUP_BLOCKS)) == LOOKUP_BLOCKS
    tokens = list(range(probe.namespace.block_tokens))
    seconds: list[float] = []
    processor_s: list[float] = []
    for number in range(1, LOOKUPS + 1):
        if number % STEP_LOOKUPS == 0:
            time.sleep(STEP_S)
        names, request = probe.chain(number, LOOKUP_BLOCKS), f"cmpl-{number}"
        started, started_cpu = time.perf_counter(), time.thread_time()
        hit = probe.scheduler.lookup(request, names, first_tokens=tokens)
        probe.scheduler.forget(request)
        if hit is not None:  # Else the filter was wrong: the host tier is asked.
            processor_s.append(time.thread_time() - started_cpu)
            seconds.append(time.perf_counter() - started)
    counts = probe.scheduler.counts()
    assert counts["lookups_at_once"] == len(seconds) >= 0.98 * LOOKUPS, counts
    wait_for(lambda: probe.scheduler.idle(), deadline_s=10, what="the last answers")
    return [
        time_row("a lookup of 512 blocks that nothing has, in the engine's call, p99",
                 percentile(seconds, 0.99) * 1e6, unit="µs", target=50.0),
        info_row("a lookup of 512 blocks that nothing has, in the engine's call, p50",
                 percentile(seconds, 0.5) * 1e6, unit="µs"),
        info_row("the same in time of the processor, p99", percentile(processor_s, 0.99) * 1e6,
                 unit="µs"),
        info_row("the same in time of the processor, p50", percentile(processor_s, 0.5) * 1e6,
                 unit="µs"),
    ]  # fmt: skip


def _filter() -> list[Row]:
    memory = bytearray(size_of(CAPACITY))
    writer = MissFilter(memoryview(memory), owner=1, epoch=1)
    writer.switch(FilterState.COMPLETE)
    names, others = _names(CAPACITY, 1), _names(PROBES, 2)
    started = time.process_time()
    writer.change(names, ())
    made_s = time.process_time() - started
    reader = MissFilterReader(memory, owner=1, epoch=1)
    wrong = sum(not reader.denies_any((name,)) for name in others)
    started = time.process_time()
    for first in range(0, PROBES, BATCH):
        writer.change(others[first : first + BATCH], names[first : first + BATCH])
    changed_s = time.process_time() - started
    return [
        time_row("names that the filter affirms wrongly, at its capacity",
                 100 * wrong / PROBES, unit="%", target=1.0),
        info_row("the filter's memory for each block", len(memory) / CAPACITY, unit="bytes"),
        info_row("a block that comes and one that leaves, in steps of 16",
                 changed_s / PROBES * 1e6, unit="µs"),
        info_row("a filter of a million blocks made again", made_s * 1e3, unit="ms"),
    ]  # fmt: skip


def _names(count: int, seed: int) -> list[SequenceHash]:
    data = np.random.default_rng(seed).bytes(count * HASH_BYTES)
    starts = range(0, len(data), HASH_BYTES)
    return [SequenceHash(data[start : start + HASH_BYTES]) for start in starts]
