"""What the fleet remembers while it looks: services that have gone, and the last hour."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import msgspec
import pytest
from fastapi import FastAPI
from httpx import ASGITransport, AsyncClient
from kvbm_common.access.http_access import Access
from kvbm_common.errors import (
    BusUnavailable,
    DeadlineExceeded,
    KvbmError,
    NoResponder,
    RequestFailed,
)
from kvbm_common.nats.bus import Bus
from kvbm_common.registry.nats_kv import NatsRegistry
from kvbm_common.registry.records import Joined, Left, RegistryEvent, ServiceRecord
from kvbm_common.runtime.metrics import Metrics
from kvbm_common.wire.index_verbs import MatchReply
from kvbm_metrics.shell.api import create_app
from kvbm_metrics.shell.fleet import Fleet, StillThere
from kvbm_metrics.shell.state import Api

from tests.services.metrics.samples import record, tier_stats
from tests.waiting import ask_until, wait_until

DEADLINE_S = 30.0


@pytest.fixture
async def app(bus: Bus) -> AsyncIterator[FastAPI]:
    """The API over a fleet that follows the registry, with a clock of seconds that count tenfold.

    A point of the history is then due each second.
    """
    registry, counters = NatsRegistry(bus, ttl_s=5.0), Metrics()
    loop = asyncio.get_running_loop()
    fleet = Fleet(bus, registry, counters, clock_s=lambda: 10 * loop.time())
    following = asyncio.create_task(fleet.follow())
    access = Access(without_token="admin")
    yield create_app(Api(fleet=fleet, expected=(), version="1", access=access), counters)
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    await registry.close()


@pytest.fixture
async def client(app: FastAPI) -> AsyncIterator[AsyncClient]:
    """A client of it."""
    async with AsyncClient(transport=ASGITransport(app), base_url="http://kvbm") as asked:
        yield asked


@asynccontextmanager
async def short_lived(bus: Bus) -> AsyncIterator[NatsRegistry]:
    """A registry whose services are lost half a second after they fall silent."""
    registry = NatsRegistry(bus, ttl_s=0.5)
    yield registry
    await registry.close()


async def status_when(client: AsyncClient, holds: Callable[[Any], object]) -> Any:
    """Return the status when it is as it should be."""

    async def ask() -> Any:
        said = (await client.get("/v1/status")).json()
        return said if holds(said) else None

    return await ask_until(ask, deadline_s=DEADLINE_S, poll_s=0.1)


async def test_a_lost_service_stays_until_it_is_back(bus: Bus, client: AsyncClient) -> None:
    """1. It is there. 2. It falls silent: lost, since when; not ready. 3. Another life: there."""
    async with short_lived(bus) as registry:
        await registry.register("host-tier", "b", "0")
        before = await status_when(client, lambda said: said["hosts"] == ["b"])
        assert before["gone"] == []
    lost = await status_when(client, lambda said: said["gone"])
    [gone] = lost["gone"]
    assert (gone["kind"], gone["host"], gone["manner"]) == ("host-tier", "b", "lost")
    assert gone["gone_ms_ago"] >= 0
    assert lost["hosts"] == ["b"]
    for question in ("pins", "explain"):
        said = (await client.get(f"/v1/{question}")).json()
        assert said["silent"] == ["host-tier.b.0: lost"]
    refused = await client.get("/v1/explain?reason=typo")
    assert (refused.status_code, refused.json()["code"]) == (422, "bad_query")
    series = 'kvbm_ready{host="b",instance="0",kind="host-tier"}'

    async def is_not_ready() -> bool:
        return f"\n{series} 0.0\n" in (await client.get("/metrics")).text

    await ask_until(is_not_ready, deadline_s=DEADLINE_S, poll_s=0.1)
    async with short_lived(bus) as registry:
        await registry.register("host-tier", "b", "0")
        await status_when(client, lambda said: not said["gone"])


@pytest.mark.slow
async def test_a_reset_fails_for_a_tier_that_went_silent(bus: Bus, client: AsyncClient) -> None:
    """Goal: `done` means that no tier has the blocks any more; one that hangs has them."""
    registry = NatsRegistry(bus, ttl_s=60.0)
    await registry.register("host-tier", "b", "0")
    async with short_lived(bus) as silent:
        await silent.register("disk-tier", "b", "0")
        await silent.register("disk-tier", "c", "0")
    await status_when(client, lambda said: len(said["gone"]) == 2)
    body = {"tier": "all", "host": "b", "everything": True}
    job = (await client.post("http://localhost/v1/reset", json=body)).json()

    async def ended() -> Any:
        found = (await client.get(f"/v1/jobs/{job['id']}")).json()
        return found if found["state"] != "running" else None

    failed = await ask_until(ended, deadline_s=DEADLINE_S, poll_s=0.1)
    await registry.close()
    assert failed["state"] == "failed"
    assert set(failed["errors"]) == {"host-tier.b.0", "disk-tier.b.0"}
    assert failed["errors"]["disk-tier.b.0"].startswith("lost: ")


class SilentBus:
    """NATS is there, and services say nothing until they have `gone`; then a request fails."""

    connected = True

    def __init__(self, error: type[KvbmError] = DeadlineExceeded) -> None:
        self.error = error
        self.asked, self.gone = asyncio.Event(), asyncio.Event()

    async def request(self, subject: str, _payload: bytes, *, deadline_s: float) -> bytes:
        self.asked.set()
        async with asyncio.timeout(DEADLINE_S + deadline_s):
            await self.gone.wait()
        raise self.error(subject)


class Registered:
    """A registry of records that a test changes."""

    def __init__(self, *records: ServiceRecord) -> None:
        self.records = list(records)
        self.tell: Callable[[RegistryEvent], None] = lambda _: None
        self.watched = asyncio.Event()

    async def list(self, kind: str | None = None) -> list[ServiceRecord]:
        return [one for one in self.records if kind in (None, one.kind)]

    def watch(self, callback: Callable[[RegistryEvent], None]) -> Callable[[], None]:
        self.tell = callback
        self.watched.set()
        return lambda: None


async def test_a_service_that_is_lost_while_it_is_asked_is_shown_once() -> None:
    """It hangs, its entry ends, and an operator's question has the registry read again."""
    hanging = record("disk-tier", host="h")
    bus, registry = SilentBus(), Registered(hanging)
    fleet = Fleet(cast("Bus", cast("Any", bus)), registry, Metrics())
    following = asyncio.create_task(fleet.follow())
    await asyncio.wait_for(bus.asked.wait(), DEADLINE_S)
    registry.records = []
    registry.tell(Left(hanging, "expired"))
    assert list(await fleet.records()) == []
    bus.gone.set()
    view = await asyncio.wait_for(fleet.view(), DEADLINE_S)
    assert [one.record.key for one in view.instances] == [hanging.key]
    assert (list(view.lost), following.done()) == ([], False)
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)


async def hang(_payload: bytes) -> bytes:
    """Answer as a process that is stopped, whose connection to NATS is there."""
    await asyncio.Event().wait()
    return b""


async def say_something_newer(_payload: bytes) -> bytes:
    """Answer as a release whose answers cannot be read."""
    return b'{"v":2}'


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "why"), [(hang, "no answer"), (say_something_newer, "version 2")]
)
async def test_a_lost_service_that_may_be_there_is_not_forgotten(
    bus: Bus, answer: Callable[[bytes], Awaitable[bytes]], why: str
) -> None:
    """It can come back with its blocks after a reset that was done."""
    registry = NatsRegistry(bus, ttl_s=5.0)
    async with following(Fleet(bus, registry, Metrics())) as fleet:
        await bus.add_verbs("disk-tier", "0", "b", {"stats": answer})
        async with short_lived(bus) as silent:
            await silent.register("disk-tier", "b", "0")
            await ask_until(fleet.records, deadline_s=DEADLINE_S, poll_s=0.1)
        await wait_until(fleet.gone, deadline_s=DEADLINE_S, poll_s=0.1)
        with pytest.raises(StillThere, match=f"disk-tier.b.0 may be there: .*{why}"):
            await fleet.forget("b")
        assert len(fleet.gone()) == 1
    await registry.close()


@asynccontextmanager
async def following(fleet: Fleet) -> AsyncIterator[Fleet]:
    """A fleet that follows its registry."""
    task = asyncio.create_task(fleet.follow())
    yield fleet
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_service_is_not_forgotten_when_nats_cannot_tell() -> None:
    """The connection is lost while the question is under way."""
    bus, registry = SilentBus(BusUnavailable), Registered()
    bus.gone.set()
    async with following(Fleet(cast("Bus", cast("Any", bus)), registry, Metrics())) as fleet:
        await asyncio.wait_for(registry.watched.wait(), DEADLINE_S)
        registry.tell(Left(record("disk-tier", host="h"), "expired"))
        with pytest.raises(StillThere):
            await fleet.forget("h")
        assert len(fleet.gone()) == 1


async def test_only_services_that_were_asked_are_forgotten() -> None:
    """Another one of the host falls silent while the lost one is asked: it may come back."""
    disk, host = record("disk-tier", host="h"), record("host-tier", host="h")
    bus, registry = SilentBus(NoResponder), Registered()
    async with following(Fleet(cast("Bus", cast("Any", bus)), registry, Metrics())) as fleet:
        await asyncio.wait_for(registry.watched.wait(), DEADLINE_S)
        registry.tell(Left(disk, "expired"))
        registry.records = [host]
        registry.tell(Joined(host))
        forgetting = asyncio.create_task(fleet.forget("h"))
        await asyncio.wait_for(bus.asked.wait(), DEADLINE_S)
        registry.records = []
        registry.tell(Left(host, "expired"))
        await fleet.records()
        bus.gone.set()
        assert await asyncio.wait_for(forgetting, DEADLINE_S) == 1
        assert [one.kind for one in fleet.gone()] == ["host-tier"]


async def test_a_service_that_leaves_is_not_lost(bus: Bus, client: AsyncClient) -> None:
    """Somebody has stopped it."""
    async with short_lived(bus) as registry:
        entry = await registry.register("disk-tier", "b", "0")
        await status_when(client, lambda said: said["hosts"] == ["b"])
        await entry.revoke()
        [gone] = (await status_when(client, lambda said: said["gone"]))["gone"]
        assert (gone["kind"], gone["manner"]) == ("disk-tier", "left")

        async def has_no_series() -> bool:
            return "disk-tier" not in (await client.get("/metrics")).text

        await ask_until(has_no_series, deadline_s=DEADLINE_S, poll_s=0.1)


@pytest.mark.slow
async def test_the_last_hour_is_there_for_who_asks_first(bus: Bus, client: AsyncClient) -> None:
    """1. A host tier counts. 2. The history has points of its host and of all, none of another."""
    asked = 0

    async def answer(_payload: bytes) -> bytes:
        nonlocal asked
        asked += 1
        figures = {"lookups": asked, "lookup_blocks.host": 3 * asked, "lookup_blocks.miss": asked}
        reply = tier_stats("host-tier", used=1, total=4, figures=figures)
        return msgspec.json.encode(reply)

    async with short_lived(bus) as registry:
        await registry.register("host-tier", "a", "0")
        await bus.add_verbs("host-tier", "0", "a", {"stats": answer})

        async def points() -> Any:
            await client.get("/v1/status")
            said = (await client.get("/v1/history", params={"host": "a"})).json()
            return said if len(said["points"]) > 1 else None

        said = await ask_until(points, deadline_s=DEADLINE_S, poll_s=0.1)
        assert (said["host"], said["window_s"], said["points_max"]) == ("a", 10.0, 360)
        assert {one["hit_rate"] for one in said["points"]} == {0.75}
        assert len((await client.get("/v1/history")).json()["points"]) > 1
        nowhere = (await client.get("/v1/history", params={"host": "c"})).json()
        assert nowhere["points"] == []
        refused = await client.get("/v1/history", params={"host": "no host"})
        assert refused.status_code == 422


@pytest.mark.slow
async def test_an_index_that_stands_still_takes_no_question_along(
    bus: Bus, client: AsyncClient
) -> None:
    """1. One replica of the group is asked first, and is silent. 2. All are asked by name: the
    other one answers. It is asked for the first time then."""
    asked: list[str] = []
    silent = asyncio.Event()

    async def stands_still(_payload: bytes) -> bytes:
        asked.append("0")
        await silent.wait()
        return b""

    async def answers(_payload: bytes) -> bytes:
        asked.append("1")
        return msgspec.json.encode(MatchReply(asked=0, matches=[]))

    async with short_lived(bus) as registry:
        await bus.add_verbs("index", "0", "a", {"match": stands_still}, shared=True)
        await bus.add_verbs("index", "1", "b", {"match": answers})
        for host, instance in [("a", "0"), ("b", "1")]:
            await registry.register("index", host, instance)
        reply = await client.post("/v1/match", json={"hashes": []})
        silent.set()
    assert reply.status_code == 200
    assert sorted(asked) == ["0", "0", "1"]


@pytest.mark.parametrize(("code", "status"), [("busy", 200), ("bad_request", 400)])
async def test_a_replica_that_is_busy_does_not_answer_for_the_others(
    bus: Bus, client: AsyncClient, code: str, status: int
) -> None:
    """Goal: what one replica refuses because of itself another one answers. A question that is at
    fault is not asked again."""
    asked: list[str] = []

    async def refuses(_payload: bytes) -> bytes:
        asked.append("0")
        raise RequestFailed(code, "not now")

    async def answers(_payload: bytes) -> bytes:
        asked.append("1")
        return msgspec.json.encode(MatchReply(asked=0, matches=[]))

    async with short_lived(bus) as registry:
        await bus.add_verbs("index", "0", "a", {"match": refuses}, shared=True)
        await bus.add_verbs("index", "1", "b", {"match": answers})
        for host, instance in [("a", "0"), ("b", "1")]:
            await registry.register("index", host, instance)
        reply = await client.post("/v1/match", json={"hashes": []})
    assert reply.status_code == status
    assert ("1" in asked) is (status == 200)


async def test_what_every_replica_refuses_is_said(bus: Bus, client: AsyncClient) -> None:
    """Goal: not that none has answered."""

    async def refuses(_payload: bytes) -> bytes:
        raise RequestFailed("busy", "256 requests are served")

    async with short_lived(bus) as registry:
        for host, instance in [("a", "0"), ("b", "1")]:
            await bus.add_verbs("index", instance, host, {"match": refuses}, shared=True)
            await registry.register("index", host, instance)
        reply = await client.post("/v1/match", json={"hashes": []})
    assert reply.json()["code"] == "busy"
