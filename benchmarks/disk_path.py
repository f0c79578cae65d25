"""The disk path through the service, O_DIRECT, beside fio and plain NIXL POSIX."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
from kvbm_cli.stack import Stack
from kvbm_common.identity import SequenceHash, hashes_to_hex
from kvbm_common.nats.bus import Bus
from kvbm_common.runtime.metrics import Metrics
from kvbm_common.wire.events import SUBJECT_PREFIX, Stored
from kvbm_common.wire.packed_events import block_count, events_on
from kvbm_common.wire.verbs import Hits, StatsReply, hits_codec, hits_subject, verb_subject
from kvbm_disk_tier.core.journal import replay
from kvbm_disk_tier.shell.store_header import Header
from numpy.typing import NDArray

from benchmarks.baseline import PlainFile, ReadWrite, fio
from benchmarks.harness import Row, paired_rate_row, processor_s
from benchmarks.probe import Probe

MIB = 1 << 20
ROUND_BYTES = 2048 * MIB
"""Long enough that the first and the last batch, which nothing overlaps, are a small part."""
CHAINS = 8
"""Sequences in a round, which are asked for at the same time: no request is a gigabyte."""
STARTS = 3
PAIRS = 4
"""Of each start."""
TARGET = 0.8
STORED_ROUNDS = 3.1
"""The file is full after the fourth round, which warms up, too: later ones rewrite it. With less
room a round would drop the one before, whose blocks nobody has read yet."""
WARM_UP = 3
WARM_UP_PAIRS = 1
FIO_S = 3.0
ANNOUNCED_WITHIN_S = 60.0
VERBS = ("write", "read")
WHAT = {
    "write": "host → disk, hit to journaled and announced",
    "read": "disk → host, lookup to leased, verified",
}

Rates = dict[str, float]
"""Of each verb: GB/s, or seconds for a GB."""
Slots = NDArray[np.intp]


@dataclass(slots=True)
class Measured:
    """One block size, in several lives of the path: its rounds, each followed by plain NIXL's."""

    block_bytes: int
    pairs: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    """By verb, GB/s: ours, and plain NIXL's where the same blocks are."""
    fio: Rates = field(default_factory=dict)
    cpu_s_per_gb: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """The disk tier's processor time."""

    def rows(self, target: float) -> list[Row]:
        """The path beside the better of its references."""
        small = self.block_bytes < MIB
        size = f"{self.block_bytes >> 10} KiB" if small else f"{self.block_bytes >> 20} MiB"
        return [
            paired_rate_row(f"{verb}, {size} blocks, {WHAT[verb]}", self.pairs[verb], unit="GB/s",
                            target=target, scale=self._scale(verb))
            for verb in VERBS
        ]  # fmt: skip

    def cpu_s(self, verb: str) -> float:
        """For a gigabyte."""
        return statistics.median(self.cpu_s_per_gb[verb])

    def _scale(self, verb: str) -> float:
        """fio instead of plain NIXL, where it is faster."""
        plain = statistics.median(reference for _, reference in self.pairs[verb])
        return max(1.0, self.fio.get(verb, 0.0) / plain)


def run() -> list[Row]:
    """1 MiB blocks, path and reference in turn."""
    return asyncio.run(measure(MIB)).rows(TARGET)


async def measure(block_bytes: int) -> Measured:
    """One block size, on several stacks one after the other, each with a file of its own."""
    measured = Measured(block_bytes)
    for _ in range(STARTS):
        await _measure_start(measured)
    return measured


async def _measure_start(measured: Measured) -> None:
    block_bytes = measured.block_bytes
    overrides = {
        "cpu_cache_gb": 1.05 * ROUND_BYTES / 1e9,
        "disk_cache_gb": STORED_ROUNDS * ROUND_BYTES / 1e9,
    }
    services = ("consolidator", "host-tier", "disk-tier")
    async with contextlib.AsyncExitStack() as ends:
        stack = await ends.enter_async_context(Stack.private(overrides, services=services))
        bus = await Bus.connect(stack.admin, "bench", counters=Metrics(), deadline_s=5)
        ends.push_async_callback(bus.close)
        path = _Path(stack, bus, block_bytes)
        ends.callback(path.close)
        await path.start()
        for _ in range(WARM_UP):
            await path.round()
        depth = await path.depth()
        plain = PlainFile(path.store / "slots", block_bytes, ROUND_BYTES // block_bytes, depth)
        ends.callback(plain.close)
        for number in range(WARM_UP_PAIRS + PAIRS):
            read = path.written()
            rates, cpu_s_per_gb = await path.round()
            references = await asyncio.to_thread(_plain_round, plain, read, path.written())
            if number < WARM_UP_PAIRS:
                continue
            for verb in VERBS:
                measured.pairs[verb].append((rates[verb], references[verb]))
                measured.cpu_s_per_gb[verb].append(cpu_s_per_gb[verb])
        if not measured.fio:
            directory, deepest = stack.settings.disk_cache_dir, int(max(depth))
            found = await asyncio.to_thread(fio, directory, block_bytes, deepest, FIO_S)
            measured.fio = found or {}


def _plain_round(plain: PlainFile, read: Slots, written: Slots) -> Rates:
    """At the same places: on a virtual disk some are half as fast again as others."""
    return {"read": plain.read(read), "write": plain.write_back(written)}


class _Path:
    """The measured path between the arena and the file."""

    def __init__(self, stack: Stack, bus: Bus, block_bytes: int) -> None:
        self._stack, self._bus = stack, bus
        self._block_bytes = block_bytes
        self._blocks = ROUND_BYTES // block_bytes
        self._probe = Probe(
            stack.settings, "probe", block_bytes=block_bytes, block_count=self._blocks
        )
        self._announced = Announced(stack, bus)
        self._rounds = 0

    async def start(self) -> None:
        """Attach the engine."""
        await self._announced.listen()
        await asyncio.to_thread(self._probe.start)

    def close(self) -> None:
        """Detach it."""
        self._probe.close()

    @property
    def store(self) -> Path:
        """The disk tier's directory."""
        settings = self._stack.settings
        return settings.disk_cache_dir / f"kvbm-{settings.host}-{settings.instance}"

    def written(self) -> Slots:
        """Where the blocks of the last round are, from the journal."""
        header = msgspec.json.decode((self.store / "header").read_bytes(), type=Header)
        journal = (self.store / "journal").read_bytes()
        found = replay(journal, header.layout)
        slots = list(found.blocks)[-self._blocks :]
        assert len(slots) == self._blocks, found
        return np.array(slots)

    async def depth(self) -> ReadWrite:
        """How many blocks it has in flight."""
        settings = self._stack.settings
        subject = verb_subject("disk-tier", "stats", host=settings.host, instance=settings.instance)
        reply = await self._bus.request(subject, b"{}", deadline_s=5)
        figures = msgspec.json.decode(reply, type=StatsReply).figures
        return ReadWrite(figures["disk_read_depth_blocks"], figures["disk_write_depth_blocks"])

    async def round(self) -> tuple[Rates, Rates]:
        """Write new blocks, and read those of the round before, which have left the arena. Also
        how many seconds of a processor the disk tier took for a gigabyte."""
        number, self._rounds = self._rounds, self._rounds + 1
        rates: Rates = {}
        cpu: Rates = {}
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
        return rates, cpu

    def _chains(self, number: int) -> list[list[SequenceHash]]:
        first = number * CHAINS
        return [self._probe.chain(first + i, self._blocks // CHAINS) for i in range(CHAINS)]

    def _offload(self, number: int) -> None:
        for names in self._chains(number):
            self._probe.offload(names)

    async def _write(self, chains: list[list[SequenceHash]]) -> int:
        """From a hit that lets all blocks through the filter to the last one on disk."""
        for names in chains:
            await tell_hits(self._stack, self._bus, self._probe, names)
        await self._announced.reach(self._rounds * self._blocks)
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


class Announced:
    """The blocks that a disk tier has announced, counted by one who hears its events."""

    def __init__(self, stack: Stack, bus: Bus) -> None:
        self._source = f"disk-tier-{stack.settings.instance}"
        self._subject = f"{SUBJECT_PREFIX}.{stack.settings.host}.{self._source}.*"
        self._bus = bus
        self._count = 0
        self._more = asyncio.Event()

    async def listen(self) -> None:
        """From now on."""
        await self._bus.subscribe(self._subject, self._heard)

    def _heard(self, subject: str, payload: bytes) -> None:
        for event in events_on(subject, payload):
            if isinstance(event, Stored):
                self._count += block_count(event)
        self._more.set()

    async def reach(self, blocks: int) -> None:
        """Wait until it has announced so many in all."""
        async with asyncio.timeout(ANNOUNCED_WITHIN_S):
            while self._count < blocks:
                self._more.clear()
                await self._more.wait()
