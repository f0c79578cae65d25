"""How long operators' verbs and restarts hold a host tier and a disk tier of a million blocks.

`make bench-pauses`. A probe looks a conversation up all the time, from host memory. Its longest
wait says how long the host tier stood still. The disk tier is asked for its statistics likewise.
Blocks are as small as blocks can be, so that a million of them fit into a few GB.

    BLOCKS=100000 python -m benchmarks pauses        a tenth, in a minute
"""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

import msgspec
from kvbm_cli.demo.check import StackView, wait_until
from kvbm_cli.stack import Stack
from kvbm_common.identity import SequenceHash
from kvbm_common.nats.bus import Bus
from kvbm_common.wire.admin import (
    PolicyReply,
    PolicyRequest,
    RemoveReply,
    RemoveRequest,
    ResizeReply,
    ResizeRequest,
)
from kvbm_common.wire.codec import JsonCodec
from kvbm_common.wire.verbs import StatsReply, verb_subject

from benchmarks.harness import Row, info_row, percentile, time_row
from benchmarks.probe import Probe

BLOCKS = int(os.environ.get("BLOCKS", "1_000_000"))
BLOCK_BYTES = 4_096
CHAIN_BLOCKS, IN_FLIGHT = 64, 8
PAUSE_MS = 20.0
"""The goal for each step of a service."""
IDLE_S, LOOK_S, DEADLINE_S = 5.0, 0.002, 60.0
AFTER_S = 0.5
"""Lookups that waited for the end of an operation are answered by then."""
FILL_DEADLINE_S = 1_200.0
SERVICES = ("consolidator", "index", "host-tier", "disk-tier")

Reply = TypeVar("Reply", RemoveReply, ResizeReply, PolicyReply)


class Waits:
    """A thread that does one thing again and again, and how long each time has taken."""

    def __init__(self, name: str, work: Callable[[int], None]) -> None:
        """Prepare to call `work` with numbers that count up."""
        self.seconds: list[float] = []
        self._work, self._ended = work, threading.Event()
        self._thread = threading.Thread(target=self._run, name=name)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def end(self) -> None:
        """Do it no more."""
        self._ended.set()
        self._thread.join(DEADLINE_S)

    def take(self) -> list[float]:
        """Return the times since the last call."""
        taken, self.seconds = self.seconds, []
        return taken

    def _run(self) -> None:
        for number in itertools.count():
            if self._ended.wait(LOOK_S):
                return
            started_s = time.perf_counter()
            self._work(number)
            self.seconds.append(time.perf_counter() - started_s)


def _look_up(probe: Probe, names: list[SequenceHash], number: int) -> None:
    probe.lookup(f"r{number}", names)
    probe.scheduler.forget(f"r{number}")


def run() -> list[Row]:
    """Return the longest waits during each operation."""
    return asyncio.run(_run())


async def _run() -> list[Row]:
    size_gb = BLOCKS * BLOCK_BYTES * 1.02 / 1e9
    overrides = {
        "cpu_cache_gb": size_gb, "disk_cache_gb": size_gb, "disable_disk_offload_filter": True,
    }  # fmt: skip
    async with Stack.private(overrides, services=SERVICES) as stack:
        bus = await Bus.connect(stack.admin, "bench", deadline_s=DEADLINE_S)
        probe = Probe(stack.settings, "probe", block_bytes=BLOCK_BYTES, block_count=CHAIN_BLOCKS)
        machine = Waits("machine", lambda _: time.sleep(LOOK_S))
        try:
            await asyncio.to_thread(probe.start)
            names = await asyncio.to_thread(_fill, probe)
            lookups = Waits("lookups", partial(_look_up, probe, names))
            chains = [probe.chain(seed, CHAIN_BLOCKS) for seed in (101, 102)]
            bench = Bench(stack, bus, chains, lookups, machine)
            await bench.settle()
            lookups.start()
            machine.start()
            try:
                return await bench.rows()
            finally:
                lookups.end()
                machine.end()
        finally:
            await asyncio.to_thread(probe.close)
            await bus.close()


def _fill(probe: Probe) -> list[SequenceHash]:
    """Store a million blocks; returns the newest conversation."""
    until_s = time.monotonic() + FILL_DEADLINE_S
    stored, seed, names = 0, 0, list[SequenceHash]()
    while stored < BLOCKS:
        assert time.monotonic() < until_s, f"{stored} of {BLOCKS} blocks in {FILL_DEADLINE_S} s"
        for _ in range(IN_FLIGHT):
            seed += 1
            names = probe.chain(seed, CHAIN_BLOCKS)
            probe.offer(names)
        stored += probe.wait_offers(IN_FLIGHT)
    return names


class Bench:
    """The operations, and what was waited for during each."""

    def __init__(
        self, stack: Stack, bus: Bus, chains: Sequence[list[SequenceHash]], lookups: Waits,
        machine: Waits,
    ) -> None:  # fmt: skip
        self._chains = chains
        self._stack, self._bus, self._lookups, self._machine = stack, bus, lookups, machine
        self._disk_s: list[float] = []
        self._view = StackView(bus, stack.settings)

    async def rows(self) -> list[Row]:
        """Carry out one operation after the other."""
        other, chains = f"{1:064x}", iter(self._chains)
        rows = await self._during("nothing", lambda: asyncio.sleep(IDLE_S))
        for tier in ("host-tier", "disk-tier"):
            prefix = RemoveRequest(prefix=next(chains)[0].hex(), actor="bench")
            namespace = RemoveRequest(namespace=other, actor="bench")
            for what, work in {
                "evict of a prefix": partial(self._remove, tier, prefix),
                "reset of a namespace": partial(self._remove, tier, namespace),
                "policy lru, then adaptive": partial(self._policies, tier),
                "resize by a tenth and back": partial(self._resize, tier),
            }.items():
                rows += await self._during(f"{tier}: {what}", work)
        rows += await self._during("a disk tier dies and comes back", self._restart)
        everything = RemoveRequest(everything=True, actor="bench")
        for tier in ("disk-tier", "host-tier"):
            work = partial(self._remove, tier, everything)
            rows += await self._during(f"{tier}: reset of everything", work)
        return rows

    async def settle(self) -> None:
        """Wait until the disk tier has written what there is."""

        async def is_written() -> bool:
            return not (await self._stats()).figures["writes_pending"]

        await wait_until(is_written, "the disk tier is writing", deadline_s=FILL_DEADLINE_S)

    async def _during(self, what: str, work: Callable[[], Awaitable[object]]) -> list[Row]:
        self._disk_s.clear()
        for waits in (self._lookups, self._machine):
            waits.take()
        watching = asyncio.create_task(self._watch_disk())
        started_s = time.perf_counter()
        try:
            await work()
            took_s = time.perf_counter() - started_s
            await asyncio.sleep(AFTER_S)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        lookups, disk = self._lookups.take(), list(self._disk_s)
        machine = [one - LOOK_S for one in self._machine.take()]
        about = f"{what} ({took_s:.1f} s)"
        rows = [
            time_row(f"{about}: the longest lookup", max(lookups, default=took_s) * 1e3,
                     unit="ms", target=PAUSE_MS),
            info_row(f"{about}: lookups, p99", percentile(lookups, 0.99) * 1e3, unit="ms"),
            info_row(f"{about}: the longest sleep beside it", max(machine) * 1e3, unit="ms"),
        ]  # fmt: skip
        if disk:
            rows.insert(1, info_row(f"{about}: the longest answer of the disk tier",
                                    max(disk) * 1e3, unit="ms"))  # fmt: skip
        return rows

    async def _watch_disk(self) -> None:
        """Ask the disk tier for its figures again and again, as long as it answers."""
        while True:
            started_s = time.perf_counter()
            await self._stats()
            self._disk_s.append(time.perf_counter() - started_s)
            await asyncio.sleep(LOOK_S)

    # --- operations ---------------------------------------------------------------------------

    async def _remove(self, tier: str, request: RemoveRequest) -> None:
        verb = "reset" if request.prefix is None else "evict"
        while (await self._ask(tier, verb, request, RemoveReply)).more:
            pass

    async def _policies(self, tier: str) -> None:
        for policy in ("lru", "adaptive"):
            await self._ask(tier, "policy", PolicyRequest(policy=policy, actor="b"), PolicyReply)

    async def _resize(self, tier: str) -> None:
        slots = (await self._ask(tier, "resize", ResizeRequest(slots=BLOCKS), ResizeReply)).capacity
        for count in (slots * 9 // 10, slots):
            request = ResizeRequest(slots=count, actor="bench")
            while (await self._ask(tier, "resize", request, ResizeReply)).more:
                pass

    async def _restart(self) -> None:
        await self._stack.kill("disk-tier")
        await self._stack.start("disk-tier")
        await self._stack.wait_ready("disk-tier")
        await asyncio.sleep(IDLE_S)  # The host tier takes its snapshot.

    async def _stats(self) -> StatsReply:
        return await self._view.stats("disk-tier")

    async def _ask(
        self, kind: str, verb: str, request: msgspec.Struct, reply: type[Reply]
    ) -> Reply:
        subject = verb_subject(kind, verb, host=self._stack.settings.host, instance="0")
        payload = msgspec.json.encode(request)
        answer = await self._bus.request(subject, payload, deadline_s=DEADLINE_S)
        codec: JsonCodec[Reply] = JsonCodec(reply)
        return codec.decode(answer)
