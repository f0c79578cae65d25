"""The disk path through the service, O_DIRECT, beside fio and plain NIXL POSIX."""

from __future__ import annotations

import asyncio
import statistics
import time
from dataclasses import dataclass
from itertools import pairwise

import msgspec
from kvbm_common.bus import Bus
from kvbm_common.counters import Counters
from kvbm_common.identity import SequenceHash, hashes_to_hex
from kvbm_common.stack import Stack
from kvbm_common.wire.verbs import Hits, StatsReply, hits_codec, hits_subject, verb_subject

from benchmarks.baseline import PlainFile, fio
from benchmarks.harness import Row, paired_rate_row, processor_s
from benchmarks.probe import Probe

MIB = 1 << 20
ROUND_BYTES = 2048 * MIB
"""Long enough that the first and the last batch, which nothing overlaps, are a small part."""
CHAINS = 8
"""Sequences in a round, which are asked for at the same time: no request is a gigabyte."""
PAIRS = 7
DEPTH_BYTES = 64 * MIB
"""In flight: four batches of sixteen blocks of 1 MiB, on all three sides."""
TARGET = 0.8
STORED_ROUNDS = 3.1
"""The file is full after three rounds: later ones rewrite it, as the references do theirs."""
WARM_UP = 3
FIO_S = 3.0
VERBS = ("write", "read")
WHAT = {
    "write": "host → disk, hit to journaled and announced",
    "read": "disk → host, lookup to leased, verified",
}

Rates = dict[str, float]
"""GB/s of each verb."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One block size: rounds of the path, each between two of plain NIXL."""

    block_bytes: int
    ours: list[Rates]
    plain: list[Rates]
    """One more than of ours."""
    fio: Rates
    cpu_s_per_gb: dict[str, float]
    """The disk tier's processor time."""

    def rows(self, target: float) -> list[Row]:
        """The path beside the better of its references."""
        small = self.block_bytes < MIB
        size = f"{self.block_bytes >> 10} KiB" if small else f"{self.block_bytes >> 20} MiB"
        return [
            paired_rate_row(f"{verb}, {size} blocks, {WHAT[verb]}", self._pairs(verb), unit="GB/s",
                            target=target, scale=self._scale(verb))
            for verb in VERBS
        ]  # fmt: skip

    def _pairs(self, verb: str) -> list[tuple[float, float]]:
        around = [(a[verb] + b[verb]) / 2 for a, b in pairwise(self.plain)]
        return list(zip((one[verb] for one in self.ours), around, strict=True))

    def _scale(self, verb: str) -> float:
        """fio instead of plain NIXL, where it is faster."""
        plain = statistics.median(one[verb] for one in self.plain)
        return max(1.0, self.fio.get(verb, 0.0) / plain)


def run() -> list[Row]:
    """1 MiB blocks, 2 GiB a round, path and reference in turn."""
    return asyncio.run(measure(MIB)).rows(TARGET)


async def measure(block_bytes: int, pairs: int = PAIRS) -> Measured:
    """One block size on a stack of its own."""
    overrides = {
        "cpu_cache_gb": 1.05 * ROUND_BYTES / 1e9,
        "disk_cache_gb": STORED_ROUNDS * ROUND_BYTES / 1e9,
    }
    services = ("consolidator", "host-tier", "disk-tier")
    async with Stack.private(overrides, services=services) as stack:
        bus = await Bus.connect(stack.nats_url, "bench", counters=Counters(), deadline_s=5)
        directory, depth = stack.settings.disk_cache_dir, DEPTH_BYTES // block_bytes
        plain = PlainFile(directory, block_bytes, ROUND_BYTES // block_bytes, depth)
        path = _Path(stack, bus, block_bytes)
        try:
            await asyncio.to_thread(path.start)
            for _ in range(WARM_UP):
                await path.round()
                await asyncio.to_thread(_plain_round, plain)
            path.cpu_s_per_gb.clear()
            ours, around = [], [await asyncio.to_thread(_plain_round, plain)]
            for _ in range(pairs):
                ours.append(await path.round())
                around.append(await asyncio.to_thread(_plain_round, plain))
            found = await asyncio.to_thread(fio, directory, block_bytes, depth, FIO_S)
            cpu = {
                verb: statistics.median(one[verb] for one in path.cpu_s_per_gb) for verb in VERBS
            }
            return Measured(block_bytes, ours, around, found or {}, cpu)
        finally:
            path.close()
            plain.close()
            await bus.close()


def _plain_round(plain: PlainFile) -> Rates:
    return {"write": plain.write(), "read": plain.read()}


class _Path:
    """The measured path between the arena and the file."""

    def __init__(self, stack: Stack, bus: Bus, block_bytes: int) -> None:
        self._stack, self._bus = stack, bus
        self._block_bytes = block_bytes
        self._blocks = ROUND_BYTES // block_bytes
        self._probe = Probe(
            stack.settings, "probe", block_bytes=block_bytes, block_count=self._blocks
        )
        self._rounds = 0
        self.cpu_s_per_gb: list[dict[str, float]] = []
        """The disk tier's, of each round and verb."""

    def start(self) -> None:
        """Attach the engine."""
        self._probe.start()

    def close(self) -> None:
        """Detach it."""
        self._probe.close()

    async def round(self) -> Rates:
        """Write new blocks, and read those of the round before, which have left the arena."""
        number, self._rounds = self._rounds, self._rounds + 1
        rates: Rates = {}
        cpu: dict[str, float] = {}
        await asyncio.to_thread(self._offload, number)
        for verb, move, chains in (
            ("write", self._write, self._chains(number)),
            ("read", self._read, self._chains(number - 1) if number else []),
        ):
            cpu_s, started = self._cpu_s(), time.perf_counter()
            moved = await move(chains)
            seconds, gigabytes = time.perf_counter() - started, moved * self._block_bytes / 1e9
            if moved:
                rates[verb], cpu[verb] = gigabytes / seconds, (self._cpu_s() - cpu_s) / gigabytes
        self.cpu_s_per_gb.append(cpu)
        return rates

    def _chains(self, number: int) -> list[list[SequenceHash]]:
        first = number * CHAINS
        return [self._probe.chain(first + i, self._blocks // CHAINS) for i in range(CHAINS)]

    def _offload(self, number: int) -> None:
        for names in self._chains(number):
            self._probe.offload(names)

    async def _write(self, chains: list[list[SequenceHash]]) -> int:
        """From a hit that lets all blocks through the filter to the last one on disk."""
        started, wanted = time.perf_counter(), self._rounds * self._blocks
        for names in chains:
            await tell_hits(self._stack, self._bus, self._probe, names)
        while await stored_on_disk(self._stack, self._bus) < wanted:
            assert time.perf_counter() - started < 60, "the blocks do not reach the disk"
            await asyncio.sleep(0.01)  # A tenth of the disk tier's time went into answers at 3 ms.
        return self._blocks

    async def _read(self, chains: list[list[SequenceHash]]) -> int:
        return await asyncio.to_thread(self._look_up, chains)

    def _look_up(self, chains: list[list[SequenceHash]]) -> int:
        requests = {f"read-{self._rounds}-{i}": names for i, names in enumerate(chains)}
        hits = self._probe.lookups(requests)
        for request in requests:
            self._probe.scheduler.forget(request)
        assert all(hit.blocks == self._blocks // CHAINS for hit in hits), hits
        moved = sum(hit.disk for hit in hits)
        assert moved or not chains, hits
        return moved

    def _cpu_s(self) -> float:
        return processor_s(self._stack.pids["disk-tier"])


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
