"""What the consolidator must survive: a double, a lost or full store, slow readers, odd clocks."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from kvbm_common.config.settings import Settings
from kvbm_common.nats import embedded_server as embedded
from kvbm_common.nats.bus import Bus
from kvbm_common.nats.embedded_server import NatsServer
from kvbm_common.nats.jetstream import call_api
from kvbm_common.nats.streams import CONSOLIDATED, EVENTS
from kvbm_common.service.process import serve
from kvbm_common.wire.consolidator import Attached
from kvbm_common.wire.engine_events import AllBlocksCleared
from kvbm_common.wire.local import Beat
from kvbm_common.wire.verbs import verb_subject
from kvbm_connectors.consolidator.core.core import ConsolidatorCore
from kvbm_connectors.consolidator.shell.service import serve_consolidator
from kvbm_index.shell import image_store
from kvbm_index.shell.service import serve_index

from tests.connectors.consolidator.model import (
    INCARNATION,
    Device,
    Harness,
    batch_received,
    chain,
    engine_hash,
    key,
    removed,
    stored,
)
from tests.connectors.consolidator.shell.test_service import (
    DEADLINE_S,
    Engine,
    held_by_index,
    running,
    settings_of,
    wait_agreed,
    wait_for,
)
from tests.connectors.consolidator.test_router import Subscriber, consolidated_blocks, short
from tests.waiting import wait_until

KVBM = Path(sys.executable).parent / "kvbm"


@pytest.fixture
def settings(nats_server: NatsServer, tmp_path: Path) -> Settings:
    return settings_of(nats_server, tmp_path)


@pytest.fixture
async def engine(settings: Settings) -> AsyncIterator[Engine]:
    """An engine attached to a consolidator, whose events an index reads."""
    stopping = asyncio.Event()
    async with running(
        serve("consolidator", serve_consolidator, settings, stopping),
        serve("index", serve_index, settings, stopping),
        stopping=stopping,
    ):
        engine = Engine(settings)
        await engine.attach()
        yield engine
        await engine.close()


@pytest.mark.slow
async def test_a_second_consolidator_refuses_and_the_first_does_not_notice(
    settings: Settings, engine: Engine, bus: Bus
) -> None:
    """It ends with 1 before it has touched socket or registry, and names who is there."""
    await engine.publish(engine.device.store((1, 2), 0))
    await wait_agreed(bus, engine)
    second = await asyncio.create_subprocess_exec(
        KVBM, "serve", "consolidator", env=os.environ | settings.as_environ(),
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    ended = asyncio.create_task(second.communicate())
    async with asyncio.timeout(DEADLINE_S):
        while not ended.done():
            await engine.say(Beat(engine="sim-0", incarnation=INCARNATION))
            assert isinstance(await engine.hear(), Attached)
            await asyncio.wait({ended}, timeout=0.5)
    _, error = ended.result()
    assert second.returncode == 1
    assert f"process {os.getpid()} serves {settings.consolidator_endpoint}" in error.decode()
    await engine.publish(engine.device.store((3, 4), 0))
    await wait_agreed(bus, engine)


@pytest.mark.slow
async def test_streams_that_are_deleted_under_us(engine: Engine, bus: Bus) -> None:
    """Both streams go while the engine works: the index and the consolidated stream converge."""
    device = engine.device
    await engine.publish(device.store((1, 2, 3, 4), 0))
    await wait_agreed(bus, engine)
    for spec in (EVENTS, CONSOLIDATED):
        await call_api(bus, f"STREAM.DELETE.{spec.name}")
    await engine.publish(device.evict(0))
    await engine.publish(device.store((5, 6), 0))
    await wait_agreed(bus, engine)
    await wait_for(lambda: consolidated_blocks(bus), device.truth())
    await wait_for(lambda: outbox(bus), 0.0)


async def outbox(bus: Bus) -> float:
    """Consolidated events that wait for their stream."""
    subject = verb_subject("consolidator", "metrics", host="h", instance="0")
    families = msgspec.json.decode(await bus.request(subject, b"", deadline_s=2.0))["families"]
    name = "kvbm_consolidated_events_outbox"
    samples = next(family["samples"] for family in families if family["name"] == name)
    return float(sum(sample["value"] for sample in samples))


@pytest.mark.slow
async def test_a_full_store_costs_one_stream_and_no_truth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NATS has room for the events and not for the consolidated stream: the index is right, the
    consolidated events wait in their outbox, and routers on ZMQ hear them all the same.

    What fits is there first: a server that is asked for two streams at once, of which one does not
    fit, may refuse the other one instead.
    """
    monkeypatch.setattr(embedded, "STORE_BYTES_MIN", EVENTS.bytes_max + 80 * 1024 * 1024)
    monkeypatch.setattr(image_store, "BUCKET_BYTES_MAX", 1024 * 1024)  # The index's images fit.
    async with NatsServer(tmp_path / "small") as server:
        settings, first, second = settings_of(server, tmp_path), asyncio.Event(), asyncio.Event()
        bus = await Bus.connect(server.url, "test")
        index = serve("index", serve_index, settings, first)
        consolidator = serve("consolidator", serve_consolidator, settings, second)
        async with running(index, stopping=first):
            await wait_for(lambda: held_by_index(bus), set())
            async with running(consolidator, stopping=second):
                engine, reader = Engine(settings), Subscriber(settings)
                await engine.attach()
                await engine.publish(engine.device.store((1, 2, 3, 4), 0))
                await wait_agreed(bus, engine)
                await wait_until(lambda: reader.held == short(engine.device.truth()))
                await wait_for(lambda: outbox(bus), 2.0)
                await reader.close()
                await engine.close()
        await bus.close()


async def test_a_router_that_does_not_read_harms_nobody(
    settings: Settings, engine: Engine, bus: Bus
) -> None:
    """1. One router never reads, another does: that one is right. 2. The first reads at last, and
    asks for what it lacks."""
    slow, fast = Subscriber(settings), Subscriber(settings)
    await slow.stop_reading()
    for number in range(600):
        await engine.publish(stored((number, number)))
        if number > 10:
            await engine.publish(removed(engine_hash((number - 10, number - 10))))
    last = {chain((number, number))[0] for number in (0, *range(590, 600))}
    await wait_until(lambda: fast.held == short(last), deadline_s=20.0)
    slow.read_on()
    await wait_until(lambda: slow.held == short(last), deadline_s=20.0)
    await slow.close()
    await fast.close()


# ---- clocks ----------------------------------------------------------------------------------


def test_an_engine_s_wall_clock_may_jump() -> None:
    """Time stamps decide only whether an old number is a duplicate; order is by number."""
    harness = Harness()
    harness.attach()
    device = Device()
    for seq, ts in enumerate([1e9, 5.0, 9e10, 0.0, 5.0]):
        device.publish(device.store((seq, seq), 0))
        harness.batch(seq, *device.batches[seq].events, ts=ts)
        harness.batch(seq, *device.batches[seq].events, ts=ts)
    assert harness.live[0] == device.truth()
    assert harness.core.statistics().drops["duplicate"] == 5
    assert "restarted" not in harness.core.statistics().drops


def test_a_machine_that_slept_finds_its_engines_again() -> None:
    """Our own clock leaps a day ahead: the engine is lost, attaches again, and is replayed."""
    harness = Harness()
    harness.attach()
    device = Device()
    seq = device.publish(device.store((1, 2, 3, 4), 0))
    harness.send(batch_received(key(), seq, device.batches[seq]))
    harness.tick(24 * 3_600_000)
    assert harness.merged.blocks() == set()
    harness.attach(epoch=False)
    harness.grant()
    harness.answer(device)
    assert harness.live[0] == harness.merged.blocks() == device.truth()
    harness.batch(1, AllBlocksCleared(), ts=0.0)
    assert harness.live.get(0, set()) == set()


async def test_a_consolidator_that_fails_ends(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sockets for routers are open then: whoever restarts it waits for its end."""

    def step(*_args: object) -> list[object]:
        raise ValueError("planted")

    monkeypatch.setattr(ConsolidatorCore, "step", step)
    async with asyncio.timeout(DEADLINE_S):
        assert await serve("consolidator", serve_consolidator, settings, asyncio.Event()) == 1
