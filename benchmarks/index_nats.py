"""The index as it runs: replicas on a real NATS, from the stream and from an image, and questions.

And Dynamo's stand-alone indexer from the same wheel as RadixTree, fed over ZMQ as vLLM would.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from statistics import median

import msgspec
from kvbm_cli.service_process import ServiceProcess
from kvbm_common.config.settings import Settings
from kvbm_common.errors import KvbmError
from kvbm_common.nats.bus import Bus
from kvbm_common.nats.embedded_server import NatsServer
from kvbm_common.registry.nats_kv import NatsRegistry
from kvbm_common.wire.events import Cleared, Run, Stored
from kvbm_common.wire.index_verbs import MatchReply, MatchRequest
from kvbm_common.wire.verbs import StatsReply, verb_subject

from benchmarks import index_dynamo_zmq, index_echo, index_path
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

HOST, SOURCE, NAMESPACE = "gpu-a", "host-tier-0", "0" * 64
EPOCH_TTL_S = 30.0
CHAIN_BLOCKS = 512
BLOCKS = 1_000_000
WINDOW_EVENTS = 4_096
"""Events that wait in the publisher's outbox: half of what it takes."""
DEADLINE_S = 120.0
QUERIES_PER_S = 2_000
QUERIES = 10_000
QUERY_BLOCKS = 64
MATCH = verb_subject("index", "match")
IMAGE_S = 2.0
"""How often an image is written where one is waited for."""
READY_S = 2.0
BATCHES = {1: 500_000, 16: 500_000, 64: 1_000_000}
"""Blocks per event, and how many are enough for seconds of work."""
ALONE = 50_000
"""Events that each have a message of their own."""
ROUNDS = 3
REPLAYED_PER_S = 300_000


class Replica:
    """One index process."""

    def __init__(self, server: NatsServer, instance: str, *, image_s: float | None = None) -> None:
        given = {"nats_url": server.url, "host": HOST, "instance": instance,
                 "registry_ttl_s": EPOCH_TTL_S}  # fmt: skip
        if image_s is not None:
            given["index_image_s"] = image_s
        settings = Settings.load({}, given)
        self._instance = instance
        self._process = ServiceProcess(
            "index", environ=os.environ | settings.as_environ(), restart=False, log_path=None
        )

    async def start(self, bus: Bus, blocks: int) -> float:
        """Seconds until it serves, and holds so many blocks."""
        started_s = time.perf_counter()
        self._process.start()
        await self._process.wait_ready(deadline_s=DEADLINE_S)
        await self.wait_blocks(bus, blocks, every_s=0.005)
        return time.perf_counter() - started_s

    async def wait_blocks(self, bus: Bus, blocks: int, *, every_s: float) -> None:
        """Until it holds so many; nobody announces it."""
        async with asyncio.timeout(DEADLINE_S):
            while await self.blocks(bus) != blocks:  # noqa: ASYNC110
                await asyncio.sleep(every_s)

    async def blocks(self, bus: Bus) -> int:
        """What it holds."""
        subject = verb_subject("index", "stats", host=HOST, instance=self._instance)
        try:
            reply = await bus.request(subject, b"", deadline_s=5)
        except KvbmError:
            return -1
        return int(msgspec.json.decode(reply, type=StatsReply).figures["blocks"])

    @property
    def pid(self) -> int:
        """Of its process."""
        return self._process.pid

    @property
    def cpu_s(self) -> float:
        """Processor time of the process so far."""
        return processor_s(self.pid)

    async def kill(self) -> None:
        """Without a word."""
        await self._process.end(signal.SIGKILL, deadline_s=5)


def chains(blocks: int, *, seed: int = 2) -> list[list[str]]:
    """Names of the same length, in hex."""
    rng = random.Random(seed)
    packed = [rng.randbytes(16 * CHAIN_BLOCKS).hex() for _ in range(-(-blocks // CHAIN_BLOCKS))]
    return [[one[at : at + 32] for at in range(0, len(one), 32)] for one in packed]


@asynccontextmanager
async def living() -> AsyncIterator[tuple[NatsServer, Bus, int]]:
    """A NATS, and the epoch of a source that is registered there."""
    async with AsyncExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvbm-bench-"))
        server = await stack.enter_async_context(NatsServer(Path(directory)))
        bus = await Bus.connect(server.url, "bench", deadline_s=5)
        stack.push_async_callback(bus.close)
        registry = NatsRegistry(bus, ttl_s=EPOCH_TTL_S)
        registration = await registry.register("host-tier", HOST, "0")
        stack.push_async_callback(registry.close)
        yield server, bus, registration.epoch


async def publish(
    bus: Bus,
    epoch: int,
    batch: int,
    held: list[list[str]],
    *,
    source: str = SOURCE,
    packs: bool = True,
) -> None:
    """Announce chains, so many blocks an event. What comes in one turn is packed, or it is JSON."""
    bus.packs_events = lambda: packs
    publisher = bus.event_publisher(source)
    running = asyncio.create_task(publisher.run())
    first = Cleared(host=HOST, source=source, tier="host", epoch=epoch, seq=1, ts_ms=0)
    publisher.publish_event(first)
    seq = 1
    for names in held:
        for at in range(0, len(names), batch):
            seq += 1
            run = Run(parent=names[at - 1] if at else "0" * 32, hashes=names[at : at + batch])
            event = Stored(host=HOST, source=source, tier="host", epoch=epoch, seq=seq, ts_ms=0,
                           namespace=NAMESPACE, runs=[run])  # fmt: skip
            publisher.publish_event(event)
        while publisher.pending > WINDOW_EVENTS:  # noqa: ASYNC110 - the publisher never waits.
            await asyncio.sleep(0.001)
    await publisher.flush(deadline_s=DEADLINE_S)
    running.cancel()


async def _stored_cpu_s(batch: int, blocks: int, *, packs: bool = True) -> tuple[int, float]:
    held = chains(blocks)
    count = len(held) * CHAIN_BLOCKS
    async with living() as (server, bus, epoch):
        replica = Replica(server, "0")
        await replica.start(bus, 0)
        before_s = replica.cpu_s
        with paused(replica.pid):
            await publish(bus, epoch, batch, held, packs=packs)
        await replica.wait_blocks(bus, count, every_s=0.1)
        spent_s = replica.cpu_s - before_s
        await replica.kill()
    return count, spent_s


def alone() -> list[Row]:
    """Processor seconds of one process that hears of blocks: ours on NATS, Dynamo's on ZMQ.

    Both find everything waiting when they begin, so that neither waits for a publisher.
    """
    rows = []
    for batch, blocks in BATCHES.items():
        ours, theirs = [], []
        for _ in range(ROUNDS):
            count, spent_s = asyncio.run(_stored_cpu_s(batch, blocks))
            ours.append(count / spent_s / 1e6)
            count, spent_s = index_dynamo_zmq.stored_cpu_s(batch, blocks)
            theirs.append(count / spent_s / 1e6)
        rows.append(rate_row(f"stored over the network, {batch} blocks per event", median(ours),
                             unit="M blocks/s", reference=median(theirs),
                             target=2.0 if batch == 1 else 1.0))  # fmt: skip
    count, spent_s = asyncio.run(_stored_cpu_s(1, ALONE, packs=False))
    rows.append(info_row("the same, 1 block per event, each with a message of JSON",
                         count / spent_s / 1e6, unit="M blocks/s"))  # fmt: skip
    return rows


async def restarts(batch: int = 16) -> list[Row]:
    """Replay, image, and questions to two replicas."""
    held = chains(BLOCKS)
    blocks = len(held) * CHAIN_BLOCKS
    async with living() as (server, bus, epoch):
        await publish(bus, epoch, batch, held)
        first, writer = Replica(server, "0"), Replica(server, "1", image_s=IMAGE_S)
        replay_s = await first.start(bus, blocks)
        await writer.start(bus, blocks)
        await _wait_image(bus)
        await writer.kill()
        image_s = await writer.start(bus, blocks)
        # It writes another one while it is asked: none has been written by this life of it.
        writing_s, reply = await _queries(bus, held)
        await writer.kill()
        second = Replica(server, "2")
        await second.start(bus, blocks)
        queries_s, _ = await _queries(bus, held)
        for replica in (first, second):
            await replica.kill()
        async with index_echo.replicas(server.url, reply):
            echoes_s, _ = await _queries(bus, held, index_echo.SUBJECT)
    return [
        rate_row(f"replay, {batch} blocks per event, with the start of the process",
                 blocks / replay_s / 1e6, unit="M blocks/s", target=REPLAYED_PER_S / 1e6),
        time_row("start from an image of 1 M blocks", image_s, unit="s", target=READY_S),
        time_row(f"match of {QUERY_BLOCKS} blocks over NATS, two replicas, p99 at 2,000 a second",
                 percentile(queries_s, 0.99) * 1e3, unit="ms", target=3.0),
        info_row("the same, p50", percentile(queries_s, 0.5) * 1e3, unit="ms"),
        info_row("the same, p99, an image of 1 M blocks is written meanwhile",
                 percentile(writing_s, 0.99) * 1e3, unit="ms"),
        info_row("the same, p99, from two processes that answer without looking",
                 percentile(echoes_s, 0.99) * 1e3, unit="ms"),
    ]  # fmt: skip


async def _wait_image(bus: Bus) -> None:
    from kvbm_common.nats.object_store import ObjectStore
    from kvbm_index.shell.image_store import BUCKET, BUCKET_BYTES_MAX, NAME

    store = ObjectStore(bus, BUCKET, bytes_max=BUCKET_BYTES_MAX)
    async with asyncio.timeout(DEADLINE_S):
        while await store.info(NAME) is None:  # noqa: ASYNC110 - nobody announces it.
            await asyncio.sleep(0.05)


async def _queries(
    bus: Bus, held: list[list[str]], subject: str = MATCH
) -> tuple[list[float], bytes]:
    """Seconds of each question at a steady rate, and an answer."""
    asked = [msgspec.json.encode(MatchRequest(hashes=names[:QUERY_BLOCKS])) for names in held[:500]]
    ask = partial(bus.request, subject, deadline_s=5)
    seconds, answers = await ask_steadily(ask, asked, count=QUERIES, per_s=QUERIES_PER_S)
    for reply in answers:
        assert msgspec.json.decode(reply, type=MatchReply).matches[0].blocks == QUERY_BLOCKS
    return seconds, answers[-1]


def run() -> list[Row]:
    """About three minutes."""
    return [*alone(), *asyncio.run(restarts()), *index_path.run()]
