"""The disk path through the service, O_DIRECT, beside fio and plain NIXL POSIX."""

from __future__ import annotations

import asyncio
import statistics
import time
from pathlib import Path

import msgspec
from kvbm_common.bus import Bus
from kvbm_common.counters import Counters
from kvbm_common.identity import hashes_to_hex
from kvbm_common.stack import Stack
from kvbm_common.wire.verbs import Hits, StatsReply, hits_codec, hits_subject, verb_subject

from benchmarks.baseline import fio, posix_plain
from benchmarks.harness import Row, rate_row
from benchmarks.probe import Probe

MIB = 1 << 20
BLOCKS = 512
ROUNDS = 6
DEPTH = 64
"""Blocks in flight: four batches of sixteen, on all three sides."""
TARGET = 0.8
STORED_ROUNDS = 3.1
"""The file is full after three rounds: later ones rewrite it, as the references do theirs."""
WARM_UP = 3


def run() -> list[Row]:
    """1 MiB blocks, 512 MiB a round, path and references in turn; medians."""
    return asyncio.run(_run())


async def _run() -> list[Row]:
    overrides = {
        "cpu_cache_gb": 1.05 * BLOCKS * MIB / 1e9,
        "disk_cache_gb": STORED_ROUNDS * BLOCKS * MIB / 1e9,
    }
    services = ("consolidator", "host-tier", "disk-tier")
    async with Stack.private(overrides, services=services) as stack:
        bus = await Bus.connect(stack.nats_url, "bench", counters=Counters(), deadline_s=5)
        try:
            return await _measure(stack, bus)
        finally:
            await bus.close()


async def _measure(stack: Stack, bus: Bus) -> list[Row]:
    directory = stack.settings.disk_cache_dir
    probe = Probe(stack.settings, "probe", block_bytes=MIB, block_count=BLOCKS)
    rates: dict[str, list[float]] = {
        key: [] for key in ("write", "read", "plain write", "plain read", "fio write", "fio read")
    }
    try:
        await asyncio.to_thread(probe.start)
        for number in range(WARM_UP + ROUNDS):
            # In turn, each side first in every other round: what went before leaves its mark.
            if number % 2:
                await asyncio.to_thread(_references, directory, rates)
            rates["write"].append(await _write_round(stack, bus, probe, number))
            if number:
                # Round 0's blocks have been evicted from the arena by now, and so on.
                rates["read"].append(await asyncio.to_thread(_read_round, probe, number - 1))
            if not number % 2:
                await asyncio.to_thread(_references, directory, rates)
    finally:
        probe.close()
    steady = {key: values[WARM_UP:] or [0.0] for key, values in rates.items()}
    return _rows({key: statistics.median(values) for key, values in steady.items()})


def _references(directory: Path, rates: dict[str, list[float]]) -> None:
    for name, found in (
        ("plain", posix_plain(directory, MIB, BLOCKS, DEPTH, 1)),
        ("fio", fio(directory, MIB, DEPTH, 1)),
    ):
        for verb, rate in (found or {}).items():
            rates[f"{name} {verb}"].append(rate)


def _rows(median: dict[str, float]) -> list[Row]:
    return [
        rate_row(f"{verb}, 1 MiB blocks, {what}", median[verb], unit="GB/s",
                 reference=max(median[f"plain {verb}"], median[f"fio {verb}"]), target=TARGET)
        for verb, what in (("write", "host → disk, hit to journaled and announced"),
                           ("read", "disk → host, lookup to leased, verified"))
    ]  # fmt: skip


async def _write_round(stack: Stack, bus: Bus, probe: Probe, number: int) -> float:
    """From a hit that lets all blocks through the filter to the last one on disk."""
    names = probe.chain(number, BLOCKS)
    wanted = (number + 1) * BLOCKS
    await asyncio.to_thread(probe.offload, names)
    namespace = probe.namespace.digest.hex()
    hits = Hits(namespace=namespace, hashes=hashes_to_hex(names))
    started = time.perf_counter()
    await bus.publish(hits_subject(stack.settings.host), hits_codec.encode(hits))
    subject = verb_subject(
        "disk-tier", "stats", host=stack.settings.host, instance=stack.settings.instance
    )
    while True:
        reply = await bus.request(subject, b"{}", deadline_s=5)
        figures = msgspec.json.decode(reply, type=StatsReply).figures
        if figures.get("offload_blocks_h2d", 0) >= wanted:
            return BLOCKS * MIB / (time.perf_counter() - started) / 1e9
        assert time.perf_counter() - started < 60, figures
        await asyncio.sleep(0.003)


def _read_round(probe: Probe, number: int) -> float:
    names = probe.chain(number, BLOCKS)
    started = time.perf_counter()
    hit = probe.lookup(f"read-{number}", names)
    seconds = time.perf_counter() - started
    probe.scheduler.forget(f"read-{number}")
    assert hit.blocks == BLOCKS, hit
    assert hit.disk > 0, hit
    return hit.disk * MIB / seconds / 1e9
