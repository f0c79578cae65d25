"""The disk path through the service, O_DIRECT, beside fio and plain NIXL POSIX."""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec
from kvbm_common.bus import Bus
from kvbm_common.counters import Counters
from kvbm_common.identity import SequenceHash, hashes_to_hex
from kvbm_common.stack import Stack
from kvbm_common.wire.verbs import Hits, StatsReply, hits_codec, hits_subject, verb_subject

from benchmarks.baseline import fio, posix_plain
from benchmarks.harness import Row, rate_row
from benchmarks.probe import Probe

MIB = 1 << 20
ROUND_BYTES = 1024 * MIB
"""Long enough that the first and the last batch, which nothing overlaps, are a small part."""
ROUNDS = 6
DEPTH_BYTES = 64 * MIB
"""In flight: four batches of sixteen blocks of 1 MiB, on all three sides."""
TARGET = 0.8
STORED_ROUNDS = 3.1
"""The file is full after three rounds: later ones rewrite it, as the references do theirs."""
WARM_UP = 3
SIDES = ("write", "read", "plain write", "plain read", "fio write", "fio read")


@dataclass(frozen=True, slots=True)
class Measured:
    """Medians of one block size."""

    block_bytes: int
    rates: dict[str, float]
    """GB/s, of each of SIDES."""
    cpu_s_per_gb: dict[str, float]
    """The disk tier's processor time, for `write` and `read`."""

    def rows(self, target: float) -> list[Row]:
        """The path beside the better of its references."""
        small = self.block_bytes < MIB
        size = f"{self.block_bytes >> 10} KiB" if small else f"{self.block_bytes >> 20} MiB"
        return [
            rate_row(f"{verb}, {size} blocks, {what}", self.rates[verb], unit="GB/s",
                     reference=max(self.rates[f"plain {verb}"], self.rates[f"fio {verb}"]),
                     target=target)
            for verb, what in (("write", "host → disk, hit to journaled and announced"),
                               ("read", "disk → host, lookup to leased, verified"))
        ]  # fmt: skip


def run() -> list[Row]:
    """1 MiB blocks, 1 GiB a round, path and references in turn; medians."""
    return asyncio.run(measure(MIB)).rows(TARGET)


async def measure(block_bytes: int, rounds: int = ROUNDS) -> Measured:
    """One block size on a stack of its own."""
    overrides = {
        "cpu_cache_gb": 1.05 * ROUND_BYTES / 1e9,
        "disk_cache_gb": STORED_ROUNDS * ROUND_BYTES / 1e9,
    }
    services = ("consolidator", "host-tier", "disk-tier")
    async with Stack.private(overrides, services=services) as stack:
        bus = await Bus.connect(stack.nats_url, "bench", counters=Counters(), deadline_s=5)
        try:
            return await _Path(stack, bus, block_bytes).measure(rounds)
        finally:
            await bus.close()


class _Path:
    """The measured path between the arena and the file."""

    def __init__(self, stack: Stack, bus: Bus, block_bytes: int) -> None:
        self._stack, self._bus = stack, bus
        self._block_bytes = block_bytes
        self._blocks = ROUND_BYTES // block_bytes
        self._probe = Probe(
            stack.settings, "probe", block_bytes=block_bytes, block_count=self._blocks
        )
        self._rates: dict[str, list[float]] = {side: [] for side in SIDES}
        self._cpu: dict[str, list[float]] = {"write": [], "read": []}

    async def measure(self, rounds: int) -> Measured:
        """Path and references in turn, each first in every other round: what went before leaves
        its mark."""
        try:
            await asyncio.to_thread(self._probe.start)
            for number in range(WARM_UP + rounds):
                if number % 2:
                    await asyncio.to_thread(self._references)
                await self._write_round(number)
                if number:
                    # Round 0's blocks have been evicted from the arena by now, and so on.
                    await asyncio.to_thread(self._read_round, number - 1)
                if not number % 2:
                    await asyncio.to_thread(self._references)
        finally:
            self._probe.close()
        steady = {side: values[WARM_UP:] or [0.0] for side, values in self._rates.items()}
        return Measured(
            self._block_bytes,
            {side: statistics.median(values) for side, values in steady.items()},
            {verb: statistics.median(values[WARM_UP:]) for verb, values in self._cpu.items()},
        )

    def _references(self) -> None:
        directory, depth = self._stack.settings.disk_cache_dir, DEPTH_BYTES // self._block_bytes
        for name, found in (
            ("plain", posix_plain(directory, self._block_bytes, self._blocks, depth, 1)),
            ("fio", fio(directory, self._block_bytes, depth, 1)),
        ):
            for verb, rate in (found or {}).items():
                self._rates[f"{name} {verb}"].append(rate)

    def _took(self, verb: str, moved_bytes: int, seconds: float, cpu_s: float) -> None:
        self._rates[verb].append(moved_bytes / seconds / 1e9)
        self._cpu[verb].append(cpu_s / (moved_bytes / 1e9))

    def _cpu_s(self) -> float:
        return processor_seconds(self._stack.pids["disk-tier"])

    async def _write_round(self, number: int) -> None:
        """From a hit that lets all blocks through the filter to the last one on disk."""
        stack, wanted = self._stack, (number + 1) * self._blocks
        names = self._probe.chain(number, self._blocks)
        await asyncio.to_thread(self._probe.offload, names)
        cpu_s, started = self._cpu_s(), time.perf_counter()
        await tell_hits(stack, self._bus, self._probe, names)
        while await stored_on_disk(stack, self._bus) < wanted:
            assert time.perf_counter() - started < 60, "the blocks do not reach the disk"
            await asyncio.sleep(0.01)  # A tenth of the disk tier's time went into answers at 3 ms.
        seconds = time.perf_counter() - started
        self._took("write", ROUND_BYTES, seconds, self._cpu_s() - cpu_s)

    def _read_round(self, number: int) -> None:
        names = self._probe.chain(number, self._blocks)
        cpu_s, started = self._cpu_s(), time.perf_counter()
        hit = self._probe.lookup(f"read-{number}", names)
        seconds = time.perf_counter() - started
        self._probe.scheduler.forget(f"read-{number}")
        assert hit.blocks == self._blocks, hit
        assert hit.disk > 0, hit
        self._took("read", hit.disk * self._block_bytes, seconds, self._cpu_s() - cpu_s)


async def tell_hits(stack: Stack, bus: Bus, probe: Probe, names: list[SequenceHash]) -> None:
    """Say that blocks were asked for again, so that the filter lets them through."""
    hits = Hits(namespace=probe.namespace.digest.hex(), hashes=hashes_to_hex(names))
    await bus.publish(hits_subject(stack.settings.host), hits_codec.encode(hits))


async def stored_on_disk(stack: Stack, bus: Bus) -> float:
    """How many blocks the disk tier has announced in its life."""
    subject = verb_subject(
        "disk-tier", "stats", host=stack.settings.host, instance=stack.settings.instance
    )
    reply = await bus.request(subject, b"{}", deadline_s=5)
    return msgspec.json.decode(reply, type=StatsReply).figures.get("offload_blocks_h2d", 0)


def processor_seconds(pid: int) -> float:
    """What a process has used, in all its threads; see proc(5)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
