"""A store that is full, and a stream that is too small: said, survived, and healed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from kvbm_common.config.settings import Settings
from kvbm_common.identity import SequenceHash
from kvbm_common.nats.bus import Bus
from kvbm_common.nats.embedded_server import NatsServer
from kvbm_common.nats.jetstream import JetStreamError, call_api, ensure_stream, publish_acknowledged
from kvbm_common.nats.streams import CONSOLIDATED, EVENTS
from kvbm_common.service.process import serve
from kvbm_common.wire.verbs import verb_subject
from kvbm_connectors.consolidator.shell.service import serve_consolidator
from kvbm_index.shell.service import serve_index

from tests.connectors.consolidator.shell.test_service import (
    Engine,
    running,
    settings_of,
    wait_agreed,
    wait_for,
)
from tests.services.index.shell.test_service import CHAIN, Source, held_by_index
from tests.services.index.test_replicas import replicas
from tests.waiting import stop_child

STORE_BYTES = 32 * 1024 * 1024
FILLER = {"name": "FILLER", "subjects": ["filler"], "retention": "limits", "discard": "new",
          "storage": "file", "num_replicas": 1, "max_bytes": -1}  # fmt: skip
IMAGE_S = 0.1


@pytest.fixture
async def small_nats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[NatsServer]:
    """A NATS with little room, of which our streams have reserved nothing."""
    monkeypatch.setattr("kvbm_common.nats.embedded_server.STORE_BYTES_MIN", STORE_BYTES)
    async with NatsServer(tmp_path / "small") as server:
        bus = await Bus.connect(server.url, "make")
        for spec in (EVENTS, CONSOLIDATED):
            await ensure_stream(bus, replace(spec, bytes_max=-1))
        await bus.close()
        yield server


@pytest.fixture
async def small_bus(small_nats: NatsServer) -> AsyncIterator[Bus]:
    """A connection to it."""
    connection = await Bus.connect(small_nats.url, "test")
    yield connection
    await connection.close()


async def fill(bus: Bus) -> None:
    """Until JetStream takes nothing more."""
    await call_api(bus, "STREAM.CREATE.FILLER", FILLER)
    for size in (1024 * 1024, 1024, 1):
        with pytest.raises(JetStreamError):
            await fill_with(bus, bytes(size))
    with pytest.raises(JetStreamError):
        await publish_acknowledged(bus, EVENTS, "kvbm.v1.events.h.nobody.stored", b"{}")


async def fill_with(bus: Bus, payload: bytes) -> None:
    """As many as go in."""
    for _ in range(STORE_BYTES // 1024):
        await publish_acknowledged(bus, replace(EVENTS, name="FILLER"), "filler", payload)


async def images(bus: Bus) -> dict[str, float]:
    """Images of the index that were written, and those that failed."""
    subject = verb_subject("index", "metrics", host="h", instance="0")
    families = msgspec.json.decode(await bus.request(subject, b"", deadline_s=2.0))["families"]
    return {
        family["name"]: sum(sample["value"] for sample in family["samples"])
        for family in families
        if family["name"].startswith("kvbm_index_image")
    }


async def test_the_index_lives_with_a_full_store(small_nats: NatsServer, small_bus: Bus) -> None:
    """1. The store is full: events wait at their source, no image is written, and that is counted;
    the index answers. 2. There is room again: it knows everything, without a snapshot for a hole.
    """
    settings = Settings.load(
        {}, {"nats_url": small_nats.url, "host": "h", "registry_ttl_s": 30.0,
             "index_image_s": IMAGE_S},
    )  # fmt: skip
    stopping = asyncio.Event()
    async with (
        running(serve("index", serve_index, settings, stopping), stopping=stopping),
        Source.living(small_bus) as source,
    ):
        source.store(CHAIN[:4])
        await wait_for(lambda: held_by_index(small_bus), {one.hex() for one in CHAIN[:4]})
        await fill(small_bus)
        source.store(CHAIN[4:8])

        async def failed() -> bool:
            return (await images(small_bus)).get("kvbm_index_image_failures_total", 0) > 0

        await wait_for(failed, True)
        assert await held_by_index(small_bus) == {one.hex() for one in CHAIN[:4]}
        await call_api(small_bus, "STREAM.DELETE.FILLER")
        await wait_for(lambda: held_by_index(small_bus), {one.hex() for one in CHAIN[:8]})
        assert source.snapshots == 0


async def test_the_consolidator_lives_with_a_full_store(
    small_nats: NatsServer, small_bus: Bus, tmp_path: Path
) -> None:
    """1. The store is full while an engine stores, evicts and clears. 2. There is room again: the
    index believes what the engine holds.
    """
    settings = settings_of(small_nats, tmp_path)
    stopping = asyncio.Event()
    services = (
        serve("consolidator", serve_consolidator, settings, stopping),
        serve("index", serve_index, settings, stopping),
    )
    async with running(*services, stopping=stopping):
        engine = Engine(settings)
        try:
            await engine.attach()
            engine.keep_attached()
            device = engine.device
            await engine.publish(device.store((1, 2, 3, 4), 0))
            await wait_agreed(small_bus, engine)
            await fill(small_bus)
            await engine.publish(device.store((7, 8), 0), device.evict(0))
            await engine.publish(device.clear(), device.store((5, 6, 7, 8), 0))
            subject = verb_subject("consolidator", "stats", host="h", instance="0")
            await small_bus.request(subject, b"", deadline_s=2.0)
            await call_api(small_bus, "STREAM.DELETE.FILLER")
            await wait_agreed(small_bus, engine)
        finally:
            await engine.close()


@pytest.mark.slow
async def test_a_reader_that_a_small_stream_outruns_asks_the_sources(
    nats_server: NatsServer, bus: Bus, tmp_path: Path
) -> None:
    """Goal: a source's last event is dropped unread, and no other follows that shows the hole.

    1. The index stands still. 2. One source stores a last time; another one floods the stream.
    3. The index goes on: it is equal, for it has asked.
    """
    await ensure_stream(bus, replace(EVENTS, bytes_max=2 * 1024 * 1024))
    nothing = [SequenceHash(bytes([255]) * 16)] * 2_000

    def flood(source: Source) -> None:
        for _ in range(200):
            source.remove(nothing)

    def last(source: Source) -> None:
        source.store(CHAIN[4:])

    async with (
        Source.living(bus, instance="0") as quiet,
        Source.living(bus, instance="1") as loud,
        replicas(nats_server, tmp_path, 1) as (index,),
    ):
        quiet.store(CHAIN[:4])
        await index.wait_equal(bus, [quiet, loud])
        stop_child(index.pid)
        # More than what the server sends ahead, before and after.
        for source, change in ((loud, flood), (quiet, last), (loud, flood)):
            change(source)
            await source.flush()
        os.kill(index.pid, signal.SIGCONT)
        await index.wait_equal(bus, [quiet, loud])
        assert quiet.snapshots >= 1
