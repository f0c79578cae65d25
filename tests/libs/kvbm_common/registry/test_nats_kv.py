"""The registry on NATS KV: the contract, and what happens when NATS goes away."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator

import pytest
from kvbm_common.errors import RegistryUnavailable
from kvbm_common.nats.bus import Bus
from kvbm_common.nats.embedded_server import NatsServer
from kvbm_common.nats.jetstream import call_api
from kvbm_common.nats.streams import REGISTRY
from kvbm_common.registry.nats_kv import NatsRegistry, Registry
from kvbm_common.registry.records import RegistryEvent

from tests.libs.registry_contract import TTL_S, MakeRegistry, RegistryContract
from tests.waiting import wait_until


@pytest.fixture
async def make_nats_registry(nats_url: str) -> AsyncIterator[MakeRegistry]:
    """Connects one more process."""
    opened: list[tuple[NatsRegistry, Bus]] = []

    async def make() -> Registry:
        bus = await Bus.connect(nats_url, "test")
        registry = NatsRegistry(bus, ttl_s=TTL_S)
        opened.append((registry, bus))
        return registry

    yield make
    for registry, bus in opened:
        await registry.close()
        await bus.close()


class TestNatsRegistry(RegistryContract):
    """The contract on NATS KV."""

    @pytest.fixture
    async def make(self, make_nats_registry: MakeRegistry) -> MakeRegistry:
        """A function that connects one more process to the registry, with TTL_S."""
        return make_nats_registry


async def test_nobody_dies_of_a_nats_outage(
    make_nats_registry: MakeRegistry, nats_server: NatsServer
) -> None:
    """Goal: an outage longer than the TTL, or a restart, makes nobody leave."""
    ours, theirs = await make_nats_registry(), await make_nats_registry()
    events: list[RegistryEvent] = []
    theirs.watch(events.append)
    registration = await ours.register("index", "h", "0")
    await wait_until(lambda: events)
    nats_server.kill()
    with pytest.raises(TimeoutError):
        await wait_until(lambda: len(events) > 1, deadline_s=2 * TTL_S)
    await nats_server.start()
    with pytest.raises(TimeoutError):
        await wait_until(lambda: len(events) > 1, deadline_s=2 * TTL_S)
    assert [record.epoch for record in await theirs.list()] == [registration.epoch]


async def test_entries_come_back_after_the_store_is_lost(
    make_nats_registry: MakeRegistry, nats_server: NatsServer
) -> None:
    """Goal: heartbeats make the bucket and the entry anew, and later epochs are larger still."""
    ours = await make_nats_registry()
    registration = await ours.register("index", "h", "0")
    nats_server.kill()
    shutil.rmtree(nats_server.directory / "jetstream")
    await nats_server.start()
    theirs = await make_nats_registry()
    events: list[RegistryEvent] = []
    theirs.watch(events.append)
    await wait_until(lambda: events)
    assert events[0].record.epoch == registration.epoch
    assert not registration.lost.is_set()
    later = await theirs.register("index", "h", "1")
    assert later.epoch > registration.epoch


async def test_deleted_bucket_is_made_again(make_nats_registry: MakeRegistry, bus: Bus) -> None:
    """Goal: an administrator's mistake heals by itself."""
    ours = await make_nats_registry()
    await ours.register("index", "h", "0")
    await call_api(bus, f"STREAM.DELETE.{REGISTRY.name}")
    theirs = await make_nats_registry()
    events: list[RegistryEvent] = []
    theirs.watch(events.append)
    await wait_until(lambda: events)


RUBBISH = [b'{"kind": 7}', b"\xff", b'{"kind":"\xff"}', b'{"x":' + b"[" * 100_000]
"""Another type, no JSON, no text, and deeper than any decoder goes."""


@pytest.mark.parametrize("rubbish", RUBBISH, ids=["type", "bytes", "text", "deep"])
async def test_bad_record_is_ignored(
    make_nats_registry: MakeRegistry, bus: Bus, rubbish: bytes
) -> None:
    """Goal: rubbish under a key neither crashes nor hides the others."""
    registry = await make_nats_registry()
    await registry.register("index", "h", "0")
    await bus.publish("$KV.kvbm-registry.services.index.h.1", rubbish)
    await registry.register("index", "h", "2")
    assert {record.instance for record in await registry.list()} == {"0", "2"}


async def test_without_nats_it_is_unavailable(
    make_nats_registry: MakeRegistry, nats_server: NatsServer
) -> None:
    """Goal: a typed error."""
    registry = await make_nats_registry()
    nats_server.kill()
    with pytest.raises(RegistryUnavailable):
        await registry.register("index", "h", "0")
