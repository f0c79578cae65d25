"""A fleet in a box: 2,048 sources on 256 hosts, four partitions of the index, two replicas each.

The shapes of events are those of the other index benchmarks: chains of 64, 256 and 512 blocks, 16
blocks an event. Sources are simulated by one process, which shares two cores with eight replicas
and nats-server: rates are per CPU-second of the replicas, times are those of a full machine.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from statistics import median

import msgspec
from kvbm_cli.service_process import ServiceProcess
from kvbm_common.access.nats_access import nats_access
from kvbm_common.access.roles import ADMIN
from kvbm_common.config.settings import Settings
from kvbm_common.errors import KvbmError
from kvbm_common.nats.bus import Bus
from kvbm_common.nats.embedded_server import NatsServer
from kvbm_common.nats.event_publisher import EventPublisher
from kvbm_common.nats.jetstream import call_api
from kvbm_common.nats.streams import Partitions
from kvbm_common.registry.nats_entry import NatsRegistration
from kvbm_common.registry.nats_kv import NatsRegistry
from kvbm_common.wire.events import Cleared, Run, Stored, Tier
from kvbm_common.wire.index_verbs import MatchReply, MatchRequest
from kvbm_common.wire.verbs import SnapshotPart, SnapshotReply, StatsReply, verb_subject

from benchmarks import index_dynamo_zmq
from benchmarks.harness import (
    Row,
    ask_steadily,
    info_row,
    paused,
    percentile,
    processor_s,
    rate_row,
    time_row,
)
from benchmarks.index_workload import CHAIN_BLOCKS

PARTITIONS, REPLICAS = Partitions(4), 2
HOSTS, ENGINES = 256, 8
BLOCKS = 2_000_000
BATCH = 16
EVENTS_PACKED = 32
"""Events in a message to Dynamo's indexer: those of a chain, as ours are packed."""
NAMESPACE, ROOT = "0" * 64, "0" * 32
IMAGE_S = 2.0
DEADLINE_S = 120.0
SETTLE_S = 600.0
"""How long a source that is not registered counts: longer than the run."""
TTL_S = 5.0
MOVING = 32
"""Host tiers that are registered: they join, lose an event, and die."""
MOVING_BLOCKS = 512
QUERIES = 2_000
RATES = (100, 200)
QUERY_BLOCKS = 64
KILLS = 3


class Replica:
    """One index process of a partition."""

    def __init__(self, server: NatsServer, partition: int, instance: str) -> None:
        settings = Settings.load({}, {
            "nats_url": server.url, "host": "ctl", "instance": instance,
            "registry_ttl_s": SETTLE_S, "index_image_s": IMAGE_S,
            "index_partitions": PARTITIONS.count, "index_partition": partition,
        })  # fmt: skip
        self.partition, self._instance = partition, instance
        environ = os.environ | settings.as_environ()
        self.process = ServiceProcess("index", environ=environ, restart=False, log_path=None)

    async def start(self) -> None:
        """Until it serves."""
        self.process.start()
        await self.process.wait_ready(deadline_s=DEADLINE_S)

    async def stats(self, bus: Bus) -> StatsReply | None:
        """What it says of itself; nothing while it does not answer."""
        subject = verb_subject("index", "stats", host="ctl", instance=self._instance)
        try:
            return msgspec.json.decode(await bus.request(subject, b"", deadline_s=5),
                                       type=StatsReply)  # fmt: skip
        except KvbmError:
            return None

    async def blocks(self, bus: Bus) -> int:
        """Return the number of blocks that it holds; -1 while it does not answer."""
        stats = await self.stats(bus)
        return int(stats.figures["blocks"]) if stats else -1

    @property
    def cpu_s(self) -> float:
        """Processor time of the process so far."""
        return processor_s(self.process.pid)

    @property
    def resident(self) -> int:
        """Bytes of memory of the process."""
        pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")


class Crowd:
    """The sources, with what they have said."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._publishers: list[EventPublisher] = []
        self._seqs: dict[tuple[str, str], int] = {}
        self._epochs: dict[tuple[str, str], int] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self.held: dict[int, int] = dict.fromkeys(range(PARTITIONS.count), 0)
        """Blocks of each partition."""
        self.events = 0

    def begin(self) -> None:
        """Make a publisher for each partition: engines share one, as a consolidator's do."""
        for number in range(PARTITIONS.count):
            publisher = self._bus.event_publisher("crowd", spec=PARTITIONS.events(number))
            self._publishers.append(publisher)
            self._tasks.append(asyncio.create_task(publisher.run()))

    def store(
        self, host: str, source: str, names: list[str], *, epoch: int = 0, lose: bool = False
    ) -> None:
        """Say that a source has a chain, from the root on, 16 blocks an event.

        Epochs of sources with one publisher differ: with them it tells messages apart.
        """
        partition = PARTITIONS.of(host)
        tier: Tier = "device" if source.startswith("engine") else "host"
        key = (host, source)
        epoch = epoch or self._epochs.setdefault(key, len(self._epochs) + 1)
        if key not in self._seqs:
            self._seqs[key] = 1
            first = Cleared(host=host, source=source, tier=tier, epoch=epoch, seq=1, ts_ms=0)
            self._publishers[partition].publish_event(first)
        for at in range(0, len(names), BATCH):
            self._seqs[key] += 1
            self.events += 1
            run = Run(parent=names[at - 1] if at else ROOT, hashes=names[at : at + BATCH])
            event = Stored(host=host, source=source, tier=tier, epoch=epoch, seq=self._seqs[key],
                           ts_ms=0, namespace=NAMESPACE, runs=[run])  # fmt: skip
            if not lose:
                self._publishers[partition].publish_event(event)
        self.held[partition] += len(names)

    def seq(self, host: str, source: str) -> int:
        """Return the last event that a source has said."""
        return self._seqs[host, source]

    async def breathe(self) -> None:
        """Wait while too much waits for NATS."""
        while sum(one.pending for one in self._publishers) > 4_096:  # noqa: ASYNC110
            await asyncio.sleep(0.001)

    async def flush(self) -> None:
        """Until the streams have everything."""
        for publisher in self._publishers:
            await publisher.flush(deadline_s=DEADLINE_S)

    def end(self) -> None:
        """Say nothing more."""
        for task in self._tasks:
            task.cancel()


def chains(blocks: int) -> Iterator[tuple[str, str, list[str]]]:
    """(host, engine, names of the blocks): every engine of every host in turn."""
    rng = random.Random(3)
    made = number = 0
    while made < blocks:
        length = CHAIN_BLOCKS[number % len(CHAIN_BLOCKS)]
        packed = rng.randbytes(16 * length).hex()
        engine, host = divmod(number % (HOSTS * ENGINES), HOSTS)
        names = [packed[at : at + 32] for at in range(0, len(packed), 32)]
        yield f"gpu-{host}", f"engine-{engine}", names
        made += length
        number += 1


class Fleet:
    """NATS, the replicas, and the crowd."""

    def __init__(self, server: NatsServer, bus: Bus) -> None:
        self.bus, self.crowd = bus, Crowd(bus)
        self.replicas = [
            Replica(server, partition, f"{partition}{letter}")
            for letter in "ab"[:REPLICAS]
            for partition in range(PARTITIONS.count)
        ]

    @classmethod
    @asynccontextmanager
    async def living(cls) -> AsyncIterator[Fleet]:
        """A fleet that has said nothing yet."""
        async with AsyncExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvbm-bench-"))
            server = await stack.enter_async_context(NatsServer(Path(folder), store_bytes=8 << 30))
            given = {"nats_url": server.url, "index_partitions": PARTITIONS.count}
            access = nats_access(Settings.load({}, given), ADMIN)
            bus = await Bus.connect(access, "fleet", deadline_s=5)
            stack.push_async_callback(bus.close)
            fleet = cls(server, bus)
            for replica in fleet.replicas:
                stack.push_async_callback(replica.process.end, signal.SIGKILL, deadline_s=5)
                await replica.start()
            fleet.crowd.begin()
            stack.callback(fleet.crowd.end)
            yield fleet

    async def wait_held(self, *, every_s: float = 0.05) -> None:
        """Until each replica holds what its partition has said."""
        async with asyncio.timeout(DEADLINE_S):
            for replica in self.replicas:
                while await replica.blocks(self.bus) != self.crowd.held[replica.partition]:  # noqa: ASYNC110
                    await asyncio.sleep(every_s)


async def _applied(fleet: Fleet) -> tuple[list[Row], list[list[str]], float]:
    """Fill the streams while all replicas are stopped, then measure how each reads its part."""
    before_s = [replica.cpu_s for replica in fleet.replicas]
    empty = [replica.resident for replica in fleet.replicas]
    kept: list[list[str]] = []
    with ExitStack() as still:
        for replica in fleet.replicas:
            still.enter_context(paused(replica.process.pid))
        for host, engine, names in chains(BLOCKS):
            fleet.crowd.store(host, engine, names)
            await fleet.crowd.breathe()
            if len(names) == max(CHAIN_BLOCKS) and len(kept) < 500:
                kept.append(names)
        await fleet.crowd.flush()
    await fleet.wait_held(every_s=0.2)
    spent_s = sum(replica.cpu_s for replica in fleet.replicas) - sum(before_s)
    blocks = sum(fleet.crowd.held.values())
    grown = sum(replica.resident for replica in fleet.replicas) - sum(empty)
    kept_bytes = 0
    for number in range(PARTITIONS.count):
        said = await call_api(fleet.bus, f"STREAM.INFO.{PARTITIONS.events(number).name}")
        kept_bytes += msgspec.json.decode(said)["state"]["bytes"]
    theirs = []
    for _ in range(3):
        count, dynamo_s = index_dynamo_zmq.stored_cpu_s(BATCH, 500_000, events=EVENTS_PACKED)
        theirs.append(count / BATCH / dynamo_s / 1e3)
    rate = REPLICAS * fleet.crowd.events / spent_s / 1e3
    rows = [
        rate_row(f"{HOSTS * ENGINES:,} sources, {PARTITIONS.count} partitions: events applied per "
                 f"CPU-second, {BATCH} blocks each (reference: Dynamo's indexer, which also names "
                 "the blocks)", rate,
                 unit="thousand", reference=median(theirs), target=1.0),
        info_row("the same, blocks per CPU-second", rate * BATCH / 1e3, unit="million"),
        info_row("memory of a replica for each block", grown / blocks / REPLICAS, unit="B"),
        info_row("room in the streams for each block", kept_bytes / blocks, unit="B"),
    ]  # fmt: skip
    return rows, kept, rate


async def _matches(fleet: Fleet, kept: list[list[str]], rate: int) -> tuple[list[float], int]:
    """Seconds of each question at a steady rate, and how many answers lacked a partition."""
    asked = [msgspec.json.encode(MatchRequest(hashes=names[:QUERY_BLOCKS])) for names in kept]
    ask = partial(fleet.bus.request, verb_subject("index", "match"), deadline_s=10)
    seconds, answers = await ask_steadily(ask, asked, count=QUERIES, per_s=rate)
    replies = [msgspec.json.decode(reply, type=MatchReply) for reply in answers]
    assert all(one.missing or one.matches[0].blocks == QUERY_BLOCKS for one in replies)
    return seconds, sum(bool(one.missing) for one in replies)


async def _kills(fleet: Fleet) -> Row:
    """A replica dies; the next life of it is identical when its positions are its sibling's."""
    seconds = []
    await asyncio.sleep(2 * IMAGE_S)  # Images of everything: the writer needs its interval.
    for victim, sibling in list(zip(fleet.replicas, fleet.replicas[PARTITIONS.count :],
                                    strict=False))[:KILLS]:  # fmt: skip
        wanted = await sibling.stats(fleet.bus)
        assert wanted is not None
        await victim.process.end(signal.SIGKILL, deadline_s=5)
        started_s = time.perf_counter()
        await victim.start()
        async with asyncio.timeout(DEADLINE_S):
            while True:
                said = await victim.stats(fleet.bus)
                if said is not None and said.positions == wanted.positions \
                        and said.figures["blocks"] == wanted.figures["blocks"]:  # fmt: skip
                    break
                await asyncio.sleep(0.005)
        seconds.append(time.perf_counter() - started_s)
    blocks = sum(fleet.crowd.held.values()) // PARTITIONS.count
    return time_row(f"kill -9 of a replica of {blocks / 1e6:.1f} M blocks, until it is identical",
                    median(seconds), unit="s", target=2.0)  # fmt: skip


async def _moves(fleet: Fleet) -> list[Row]:
    """Host tiers join, lose an event, and die, all at once each time."""
    registry = NatsRegistry(fleet.bus, ttl_s=TTL_S)
    rng, lives, held = random.Random(4), dict[str, NatsRegistration](), dict[str, list[str]]()
    times: list[float] = []

    def chain() -> list[str]:
        packed = rng.randbytes(16 * MOVING_BLOCKS).hex()
        return [packed[at : at + 32] for at in range(0, len(packed), 32)]

    async def timed() -> None:
        started_s = time.perf_counter()
        await fleet.crowd.flush()
        await fleet.wait_held(every_s=0.02)
        times.append(time.perf_counter() - started_s)

    for number in range(MOVING):
        host = f"gpu-{number}"
        lives[host] = await registry.register("host-tier", host, "0")
        held[host] = chain()

        async def snapshot(_: bytes, host: str = host) -> bytes:
            part = SnapshotPart(
                namespace=NAMESPACE, runs=[Run(parent=ROOT, hashes=one) for one in
                                           (held[host][:MOVING_BLOCKS], held[host][MOVING_BLOCKS:])
                                           if one])  # fmt: skip
            reply = SnapshotReply(host=host, source="host-tier-0", tier="host",
                                  epoch=lives[host].epoch, parts=[part],
                                  seq=fleet.crowd.seq(host, "host-tier-0"))  # fmt: skip
            return msgspec.json.encode(reply)

        await fleet.bus.add_verbs("host-tier", "0", host, {"snapshot": snapshot})
    for host, life in lives.items():
        fleet.crowd.store(host, "host-tier-0", held[host], epoch=life.epoch)
    await timed()
    for host, life in lives.items():
        more = chain()
        held[host] += more
        fleet.crowd.store(host, "host-tier-0", more[:-BATCH], epoch=life.epoch, lose=True)
        fleet.crowd.store(host, "host-tier-0", more[-BATCH:], epoch=life.epoch)
    await timed()
    for host, life in lives.items():
        await life.revoke()
        fleet.crowd.held[PARTITIONS.of(host)] -= 2 * MOVING_BLOCKS
    await timed()
    await registry.close()
    names = ("join, each with 512 blocks", "lose 31 events of 32 and are asked for snapshots",
             "leave")  # fmt: skip
    return [
        info_row(f"{MOVING} sources {name}: until every replica knows", one, unit="s")
        for name, one in zip(names, times, strict=True)
    ]


async def _run() -> list[Row]:
    async with Fleet.living() as fleet:
        rows, kept, _ = await _applied(fleet)
        for rate in RATES:
            seconds, lacking = await _matches(fleet, kept, rate)
            name = f"match of {QUERY_BLOCKS} blocks in all partitions, p99 at {rate:,} a second"
            value = percentile(seconds, 0.99) * 1e3
            rows += [
                time_row(name, value, unit="ms", target=3.0),
                info_row("the same, p50", percentile(seconds, 0.5) * 1e3, unit="ms"),
                info_row("the same, answers that lacked a partition", 100 * lacking / QUERIES,
                         unit="%"),
            ]  # fmt: skip
        rows.append(await _kills(fleet))
        rows += await _moves(fleet)
        return rows


def run() -> list[Row]:
    """About two minutes."""
    return asyncio.run(_run())
