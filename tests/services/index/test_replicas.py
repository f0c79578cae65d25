"""Replicas on a real NATS: each complete, killed at any moment, back from an image and equal."""

from __future__ import annotations

import asyncio
import base64
import os
import random
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Protocol

import msgspec
import pytest
from kvbm_cli.service_process import ServiceProcess
from kvbm_common.config.settings import Settings
from kvbm_common.errors import KvbmError
from kvbm_common.identity import SequenceHash
from kvbm_common.nats.bus import Bus
from kvbm_common.nats.embedded_server import NatsServer
from kvbm_common.nats.jetstream import call_api
from kvbm_common.nats.object_store import ObjectStore
from kvbm_common.nats.streams import EVENTS
from kvbm_common.wire.index_verbs import DumpReply
from kvbm_common.wire.verbs import StatsReply, verb_subject
from kvbm_index.core.image import Image, SourceImage, pack
from kvbm_index.shell.image_store import BUCKET, BUCKET_BYTES_MAX, NAME

from tests.services.index.shell.test_service import CHAIN, Source
from tests.waiting import ask_until

DEADLINE_S = 30.0
KILLS = int(os.environ.get("KVBM_TEST_KILLS", "1000"))
IMAGE_S = 0.1
"""So often that many a replica dies while it writes one."""


class Holding(Protocol):
    """A source that knows what it holds."""

    @property
    def name(self) -> str:
        """As the index calls it."""

    @property
    def held(self) -> list[SequenceHash]:
        """Its blocks."""


class Replica:
    """One index process."""

    def __init__(self, server: NatsServer, instance: str, directory: Path) -> None:
        settings = Settings.load(
            {},
            {"nats_url": server.url, "host": "h", "instance": instance, "registry_ttl_s": 5.0,
             "index_image_s": IMAGE_S},
        )  # fmt: skip
        self.instance = instance
        self._process = ServiceProcess(
            "index",
            environ=os.environ | settings.as_environ(),
            restart=False,
            log_path=directory / f"index-{instance}.log",
        )

    async def start(self) -> None:
        """Until it serves."""
        self._process.start()
        await self._process.wait_ready(deadline_s=DEADLINE_S)

    @property
    def pid(self) -> int:
        """Of its process."""
        return self._process.pid

    async def kill(self) -> None:
        """Without a word."""
        await self._process.end(signal.SIGKILL, deadline_s=5)

    async def ask(self, bus: Bus, verb: str) -> bytes:
        """A verb of this replica."""
        subject = verb_subject("index", verb, host="h", instance=self.instance)
        return await bus.request(subject, b"", deadline_s=5)

    async def held(self, bus: Bus) -> dict[str, set[str]]:
        """What it believes that each source holds; empty while it does not answer."""
        try:
            reply = msgspec.json.decode(await self.ask(bus, "dump"), type=DumpReply)
        except KvbmError:
            return {}
        return {holder.source: set(holder.hashes) for holder in reply.holders}

    async def wait_equal(self, bus: Bus, sources: Sequence[Holding]) -> None:
        """Until it believes what is true, of all sources."""
        truth = {
            source.name: {block.hex() for block in source.held} for source in sources if source.held
        }

        async def equal() -> bool:
            return await self.held(bus) == truth

        try:
            await ask_until(equal, deadline_s=DEADLINE_S)
        except TimeoutError:
            pytest.fail(await self._difference(bus, await self.held(bus), truth))

    async def _difference(
        self, bus: Bus, held: dict[str, set[str]], truth: dict[str, set[str]]
    ) -> str:
        """What it believes, and should not or should."""
        names = held.keys() | truth.keys()
        wrong = {
            name: (held.get(name, set()) - truth.get(name, set()),
                   truth.get(name, set()) - held.get(name, set()))
            for name in names
        }  # fmt: skip
        stats = (await self.ask(bus, "stats")).decode()
        return f"replica {self.instance}: too much, too little: {wrong}; {stats}"


@asynccontextmanager
async def replicas(server: NatsServer, directory: Path, count: int) -> AsyncIterator[list[Replica]]:
    """Running replicas."""
    found = [Replica(server, str(number), directory) for number in range(count)]
    try:
        for replica in found:
            await replica.start()
        yield found
    finally:
        for replica in found:
            await replica.kill()


async def image_position(bus: Bus) -> int:
    """Where the newest image is; 0 while there is none."""
    info = await ObjectStore(bus, BUCKET, bytes_max=BUCKET_BYTES_MAX).info(NAME)
    return int(info.metadata["position"]) if info else 0


async def wait_image(bus: Bus, position: int) -> None:
    """Until there is an image of this position, or a later one."""

    async def there() -> bool:
        return await image_position(bus) >= position

    await ask_until(there, deadline_s=DEADLINE_S)


@pytest.mark.slow
async def test_a_replica_starts_from_the_image_without_asking(
    nats_server: NatsServer, bus: Bus, tmp_path: Path
) -> None:
    """Goal: history that the stream has dropped is in the image; no source is asked for it.

    1. Events, and an image of them. 2. The stream drops them. 3. Another replica is equal, with
    what came later on top.
    """
    async with Source.living(bus) as source, replicas(nats_server, tmp_path, 1) as (first,):
        source.store(CHAIN[:6])
        source.remove([CHAIN[2]])
        await first.wait_equal(bus, [source])
        await wait_image(bus, 3)
        await first.kill()
        await call_api(bus, f"STREAM.PURGE.{EVENTS.name}")
        source.store(CHAIN[6:])
        await first.start()
        await first.wait_equal(bus, [source])
        assert source.snapshots == 0


SOURCE = SourceImage(host="h", source="s", epoch=1, seq=1, state="CURRENT", needs_snapshot=False)


@pytest.mark.parametrize(("stream", "sources"), [("", []), ("x", []), ("2026-01-01", [SOURCE] * 2)])
async def test_an_index_starts_without_a_garbled_image(
    nats_server: NatsServer, bus: Bus, tmp_path: Path, stream: str, sources: list[SourceImage]
) -> None:
    """It reads the stream from its start: the image is of none, of no time, or names one twice."""
    store = ObjectStore(bus, BUCKET, bytes_max=BUCKET_BYTES_MAX)
    content = pack(Image(stream=stream, position=0, sources=sources, holders=[]))
    await store.put(NAME, content, nuid="garbled", metadata={"stream": stream, "position": "0"})
    async with Source.living(bus) as source, replicas(nats_server, tmp_path, 1) as (first,):
        source.store(CHAIN)
        await first.wait_equal(bus, [source])


@pytest.mark.parametrize("time", ["2026-01-01", "x"])
async def test_an_index_writes_an_image_in_the_place_of_one_of_another_time(
    nats_server: NatsServer, bus: Bus, tmp_path: Path, time: str
) -> None:
    """What was written without a zone, or at no time, is as old as can be."""
    store = ObjectStore(bus, BUCKET, bytes_max=BUCKET_BYTES_MAX)
    info = await store.put(NAME, b"x", nuid="x", metadata={"stream": "x", "position": "0"})
    description = msgspec.json.encode(msgspec.structs.replace(info, mtime=time))
    name = base64.urlsafe_b64encode(NAME.encode()).decode()
    await bus.request_raw(f"$O.{BUCKET}.M.{name}", description, deadline_s=2)
    async with Source.living(bus) as source, replicas(nats_server, tmp_path, 1):
        source.store(CHAIN)
        await wait_image(bus, 1)


@pytest.mark.slow
async def test_an_image_of_another_stream_is_checked_with_the_sources(
    nats_server: NatsServer, bus: Bus, tmp_path: Path
) -> None:
    """1. An image. 2. The index dies, the stream is deleted under it, events are lost. 3. Equal."""
    async with Source.living(bus) as source, replicas(nats_server, tmp_path, 1) as (first,):
        source.store(CHAIN[:6])
        await first.wait_equal(bus, [source])
        await wait_image(bus, 2)
        await first.kill()
        source.store(CHAIN[6:8], lose=True)
        await call_api(bus, f"STREAM.DELETE.{EVENTS.name}")
        await first.start()
        await first.wait_equal(bus, [source])
        assert source.snapshots == 1


@pytest.mark.slow
async def test_each_replica_is_complete(nats_server: NatsServer, bus: Bus, tmp_path: Path) -> None:
    """Whoever of the queue group answers knows everything."""
    async with Source.living(bus) as source, replicas(nats_server, tmp_path, 2) as both:
        source.store(CHAIN)
        for replica in both:
            await replica.wait_equal(bus, [source])
            stats = msgspec.json.decode(await replica.ask(bus, "stats"), type=StatsReply)
            assert stats.figures["blocks"] == len(CHAIN)


@pytest.mark.parametrize(
    "kills",
    [pytest.param(4), pytest.param(KILLS, marks=[pytest.mark.slow, pytest.mark.timeout(7_200)])],
)
async def test_replicas_are_killed_over_a_running_stream(
    nats_server: NatsServer, bus: Bus, tmp_path: Path, kills: int
) -> None:
    """Goal: however often replicas die, they come back equal to what the sources hold.

    1. Three sources change all the time. 2. One of two replicas dies at a random moment, while
    events come and images are written, and starts again. 3. The sources pause: both are equal.
    """
    rng = random.Random(kills)
    async with AsyncExitStack() as stack:
        sources = [
            await stack.enter_async_context(Source.living(bus, instance=str(number)))
            for number in range(3)
        ]
        both = await stack.enter_async_context(replicas(nats_server, tmp_path, 2))
        for _ in range(kills):
            going = asyncio.create_task(_change(sources, rng))
            await asyncio.sleep(rng.uniform(0, 0.3))
            victim = rng.choice(both)
            await victim.kill()
            await victim.start()
            going.cancel()
            await asyncio.wait({going})
            for replica in both:
                await replica.wait_equal(bus, sources)


async def _change(sources: list[Source], rng: random.Random) -> None:
    """Until cancelled, about 500 events a second."""
    while True:
        source = rng.choice(sources)
        at = rng.randrange(len(CHAIN))
        part: list[SequenceHash] = CHAIN[at : at + rng.randint(1, 4)]
        missing = [block for block in part if block not in source.held]
        if missing and rng.random() < 0.6:
            for block in missing:
                source.store([block])
        else:
            source.remove(part)
        await asyncio.sleep(0.002)
