"""Two tenants on one host tier: what a saturating one costs a quiet one.

The quiet tenant looks its conversations up at a steady pace, and stores again what has left. The
loud one is an engine in another process that offers new blocks as fast as they are taken. Rounds
alone and beside it alternate, on one stack: the machine's other work is the same for both.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import statistics
import time
from dataclasses import dataclass, field
from multiprocessing.synchronize import Event

from kvbm_cli.stack import Stack
from kvbm_common.config.settings import Settings
from kvbm_common.identity import SequenceHash

from benchmarks.harness import Row, info_row, percentile, time_row
from benchmarks.probe import Probe

ARENA_GB = 0.2
BLOCK_BYTES = 128 * 1024
CHAINS, CHAIN_BLOCKS = 32, 16
"""The quiet tenant's conversations: a third of the arena."""
LOOKUPS_PER_S = 100
ROUND_S, ROUNDS = 4.0, 8
LOUD_BLOCKS = 64
IN_FLIGHT = 8
"""Offers of the loud tenant together."""


@dataclass(slots=True)
class Told:
    """What the quiet tenant has seen in one round."""

    seconds: list[float] = field(default_factory=list)
    asked: int = 0
    hit: int = 0


def run() -> list[Row]:
    """Return what tenants make of it, and what it is without them."""
    rows: list[Row] = []
    for named in (True, False):
        rows += asyncio.run(_run("quiet" if named else "", "loud" if named else ""))
    return rows


async def _run(quiet: str, loud: str) -> list[Row]:
    services = ("consolidator", "index", "host-tier")
    async with Stack.private({"cpu_cache_gb": ARENA_GB}, services=services) as stack:
        return await asyncio.to_thread(_rounds, stack.settings, quiet, loud)


def _rounds(settings: Settings, quiet: str, loud: str) -> list[Row]:
    spawn = multiprocessing.get_context("spawn")
    going, ended, stored = spawn.Event(), spawn.Event(), spawn.Value("q", 0)
    engine = spawn.Process(target=_be_loud, args=(settings, loud, going, ended, stored))
    probe = _probe(settings, "quiet", quiet)
    alone, beside = list[Told](), list[Told]()
    try:
        probe.start()
        engine.start()
        chains = {seed: probe.chain(seed, CHAIN_BLOCKS) for seed in range(CHAINS)}
        _look_up(probe, chains, ROUND_S)  # Everything is stored once.
        started, loud_s = stored.value, 0.0
        for _ in range(ROUNDS):
            alone.append(_look_up(probe, chains, ROUND_S))
            going.set()
            before = time.perf_counter()
            beside.append(_look_up(probe, chains, ROUND_S))
            loud_s += time.perf_counter() - before
            going.clear()
        rate = (stored.value - started) / loud_s
        assert rate > 1_000, f"the loud tenant has stored {rate:.0f} blocks a second"
    finally:
        ended.set()
        engine.join(20)
        engine.kill()
        probe.close()
    return _rows(alone, beside, rate, "tenants" if quiet else "one tenant for both")


def _rows(alone: list[Told], beside: list[Told], rate: float, how: str) -> list[Row]:
    ratio = statistics.median(
        percentile(two.seconds, 0.99) / percentile(one.seconds, 0.99)
        for one, two in zip(alone, beside, strict=True)
    )
    own = statistics.median(percentile(one.seconds, 0.99) for one in alone)
    lost = 100 * (_hit_rate(alone) - _hit_rate(beside))
    if how != "tenants":
        return [
            info_row(f"{how}: lookup's p99 beside a saturating engine", ratio, unit="x alone"),
            info_row(f"{how}: points of hit rate lost", lost, unit="points"),
        ]
    return [
        info_row("a quiet tenant's lookup alone, p99", own * 1e3, unit="ms"),
        time_row("its p99 beside a saturating tenant", own * ratio * 1e3, unit="ms",
                 reference=own * 1e3, target=1.2),
        time_row("points of hit rate that it loses", lost, unit="points", target=1.0),
        info_row("blocks that the other stores meanwhile", rate, unit="blocks/s"),
    ]  # fmt: skip


def _hit_rate(rounds: list[Told]) -> float:
    return sum(one.hit for one in rounds) / sum(one.asked for one in rounds)


def _probe(settings: Settings, name: str, tenant: str) -> Probe:
    return Probe(
        settings, name, block_bytes=BLOCK_BYTES, block_count=LOUD_BLOCKS, tenant=tenant,
        deadline_ms=10_000,
    )  # fmt: skip


def _look_up(probe: Probe, chains: dict[int, list[SequenceHash]], seconds: float) -> Told:
    """Look conversations up at a steady pace; what is missing is stored again."""
    told, draw = Told(), random.Random(7)
    due_s = time.perf_counter()
    end_s = due_s + seconds
    while due_s < end_s:
        pause_s = due_s - time.perf_counter()
        if pause_s > 0:
            time.sleep(pause_s)
        names = chains[draw.randrange(CHAINS)]
        request = f"r{due_s}"
        started_s = time.perf_counter()
        hit = probe.lookup(request, names)
        told.seconds.append(time.perf_counter() - started_s)
        probe.scheduler.forget(request)
        told.asked += len(names)
        told.hit += hit.blocks
        if hit.blocks < len(names):
            probe.offload(names)
        due_s = max(due_s + 1 / LOOKUPS_PER_S, time.perf_counter() - 0.5)
    return told


def _be_loud(settings: Settings, tenant: str, going: Event, ended: Event, stored: object) -> None:
    """Offer new blocks as fast as they are taken, whenever it is going."""
    probe = _probe(settings, "loud", tenant)
    try:
        probe.start()
        seed = 1_000
        while not ended.is_set():
            if not going.wait(0.1):
                continue
            for _ in range(IN_FLIGHT):
                seed += 1
                probe.offer(probe.chain(seed, LOUD_BLOCKS))
            stored.value += probe.wait_offers(IN_FLIGHT)  # type: ignore[attr-defined]
    finally:
        probe.close()
