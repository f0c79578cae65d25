"""The life of a service inside one event loop, on a real NATS."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import msgspec
import pytest
from kvbm_common.config.settings import Settings
from kvbm_common.errors import ConfigError
from kvbm_common.nats.embedded_server import NatsServer
from kvbm_common.nats.event_message import EventMessage
from kvbm_common.nats.event_subscription import EventSubscription
from kvbm_common.nats.jetstream import publish_acknowledged
from kvbm_common.nats.streams import REGISTRY, REGISTRY_BUCKET
from kvbm_common.registry.etcd import EtcdRegistry
from kvbm_common.registry.records import Left, RegistryEvent
from kvbm_common.service.context import ServiceContext
from kvbm_common.service.process import LEAVE_DEADLINE_S, STOP_DEADLINE_S, make_runtime_dir, serve

from tests.etcd_server import EtcdServer
from tests.waiting import stop_child, wait_until

DEADLINE_S = 10.0


def settings(server: NatsServer, **more: str) -> Settings:
    return Settings.load({}, {"nats_url": server.url, "host": "h", "registry_ttl_s": 0.3, **more})


class Sample:
    """A service that waits to be stopped."""

    def __init__(self) -> None:
        self.started = asyncio.Event()
        self.context: ServiceContext | None = None

    async def main(self, context: ServiceContext) -> None:
        self.context = context
        self.started.set()
        await context.stopping.wait()


async def test_service_knows_who_it_is(nats_server: NatsServer) -> None:
    """Goal: kind, source and epoch; an orderly end is 0 and leaves the registry."""
    stopping = asyncio.Event()
    sample = Sample()
    life = asyncio.create_task(serve("sample", sample.main, settings(nats_server), stopping))
    async with asyncio.timeout(DEADLINE_S):
        await sample.started.wait()
        assert sample.context is not None
        assert (sample.context.source, sample.context.host) == ("sample-0", "h")
        assert sample.context.epoch == sample.context.registration.epoch > 0
        (record,) = await sample.context.registry.list("sample")
        assert record.epoch == sample.context.epoch
        stopping.set()
        assert await life == 0


@pytest.mark.parametrize("form", ["packed", "json"])
async def test_events_are_json_while_a_service_is_there_that_reads_nothing_else(
    nats_server: NatsServer, form: str
) -> None:
    """Goal: services of two releases side by side. 1. An index of the one before joins, whose
    record has no word of packed events. 2. It dies."""
    stopping, sample = asyncio.Event(), Sample()
    own = settings(nats_server, events_form=form)
    life = asyncio.create_task(serve("sample", sample.main, own, stopping))
    async with asyncio.timeout(DEADLINE_S):
        await sample.started.wait()
    assert sample.context is not None
    bus = sample.context.bus
    assert bus.packs_events() is (form == "packed")
    record = {"kind": "index", "host": "h", "instance": "9", "epoch": 7, "pid": 1,
              "started_ms": 0, "ttl_s": 1.0}  # fmt: skip
    subject = f"$KV.{REGISTRY_BUCKET}.services.index.h.9"
    await publish_acknowledged(bus, REGISTRY, subject, msgspec.json.encode(record))
    await wait_until(lambda: not bus.packs_events())
    await wait_until(lambda: bus.packs_events() is (form == "packed"))
    stopping.set()
    assert await life == 0


async def test_service_waits_for_nats(nats_server: NatsServer) -> None:
    """Goal: a service that starts before NATS serves when NATS is there."""
    nats_server.kill()
    stopping = asyncio.Event()
    sample = Sample()
    life = asyncio.create_task(serve("sample", sample.main, settings(nats_server), stopping))
    done, _ = await asyncio.wait({life}, timeout=0.1)
    assert not done
    await nats_server.start()
    async with asyncio.timeout(DEADLINE_S):
        await sample.started.wait()
        stopping.set()
        assert await life == 0


async def test_service_on_etcd(nats_server: NatsServer, etcd_server: EtcdServer) -> None:
    """Goal: it waits for etcd at start, is found, leaves, and stops at once while etcd is away."""
    etcd_server.kill()
    on_etcd = settings(nats_server, registry_url=f"etcd://{etcd_server.server}")
    stops = [asyncio.Event(), asyncio.Event()]
    samples = [Sample(), Sample()]
    lives = [
        asyncio.create_task(serve(kind, sample.main, on_etcd, stop))
        for kind, sample, stop in zip(("one", "two"), samples, stops, strict=True)
    ]
    done, _ = await asyncio.wait(lives, timeout=0.3)
    assert not done
    await etcd_server.start()
    reader = EtcdRegistry(on_etcd.etcd_servers, ttl_s=0.3)
    left: list[str] = []

    def note(event: RegistryEvent) -> None:
        if isinstance(event, Left):
            left.append(f"{event.record.kind} {event.reason}")

    async with asyncio.timeout(DEADLINE_S):
        for sample in samples:
            await sample.started.wait()
        assert {record.kind for record in await reader.list()} == {"one", "two"}
        reader.watch(note)
        stops[0].set()
        assert await lives[0] == 0
        await wait_until(lambda: left == ["one deleted"])
    etcd_server.kill()
    stops[1].set()
    async with asyncio.timeout(STOP_DEADLINE_S):
        assert await lives[1] == 0
    await reader.close()


async def test_service_stops_when_the_registry_is_read_no_more(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: a reader that has ended is seen: else everyone would expire. Who restarts it decides.
    Method: the first batch of the registry's watch raises."""
    sample = Sample()

    async def fail(_: EventSubscription) -> list[EventMessage]:
        raise RuntimeError("planted")

    monkeypatch.setattr(EventSubscription, "__anext__", fail)
    life = serve("sample", sample.main, settings(nats_server), asyncio.Event())
    async with asyncio.timeout(DEADLINE_S):
        assert await life == 1


async def test_service_stops_when_another_takes_its_place(
    nats_server: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Goal: two processes of one name; the older one gives way, says that it failed, and why."""
    samples = [Sample(), Sample()]
    stops = [asyncio.Event(), asyncio.Event()]
    lives = []
    async with asyncio.timeout(DEADLINE_S):
        for sample, stop in zip(samples, stops, strict=True):
            life = serve("sample", sample.main, settings(nats_server), stop)
            lives.append(asyncio.create_task(life))
            await sample.started.wait()
        assert await lives[0] == 1
        (line,) = (text for text in caplog.messages if text.endswith("; stopping"))
        assert f"process {os.getpid()} took over" in line
        assert "two stacks have KVBM_HOST=h" in line
        assert not lives[1].done()
        stops[1].set()
        assert await lives[1] == 0


async def test_failing_main_is_exit_code_1(
    nats_server: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    async def main(context: ServiceContext) -> None:
        raise ZeroDivisionError

    async with asyncio.timeout(DEADLINE_S):
        assert await serve("sample", main, settings(nats_server), asyncio.Event()) == 1
    assert "sample-0 failed" in caplog.text


def test_runtime_dir_is_private(tmp_path: Path) -> None:
    """Goal: made with mode 0700; one where others may write is refused, a link too."""
    path = tmp_path / "run"
    make_runtime_dir(Settings.load({}, {"runtime_dir": path}))
    assert path.stat().st_mode & 0o777 == 0o700
    path.chmod(0o777)
    with pytest.raises(ConfigError, match="KVBM_RUNTIME_DIR"):
        make_runtime_dir(Settings.load({}, {"runtime_dir": path}))
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="KVBM_RUNTIME_DIR"):
        make_runtime_dir(Settings.load({}, {"runtime_dir": tmp_path / "link"}))


@pytest.mark.slow
async def test_a_registry_that_is_silent_does_not_hold_up_the_end(nats_server: NatsServer) -> None:
    """Goal: with NATS frozen a service still ends in order; its entry expires."""
    stopping = asyncio.Event()
    sample = Sample()
    life = asyncio.create_task(serve("sample", sample.main, settings(nats_server), stopping))
    async with asyncio.timeout(DEADLINE_S):
        await sample.started.wait()
        stop_child(nats_server.pid)
        stopping.set()
        try:
            async with asyncio.timeout(LEAVE_DEADLINE_S + 0.7):
                assert await life == 0
        finally:
            os.kill(nats_server.pid, signal.SIGCONT)
