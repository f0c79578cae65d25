"""Scaling: two host tiers beside one, three index replicas beside one, a million blocks that move.

Whoever works against a service is a process of its own. What more processes can gain is a question
of cores: without enough of them the figures are there, and no target is.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from statistics import median
from typing import Any, NamedTuple

import msgspec
from kvbm_cli.stack import Stack
from kvbm_common.config.settings import Settings
from kvbm_common.nats.bus import Bus
from kvbm_common.nats.snapshots import SnapshotPages
from kvbm_common.registry.nats_kv import NatsRegistry
from kvbm_common.tier.rendezvous import owner_of
from kvbm_common.wire.events import Run
from kvbm_common.wire.index_verbs import MatchReply, MatchRequest
from kvbm_common.wire.verbs import SnapshotPart, SnapshotReply, verb_subject

from benchmarks import index_echo
from benchmarks.harness import Row, info_row, percentile, rate_row, time_row
from benchmarks.index_nats import (
    CHAIN_BLOCKS,
    EPOCH_TTL_S,
    HOST,
    MATCH,
    NAMESPACE,
    QUERY_BLOCKS,
    Replica,
    chains,
    living,
    publish,
)
from benchmarks.probe import Probe

CORES_WANTED = 6
"""Two host tiers with their engines, or three replicas with those who ask, and NATS."""
ENGINES = 4
KIB, MIB = 1 << 10, 1 << 20
BLOCKS = 64
ROUNDS = 24
TIERS_TARGET, REPLICAS_TARGET = 1.6, 2.0
ASKERS, IN_FLIGHT, ASK_S = 3, 32, 4.0
KEPT_BLOCKS = 100 * CHAIN_BLOCKS
"""Of a source that stays, and is asked for."""
MOVED_BLOCKS = 1_000_000
MOVED_SOURCE, MOVED_INSTANCE = "host-tier-9", "9"
TOLD_SOURCE, TOLD_INSTANCE = "host-tier-8", "8"
ASKED_PER_S = 500
STALL_MS = 50.0
DEADLINE_S = 120.0


def _enough() -> bool:
    return len(os.sched_getaffinity(0)) >= CORES_WANTED


def _gain_row(name: str, value: float, *, unit: str, reference: float, target: float) -> Row:
    """A target only where it could be met."""
    if _enough():
        return rate_row(name, value, unit=unit, reference=reference, target=target)
    return Row(
        name=f"{name}; not the cores for a target here: {CORES_WANTED} are wanted",
        unit=unit, value=round(value, 3), reference=round(reference, 3),
        ratio=round(value / reference, 3),
    )  # fmt: skip


def _pool() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn"))


# --- host tiers -----------------------------------------------------------------------------


def _names(instances: Sequence[str]) -> list[str]:
    """Engines, as many for each instance."""
    names = {instance: instance.encode() for instance in instances}
    found: dict[str, list[str]] = {instance: [] for instance in instances}
    number = 0
    while any(len(one) < ENGINES // len(instances) for one in found.values()):
        engine = f"engine-{number}"
        owner = owner_of(engine.encode(), names)
        assert owner is not None
        if len(found[owner]) < ENGINES // len(instances):
            found[owner].append(engine)
        number += 1
    return [engine for one in found.values() for engine in one]


def work(name: str, settings: Settings, begin_s: float) -> tuple[float, float, int]:
    """One engine: offload and onboard in turn; returns its begin, its end and the bytes moved."""
    probe = Probe(settings, name, block_bytes=MIB, block_count=BLOCKS, model=name)
    try:
        probe.start()
        _round(probe, -1)
        time.sleep(max(0.0, begin_s - time.time()))  # All begin together.
        started_s = time.time()
        for number in range(ROUNDS):
            _round(probe, number)
        return started_s, time.time(), 2 * ROUNDS * BLOCKS * MIB
    finally:
        probe.close()


def _round(probe: Probe, number: int) -> None:
    names = probe.chain(1_000 + number, BLOCKS)
    assert probe.offload(names) == BLOCKS
    hit = probe.lookup(str(number), names)
    assert hit.blocks == BLOCKS, hit
    probe.start_load(str(number), range(BLOCKS))
    results = probe.wait_loads(1)
    assert all(results[0].intact), results[0].reason


async def _moved_gb_per_s(host_tiers: int) -> float:
    size = ENGINES * (ROUNDS + 2) * BLOCKS * MIB / 1e9
    overrides = {"cpu_cache_gb": size * 1.25, "host_tiers": host_tiers}
    async with Stack.private(overrides, services=("consolidator", "host-tier")) as stack:
        names = _names([str(number) for number in range(host_tiers)])
        begin_s = time.time() + 8.0
        with _pool() as pool:
            ended = await asyncio.gather(
                *(asyncio.wrap_future(pool.submit(work, name, stack.settings, begin_s))
                  for name in names)
            )  # fmt: skip
    first, last = min(one[0] for one in ended), max(one[1] for one in ended)
    return sum(one[2] for one in ended) / (last - first) / 1e9


def host_tiers() -> list[Row]:
    """The bytes of four engines, served by one host tier and by two."""
    one, two = (median(asyncio.run(_moved_gb_per_s(count)) for _ in range(3)) for count in (1, 2))
    return [_gain_row("four engines offload and onboard 1 MiB blocks, two host tiers", two,
                      unit="GB/s", reference=one, target=TIERS_TARGET)]  # fmt: skip


# --- index replicas -------------------------------------------------------------------------


def ask_hard(url: str, asked: list[bytes]) -> float:
    """As many answers a second as come."""
    return asyncio.run(_ask_hard(url, asked))


async def _ask_hard(url: str, asked: list[bytes]) -> float:
    bus = await Bus.connect(url, "asker", deadline_s=5)
    give_up_s = time.perf_counter() + ASK_S
    answers = 0

    async def ask(number: int) -> None:
        nonlocal answers
        while time.perf_counter() < give_up_s:
            await _match(bus, asked[number % len(asked)])
            answers, number = answers + 1, number + IN_FLIGHT

    async with asyncio.TaskGroup() as tasks:
        for number in range(IN_FLIGHT):
            tasks.create_task(ask(number))
    await bus.close()
    return answers / ASK_S


async def _match(bus: Bus, payload: bytes) -> None:
    reply = await bus.request(verb_subject("index", "match"), payload, deadline_s=DEADLINE_S)
    assert msgspec.json.decode(reply, type=MatchReply).matches[0].blocks == QUERY_BLOCKS


def _questions(held: list[list[str]]) -> list[bytes]:
    return [msgspec.json.encode(MatchRequest(hashes=names[:QUERY_BLOCKS])) for names in held]


async def _answers_per_s(count: int, held: list[list[str]]) -> float:
    async with living() as (server, bus, epoch):
        replicas = [Replica(server, str(number)) for number in range(count)]
        await publish(bus, epoch, 16, held)
        for replica in replicas:
            await replica.start(bus, KEPT_BLOCKS)
        with _pool() as pool:
            rates = await asyncio.gather(
                *(asyncio.wrap_future(pool.submit(ask_hard, server.url, _questions(held)))
                  for _ in range(ASKERS))
            )  # fmt: skip
        for replica in replicas:
            await replica.kill()
    return sum(rates)


def replicas() -> list[Row]:
    """Answers of one replica and of three."""
    held = chains(KEPT_BLOCKS)
    one, three = (asyncio.run(_answers_per_s(count, held)) / 1e3 for count in (1, 3))
    return [_gain_row(f"matches of {QUERY_BLOCKS} blocks, three index replicas", three,
                      unit="k answers/s", reference=one, target=REPLICAS_TARGET)]  # fmt: skip


# --- a million blocks -----------------------------------------------------------------------


class Waits(NamedTuple):
    """Milliseconds of every answer."""

    matches: list[float]
    echo: list[float]
    """Of a service that looks nothing up: what the machine and NATS make everybody wait."""


def ask_steadily(url: str, asked: list[bytes], until: Any) -> Waits:
    """Asks at a steady rate until the event is set; every eighth question is of unknown blocks."""
    return asyncio.run(_ask_steadily(url, asked, until))


async def _ask_steadily(url: str, asked: list[bytes], until: Any) -> Waits:
    bus = await Bus.connect(url, "asker", deadline_s=5)
    waits = Waits([], [])
    unknown = _questions(chains(CHAIN_BLOCKS, seed=3))[0]

    async def ask(subject: str, payload: bytes, taken: list[float]) -> None:
        started_s = time.perf_counter()
        await bus.request(subject, payload, deadline_s=DEADLINE_S)
        taken.append((time.perf_counter() - started_s) * 1e3)

    begun_s, number = time.perf_counter(), 0
    async with asyncio.TaskGroup() as tasks:
        while not until.is_set():
            payload = asked[number % len(asked)] if number % 8 else unknown
            tasks.create_task(ask(MATCH, payload, waits.matches))
            if number % 4 == 0:
                tasks.create_task(ask(index_echo.SUBJECT, payload, waits.echo))
            number += 1
            await asyncio.sleep(max(0.0, begun_s + number / ASKED_PER_S - time.perf_counter()))
    await bus.close()
    return waits


async def _told(bus: Bus, epoch: int, moved: list[list[str]]) -> None:
    """Answers for a source that was there before anybody listened: it has a snapshot."""
    root = NAMESPACE[: len(moved[0][0])]
    runs = [Run(parent=root, hashes=names) for names in moved]
    parts = [SnapshotPart(namespace=NAMESPACE, runs=runs)]
    whole = SnapshotReply(host=HOST, source=TOLD_SOURCE, tier="host", epoch=epoch, seq=1,
                          parts=parts)  # fmt: skip
    pages = SnapshotPages(lambda _request: whole)

    async def answer(payload: bytes) -> bytes:
        return pages.answer(payload)

    await bus.add_verbs("host-tier", TOLD_INSTANCE, HOST, {"snapshot": answer})


async def _moves() -> dict[str, Waits]:
    """What was answered, and how late, while a million blocks came, went and came again."""
    kept, moved = chains(KEPT_BLOCKS), chains(MOVED_BLOCKS, seed=4)
    blocks = len(moved) * CHAIN_BLOCKS
    waits: dict[str, Waits] = {}
    async with living() as (server, bus, epoch), index_echo.replicas(server.url, b"{}", 1):
        replica = Replica(server, "0")
        await publish(bus, epoch, 16, kept)
        await replica.start(bus, KEPT_BLOCKS)
        registry = NatsRegistry(bus, ttl_s=EPOCH_TTL_S)
        manager = multiprocessing.get_context("spawn").Manager()
        for what in ("is alone", "joins", "dies", "joins again", "dies", "is told by a snapshot"):
            with _pool() as pool:
                until = manager.Event()
                answers = pool.submit(ask_steadily, server.url, _questions(kept), until)
                await asyncio.sleep(2.0)  # The asker starts, and the quiet is measured, too.
                if what.startswith("joins"):
                    entry = await registry.register("host-tier", HOST, MOVED_INSTANCE)
                    await publish(bus, entry.epoch, 16, moved, source=MOVED_SOURCE)
                elif what == "dies":
                    await entry.revoke()
                elif what == "is told by a snapshot":
                    entry = await registry.register("host-tier", HOST, TOLD_INSTANCE)
                    await _told(bus, entry.epoch, moved)
                gone = what in ("is alone", "dies")
                await replica.wait_blocks(bus, KEPT_BLOCKS + (0 if gone else blocks), every_s=0.1)
                await asyncio.sleep(1.0)
                until.set()
                waits[what] = await asyncio.wrap_future(answers)
        manager.shutdown()
        await registry.close()
        await replica.kill()
    return waits


def moves() -> list[Row]:
    """How long the longest wait for an answer is."""
    rows: list[Row] = []
    for what, (matches, echo) in asyncio.run(_moves()).items():
        name = f"the longest wait for a match while a source of 1 M blocks {what}"
        if what == "is alone":
            name = "the longest wait for a match, nothing moves"
            rows.append(info_row(name, max(matches), unit="ms"))
            continue
        rows += [
            time_row(name, max(matches), unit="ms", target=STALL_MS),
            info_row("the same, p99", percentile(matches, 0.99), unit="ms"),
            info_row("the longest wait for a service that looks nothing up, in the same seconds",
                     max(echo), unit="ms"),
        ]  # fmt: skip
    return rows


def run() -> list[Row]:
    """About four minutes."""
    parts: list[Callable[[], list[Row]]] = [host_tiers, replicas, moves]
    return [row for part in parts for row in part()]
