"""The registry on etcd: the contract, and what happens when etcd goes away, or forgets."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import AsyncIterator

import pytest
from kvbm_common.errors import RegistryUnavailable
from kvbm_common.nats.jetstream import BACKOFF_S
from kvbm_common.registry import etcd
from kvbm_common.registry.etcd import CREATED, PREFIX, SERVICES, EtcdRegistry
from kvbm_common.registry.etcd_client import EtcdClient
from kvbm_common.registry.records import Joined, Left, RegistryEvent
from kvbm_common.registry.services import Registry

from tests.etcd_server import EtcdServer
from tests.libs.registry_contract import TTL_S, MakeRegistry, RegistryContract
from tests.waiting import wait_until

LEASE_S = 1.0
"""What the test's etcd makes of TTL_S."""
GRACE_S = TTL_S + BACKOFF_S[-1]
PATIENCE_S = 10.0
"""Deadline of a call on a busy machine, where it is not the subject."""
EXPIRES_S = 10.0
"""A lease, etcd's look at it twice a second, the grace, and a busy machine."""


def base64_of(text: str) -> str:
    """A key or value for etcd's JSON gateway."""
    return base64.b64encode(text.encode()).decode()


@pytest.fixture
async def make_etcd_registry(etcd_server: EtcdServer) -> AsyncIterator[MakeRegistry]:
    """Connects one more process."""
    opened: list[EtcdRegistry] = []

    async def make() -> Registry:
        servers = (etcd_server.server,)
        opened.append(EtcdRegistry(servers, ttl_s=TTL_S, deadline_s=PATIENCE_S))
        return opened[-1]

    yield make
    for registry in opened:
        await registry.close()


class TestEtcdRegistry(RegistryContract):
    """The contract on etcd."""

    expires_within_s = EXPIRES_S

    @pytest.fixture
    async def make(self, make_etcd_registry: MakeRegistry) -> MakeRegistry:
        """A function that connects one more process to the registry, with TTL_S."""
        return make_etcd_registry


@pytest.mark.slow
async def test_nobody_dies_of_an_outage(
    make_etcd_registry: MakeRegistry, etcd_server: EtcdServer
) -> None:
    """Goal: an outage longer than the lease, or a restart, makes nobody leave."""
    ours, theirs = await make_etcd_registry(), await make_etcd_registry()
    events: list[RegistryEvent] = []
    theirs.watch(events.append)
    registration = await ours.register("index", "h", "0")
    await wait_until(lambda: events)
    etcd_server.kill()
    with pytest.raises(TimeoutError):
        await wait_until(lambda: len(events) > 1, deadline_s=1.5 * LEASE_S)
    await etcd_server.start()
    with pytest.raises(TimeoutError):
        await wait_until(lambda: len(events) > 1, deadline_s=0.5 * LEASE_S)
    assert [record.epoch for record in await theirs.list()] == [registration.epoch]
    later = await theirs.register("index", "h", "1")
    await wait_until(lambda: len(events) == 2)
    assert events[1].record.epoch == later.epoch > registration.epoch


@pytest.mark.slow
async def test_nobody_dies_while_etcd_hangs(
    make_etcd_registry: MakeRegistry, etcd_server: EtcdServer
) -> None:
    """Goal: a server that takes everything and answers nothing is away; the event loop lives.

    Method: freeze it for longer than a lease. When it goes on, the entry is deleted, as at the end
    of its lease; whether the lease has ended is a race. The reader must have noticed the outage.
    """
    ours = await make_etcd_registry()
    theirs, third = [EtcdRegistry((etcd_server.server,), ttl_s=TTL_S) for _ in range(2)]
    events: list[RegistryEvent] = []
    theirs.watch(events.append)
    await ours.register("index", "h", "0")
    await wait_until(lambda: events)
    etcd_server.freeze()
    pauses_s = []
    end_s = time.monotonic() + 1.5 * LEASE_S
    while (before_s := time.monotonic()) < end_s:
        await asyncio.sleep(0.01)
        pauses_s.append(time.monotonic() - before_s)
    assert max(pauses_s) < 0.9
    with pytest.raises(RegistryUnavailable):
        await third.register("index", "h", "1")
    etcd_server.thaw()
    await etcd_server.administer("kv/deleterange", {"key": base64_of(f"{SERVICES}index.h.0")})
    with pytest.raises(TimeoutError):
        await wait_until(lambda: len(events) > 1, deadline_s=GRACE_S + 0.4)
    assert len(await third.list()) == 1
    await theirs.close()
    await third.close()


@pytest.mark.slow
async def test_survivors_come_back_into_an_empty_store(
    make_etcd_registry: MakeRegistry, etcd_server: EtcdServer
) -> None:
    """Goal: no reader sees anybody leave but the dead, and later epochs are larger still."""
    ours, dying, theirs = [await make_etcd_registry() for _ in range(3)]
    events: list[RegistryEvent] = []
    theirs.watch(events.append)
    registration = await ours.register("index", "h", "0")
    dead = await dying.register("index", "h", "1")
    await wait_until(lambda: len(events) == 2)
    etcd_server.kill()
    etcd_server.empty()
    await dying.close()
    await etcd_server.start()
    await wait_until(lambda: len(events) == 3, deadline_s=EXPIRES_S)
    assert isinstance(events[2], Left)
    assert events[2].record.instance == "1"
    assert [record.epoch for record in await theirs.list()] == [registration.epoch]
    assert not registration.lost.is_set()
    again = await theirs.register("index", "h", "1")
    assert again.epoch > max(dead.epoch, registration.epoch)
    assert len(await (await make_etcd_registry()).list()) == 2


async def test_slow_clock_of_who_finds_the_store_empty_is_made_up_for(
    make_etcd_registry: MakeRegistry, etcd_server: EtcdServer
) -> None:
    """Goal: a survivor raises the epochs of a store that somebody with a slow clock has stamped."""
    ours, theirs = await make_etcd_registry(), await make_etcd_registry()
    registration = await ours.register("index", "h", "0")
    etcd_server.kill()
    etcd_server.empty()
    await etcd_server.start()
    slow = {"key": base64_of(CREATED), "value": base64_of("1000")}
    missing = {"key": slow["key"], "target": "CREATE", "result": "EQUAL", "create_revision": "0"}
    stamp = {"compare": [missing], "success": [{"request_put": slow}]}
    await etcd_server.administer("kv/txn", stamp)  # A survivor may have been there first.
    await wait_until_entered(theirs, "0")
    later = await theirs.register("index", "h", "1")
    assert later.epoch > registration.epoch


async def wait_until_entered(registry: Registry, instance: str) -> None:
    """Wait until a listing has an instance."""
    seen: set[str] = set()
    forget = registry.watch(lambda event: seen.add(event.record.instance))
    await wait_until(lambda: instance in seen)
    forget()


async def test_reader_lists_again_after_a_compaction(
    make_etcd_registry: MakeRegistry, etcd_server: EtcdServer
) -> None:
    """Goal: revisions that are gone are no gap. Method: others write, and it is compacted.

    The reader's position is older than that: nothing under its prefix has changed.
    """
    ours, theirs = await make_etcd_registry(), await make_etcd_registry()
    events: list[RegistryEvent] = []
    theirs.watch(events.append)
    await ours.register("index", "h", "0")
    await wait_until(lambda: events)
    other = {"key": base64_of("other"), "value": base64_of("x")}
    for _ in range(5):
        answer = await etcd_server.administer("kv/put", other)
    await etcd_server.administer("kv/compaction", {"revision": answer["header"]["revision"]})
    etcd_server.kill()
    await etcd_server.start()
    second = await ours.register("index", "h", "1")
    # The first lease may have ended while etcd was away: that is news as well.
    await wait_until(lambda: Joined(second.record) in events)


async def test_deleted_entries_are_written_again(
    make_etcd_registry: MakeRegistry, etcd_server: EtcdServer
) -> None:
    """Goal: an administrator's mistake heals by itself, and epochs still grow."""
    ours, theirs = await make_etcd_registry(), await make_etcd_registry()
    first = await ours.register("index", "h", "0")
    everything = {"key": base64_of(PREFIX), "range_end": base64_of("kvbm/registry0")}
    await etcd_server.administer("kv/deleterange", everything)
    await wait_until_entered(theirs, "0")
    second = await theirs.register("index", "h", "0")
    assert second.epoch > first.epoch


async def test_rubbish_is_ignored(
    make_etcd_registry: MakeRegistry, etcd_server: EtcdServer
) -> None:
    """Goal: rubbish under a key neither crashes nor hides the others, nor stands in the way."""
    registry = await make_etcd_registry()
    rubbish = base64_of('{"kind": 7}')
    for key in (CREATED, f"{SERVICES}index.h.1", f"{SERVICES}index.h.2"):
        await etcd_server.administer("kv/put", {"key": base64_of(key), "value": rubbish})
    await registry.register("index", "h", "0")
    await registry.register("index", "h", "2")
    assert {record.instance for record in await registry.list()} == {"0", "2"}


async def test_without_etcd_it_is_unavailable(
    make_etcd_registry: MakeRegistry, etcd_server: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: a typed error for each verb; once etcd is there, everything works."""
    monkeypatch.setattr(etcd, "LIST_DEADLINE_S", 0.2)
    etcd_server.kill()
    registry = await make_etcd_registry()
    events: list[RegistryEvent] = []
    registry.watch(events.append)
    with pytest.raises(RegistryUnavailable):
        await registry.register("index", "h", "0")
    with pytest.raises(RegistryUnavailable):
        await registry.list()
    await etcd_server.start()
    registration = await registry.register("index", "h", "0")
    await wait_until(lambda: events)
    etcd_server.kill()
    with pytest.raises(RegistryUnavailable):
        await registration.update({"port": 1})
    await registration.revoke()
    await etcd_server.start()
    assert len(events) == 1


async def test_failed_update_is_made_up_for(
    make_etcd_registry: MakeRegistry, etcd_server: EtcdServer
) -> None:
    """Goal: what a service wanted to say while etcd was away is said by the next heartbeat."""
    ours, theirs = await make_etcd_registry(), await make_etcd_registry()
    events: list[RegistryEvent] = []
    theirs.watch(events.append)
    registration = await ours.register("index", "h", "0")
    etcd_server.kill()
    with pytest.raises(RegistryUnavailable):
        await registration.update({"port": 2})
    await etcd_server.start()
    await wait_until(lambda: events and events[-1].record.info == {"port": 2})


@pytest.mark.slow
async def test_heartbeat_that_fails_is_soon_tried_again(
    etcd_server: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: two calls that wait for an election and the pauses between fit into a lease."""
    tried_s: list[float] = []
    keep_alive = EtcdClient.keep_alive

    async def fails_at_first(client: EtcdClient, lease: int) -> bool:
        tried_s.append(time.monotonic())
        if len(tried_s) < 4:
            raise RegistryUnavailable("no leader")
        return await keep_alive(client, lease)

    monkeypatch.setattr(EtcdClient, "keep_alive", fails_at_first)
    registry = EtcdRegistry((etcd_server.server,), ttl_s=6.0, deadline_s=PATIENCE_S)
    await registry.register("index", "h", "0")
    await wait_until(lambda: len(tried_s) == 4)
    await registry.close()
    pause_s = 6.0 / etcd.BEATS_PER_TTL
    assert tried_s[3] - tried_s[0] < pause_s, "three pauses are shorter than one of a lease"


async def test_next_server_is_tried(etcd_server: EtcdServer) -> None:
    """Goal: one lost member of a cluster is not the loss of etcd."""
    servers = ("127.0.0.1:1", etcd_server.server)
    registry = EtcdRegistry(servers, ttl_s=TTL_S, deadline_s=PATIENCE_S)
    registration = await registry.register("index", "h", "0")
    assert await registry.list() == [registration.record]
    await registry.close()


async def test_restarted_server_is_asked_again_at_once(etcd_server: EtcdServer) -> None:
    """Goal: the first call after a restart is no error, though its connection is gone."""
    client = EtcdClient((etcd_server.server,), deadline_s=PATIENCE_S)
    await client.get(CREATED)
    etcd_server.kill()
    await etcd_server.start()
    await client.get(CREATED)
    await client.close()
