"""The disk path in several block sizes, what it costs, and onboards beside writes."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Iterator

import numpy as np
from kvbm_cli.stack import Stack
from kvbm_common.nats.bus import Bus
from kvbm_common.runtime.metrics import Metrics

from benchmarks.disk_path import MIB, VERBS, Announced, measure, tell_hits
from benchmarks.harness import Row, info_row, time_row
from benchmarks.probe import Probe

SIZES = ((256 << 10, 0.85), (MIB, 0.95), (4 * MIB, 0.95))
"""Bytes of a block, and the part of the reference's speed that is the goal."""
CORES_AT_2_GB_S_MAX = 1.0
CHAIN_BLOCKS = 16
CHAINS = 96
ARENA_CHAINS = 24
"""Read in turn, of 96 chains none is in the arena any more when it is read again."""
ONBOARDS = 300
READS_PER_WRITE = 70 / 30
SLOWER_MAX = 3.0
ONBOARD = "an onboard of 16 MiB from disk"


def run() -> list[Row]:
    """Speeds beside the references, processor time, and the mixed load."""
    return asyncio.run(_run())


async def _run() -> list[Row]:
    rows: list[Row] = []
    for block_bytes, target in SIZES:
        measured = await measure(block_bytes)
        rows += measured.rows(target)
        if block_bytes == MIB:
            rows += [
                time_row(f"the disk tier's processor time, {verb} at 2 GB/s",
                         2 * measured.cpu_s(verb), unit="cores", target=CORES_AT_2_GB_S_MAX)
                for verb in VERBS
            ]  # fmt: skip
    return [*rows, *await _mixed()]


async def _mixed() -> list[Row]:
    """Onboards of 16 MiB from disk, alone and while others are written, 70 to 30."""
    overrides = {
        "cpu_cache_gb": ARENA_CHAINS * CHAIN_BLOCKS * MIB / 1e9,
        "disk_cache_gb": 3 * CHAINS * CHAIN_BLOCKS * MIB / 1e9,
    }
    services = ("consolidator", "host-tier", "disk-tier")
    async with Stack.private(overrides, services=services) as stack:
        bus = await Bus.connect(stack.admin, "bench", counters=Metrics(), deadline_s=5)
        reader, writer = (
            Probe(stack.settings, name, block_bytes=MIB, block_count=CHAIN_BLOCKS)
            for name in ("reader", "writer")
        )
        try:
            await asyncio.to_thread(reader.start)
            await asyncio.to_thread(writer.start)
            return await _Load(stack, bus, reader, writer).measure()
        finally:
            reader.close()
            writer.close()
            await bus.close()


class _Load:
    """Chains that are read from disk, and chains that are written beside."""

    def __init__(self, stack: Stack, bus: Bus, reader: Probe, writer: Probe) -> None:
        self._stack, self._bus = stack, bus
        self._reader, self._writer = reader, writer
        self._announced = Announced(stack, bus)
        self._seeds = itertools.count()
        self._requests = itertools.count()
        self._written = 0

    async def measure(self) -> list[Row]:
        """Alone, mixed, alone: the machine's mood is in both."""
        await self._announced.listen()
        for _ in range(CHAINS):
            await self._write()
        chains = itertools.cycle(range(CHAINS))
        before = await self._onboards(chains, self._nothing)
        mixed = await self._onboards(chains, self._write)
        after = await self._onboards(chains, self._nothing)
        alone = [*before, *after]
        return [
            info_row(f"{ONBOARD}, p50, alone", _ms(alone, 50), unit="ms"),
            info_row(f"{ONBOARD}, p50, beside writes, 70 to 30", _ms(mixed, 50), unit="ms"),
            time_row(f"{ONBOARD}, p99, beside writes, 70 to 30; reference: alone", _ms(mixed, 99),
                     unit="ms", reference=_ms(alone, 99), target=SLOWER_MAX),
        ]  # fmt: skip

    async def _onboards(
        self, chains: Iterator[int], beside: Callable[[], Awaitable[None]]
    ) -> list[float]:
        seconds: list[float] = []
        owed = 0.0
        writing: asyncio.Task[None] | None = None
        for chain in itertools.islice(chains, ONBOARDS):
            owed += 1 / READS_PER_WRITE
            if owed >= 1 and (writing is None or writing.done()):
                writing = asyncio.create_task(_as_task(beside))
                owed -= 1
            seconds.append(await asyncio.to_thread(self._onboard, chain))
        if writing is not None:
            await writing
        return seconds

    def _onboard(self, chain: int) -> float:
        """From the lookup until all blocks are in the arena, verified and leased."""
        names = self._reader.chain(chain, CHAIN_BLOCKS)
        request = f"read-{next(self._requests)}"
        started = time.perf_counter()
        hit = self._reader.lookup(request, names)
        seconds = time.perf_counter() - started
        self._reader.scheduler.forget(request)
        assert hit.disk == CHAIN_BLOCKS, hit
        return seconds

    async def _write(self) -> None:
        """A new chain, to the disk."""
        names = self._writer.chain(next(self._seeds), CHAIN_BLOCKS)
        await asyncio.to_thread(self._writer.offload, names)
        self._written += CHAIN_BLOCKS
        await tell_hits(self._stack, self._bus, self._writer, names)
        await self._announced.reach(self._written)

    async def _nothing(self) -> None:
        pass


async def _as_task(beside: Callable[[], Awaitable[None]]) -> None:
    await beside()


def _ms(seconds: list[float], rank: int) -> float:
    return 1000 * float(np.percentile(seconds, rank))
