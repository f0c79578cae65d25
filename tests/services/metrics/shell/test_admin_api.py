"""The routes of operators over a real NATS, with a real index, host tier and engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, get_args

import httpx
import pytest
from kvbm_common.access.http_access import Access
from kvbm_common.config.settings import Settings
from kvbm_common.eviction import POLICIES
from kvbm_common.nats.bus import Bus
from kvbm_common.nats.embedded_server import NatsServer
from kvbm_common.registry.nats_kv import NatsRegistry
from kvbm_common.runtime.metrics import Metrics
from kvbm_common.wire.admin import PolicyRequest
from kvbm_metrics.core.bodies import BODIES
from kvbm_metrics.shell.api import create_app
from kvbm_metrics.shell.audit_log import AuditLog
from kvbm_metrics.shell.fleet import Fleet
from kvbm_metrics.shell.state import Api

from tests.services.host_tier.engine import RealEngine
from tests.services.host_tier.helpers import name
from tests.services.host_tier.running import ARENA_GB, TTL_S, held, living, wait_ready
from tests.services.index.shell import test_service as index
from tests.waiting import ask_until

WHERE = {"host": "h", "instance": "0"}
DEADLINE_S = 10


@pytest.fixture
async def engine(nats_server: NatsServer, bus: Bus, tmp_path: Path) -> AsyncIterator[RealEngine]:
    """An engine on a host tier; an index listens."""
    shm = tmp_path / "shm"
    shm.mkdir()
    values = {
        "nats_url": nats_server.url, "host": "h", "registry_ttl_s": TTL_S,
        "runtime_dir": str(tmp_path), "shm_dir": str(shm), "cpu_cache_gb": ARENA_GB,
    }  # fmt: skip
    settings = Settings.load({}, values)
    async with index.living(index.settings_of(nats_server)), living(settings):
        await index.wait_ready(bus)
        await wait_ready(bus)
        async with RealEngine.living(settings) as engine:
            yield engine


@pytest.fixture
async def client(bus: Bus) -> AsyncIterator[httpx.AsyncClient]:
    """An API over it."""
    registry = NatsRegistry(bus, ttl_s=TTL_S)
    counters = Metrics()
    audit = AuditLog(counters)
    following = asyncio.create_task(audit.run(bus))
    api = Api(fleet=Fleet(bus, registry, counters), expected=(), version="1", audit=audit,
              access=Access(without_token="admin"))  # fmt: skip
    transport = httpx.ASGITransport(create_app(api, counters))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client
    await api.jobs.close()
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    await registry.close()


def hexes(*numbers: int) -> list[str]:
    """Names of blocks."""
    return [name(number).hex() for number in numbers]


async def post(client: httpx.AsyncClient, path: str, body: object, status: int = 200) -> Any:
    """The body of an answer that has this status."""
    response = await client.post(path, json=body, headers={"kvbm-actor": "ada"})
    assert response.status_code == status, response.text
    return response.json()


async def job_of(client: httpx.AsyncClient, path: str, body: object) -> Any:
    """Start a job, and wait for its end. A registry that is slow to answer (503) is asked again."""

    async def started() -> Any:
        reply = await client.post(path, json=body, headers={"kvbm-actor": "ada"})
        assert reply.status_code in (202, 503), reply.text
        return reply.json() if reply.status_code == 202 else None

    job = await ask_until(started, deadline_s=DEADLINE_S)

    async def ended() -> Any:
        found = (await client.get(f"/v1/jobs/{job['id']}")).json()
        return found if found["state"] != "running" else None

    return await ask_until(ended, deadline_s=DEADLINE_S)


async def audit(client: httpx.AsyncClient) -> list[Any]:
    """What has been changed so far."""
    entries: list[Any] = (await client.get("/v1/audit")).json()["entries"]
    return entries


async def stored(engine: RealEngine, bus: Bus, *numbers: int) -> None:
    """Blocks in the host tier, leased by nobody."""
    await engine.store(bus, *numbers)
    await engine.release(await engine.found(*numbers))


async def story(client: httpx.AsyncClient, number: int, *, holders: int) -> Any:
    """A block, when the index knows so many holders."""

    async def told() -> Any:
        response = await client.get(f"/v1/blocks/{name(number).hex()}")
        known = response.status_code == 200 and len(response.json()["holders"]) == holders
        return response.json() if known else None

    return await ask_until(told, deadline_s=DEADLINE_S)


@pytest.mark.slow
async def test_a_block_and_its_story(
    engine: RealEngine, bus: Bus, client: httpx.AsyncClient
) -> None:
    """1. Stored: holder, slot, story. 2. Reset: a story without a holder. 3. Unknown: 404."""
    await stored(engine, bus, 1, 2)
    block = await story(client, 1, holders=1)
    assert block["holders"][0]["source"] == "host-tier-0"
    [tier] = block["tiers"]
    assert (tier["tier"], tier["held"], tier["pins"], block["silent"]) == ("host", True, 0, [])
    assert [one["what"].split()[0] for one in tier["story"]] == ["staged", "committed"]
    job = await job_of(client, "/v1/reset", {"tier": "host", "hashes": hexes(1)})
    assert (job["state"], job["progress"]["removed"]) == ("done", 1)
    block = await story(client, 1, holders=0)
    assert block["tiers"][0]["story"][-1]["what"] == "removed: admin"
    unknown = await client.get(f"/v1/blocks/{'f' * 32}")
    assert (unknown.status_code, unknown.json()["code"]) == (404, "unknown_block")
    assert await held(bus) == {2}


async def test_evict_spares_what_is_pinned(
    engine: RealEngine, bus: Bus, client: httpx.AsyncClient
) -> None:
    """Pin, see it listed, evict everything else, unpin, evict the rest; all of it audited."""
    await stored(engine, bus, 1, 2, 3)
    pinned = await post(client, "/v1/pin", {"tier": "host", "hashes": hexes(1, 9), "ttl_s": 60})
    [outcome] = pinned["outcomes"]
    assert outcome["ok"]
    assert outcome["reply"]["missing"] == hexes(9)
    [pin] = (await client.get("/v1/pins")).json()["pins"]
    assert (pin["pin"], pin["blocks"]) == (outcome["reply"]["pin"], 1)
    assert pin["owner"].startswith("ada over HTTP from ")
    job = await job_of(client, "/v1/evict", {"tier": "all", "everything": True})
    assert job["progress"] == {"removed": 2, "kept": 1, "missing": 0}
    assert await held(bus) == {1}
    ended = await post(client, "/v1/unpin", {"tier": "host", **WHERE, "pin": pin["pin"]})
    assert ended["outcomes"][0]["reply"] == {"ended": True}
    await job_of(client, "/v1/evict", {"tier": "host", "everything": True})
    assert await held(bus) == set()

    async def four() -> list[Any] | None:
        found = await audit(client)
        return found if len(found) >= 4 else None

    entries = await ask_until(four, deadline_s=DEADLINE_S)
    assert [one["verb"] for one in entries] == ["pin", "evict", "unpin", "evict"]
    assert len((await client.get("/v1/audit?last=2")).json()["entries"]) == 2


async def test_drain_and_log_level(engine: RealEngine, bus: Bus, client: httpx.AsyncClient) -> None:
    """Drained, an offer is refused; the level reaches every kind of service."""
    await post(client, "/v1/drain", {"tier": "host", **WHERE})
    [tier] = (await client.get("/v1/tiers")).json()
    assert tier["figures"]["draining"] == 1.0
    pulled = await engine.publish(bus, engine.offer(5))
    assert pulled.reason == "draining"
    await post(client, "/v1/undrain", {"tier": "all"})
    await engine.store(bus, 5)
    changed = await post(client, "/v1/log_level", {"level": "info"})
    assert [one["kind"] for one in changed["outcomes"]] == ["host-tier", "index"]


async def test_prefetch_without_a_disk_brings_nothing(
    engine: RealEngine, bus: Bus, client: httpx.AsyncClient
) -> None:
    """What is here counts; by tokens, it is the run that they hash to."""
    await stored(engine, bus, 1)
    job = await job_of(client, "/v1/prefetch", {"hashes": hexes(1, 2)})
    assert (job["state"], job["progress"]) == ("done", {"blocks": 1, "filled": 0})
    body = {"tokens": list(range(8)), "namespace": {"model": "test", "block_tokens": 4}}
    job = await job_of(client, "/v1/prefetch", body)
    assert (job["state"], job["progress"]) == ("done", {"blocks": 0, "filled": 0})


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("/v1/evict", {"tier": "host"}, 422, "bad_query"),
        ("/v1/evict", {"tier": "host", "hashes": ["x"]}, 422, "bad_query"),
        ("/v1/evict", {"tier": "device", "everything": True}, 422, "bad_query"),
        ("/v1/reset", {"tier": "disk", "everything": True}, 404, "unknown_instance"),
        ("/v1/reset", {"tier": "host", "host": "x", "everything": True}, 404, "unknown_instance"),
        ("/v1/pin", {"tier": "host", "hashes": hexes(1)}, 422, "bad_query"),
        ("/v1/prefetch", {"tokens": [1]}, 422, "bad_query"),
        ("/v1/jobs/0123456789abcdef/cancel", {}, 404, "unknown_job"),
    ],
)
@pytest.mark.usefixtures("engine")
async def test_bad_changes(
    client: httpx.AsyncClient, path: str, body: object, status: int, code: str
) -> None:
    """Each is a problem with a code, and nothing changes."""
    problem = await post(client, path, body, status)
    assert problem["code"] == code


@pytest.mark.usefixtures("engine")
async def test_an_instance_that_refuses_says_why(bus: Bus, client: httpx.AsyncClient) -> None:
    """The outcome is the instance's own error, and the other instances are asked all the same."""
    registry = NatsRegistry(bus, ttl_s=TTL_S)
    await registry.register("disk-tier", "h", "0")  # Registered, and nobody answers.

    async def three() -> bool:
        return len((await client.get("/v1/services")).json()) >= 3

    await ask_until(three, deadline_s=DEADLINE_S)
    drained = await post(client, "/v1/drain", {"tier": "all"})
    assert [(one["kind"], one["ok"], one["code"]) for one in drained["outcomes"]] == [
        ("disk-tier", False, "no_responder"), ("host-tier", True, ""),
    ]  # fmt: skip
    pins = (await client.get("/v1/pins")).json()
    assert (pins["pins"], pins["silent"]) == ([], ["disk-tier.h.0: no_responder"])
    job = await job_of(client, "/v1/evict", {"tier": "all", "everything": True})
    assert (job["state"], list(job["errors"])) == ("failed", ["disk-tier.h.0"])
    await registry.close()


async def test_a_tier_becomes_smaller_while_it_runs(
    engine: RealEngine, bus: Bus, client: httpx.AsyncClient
) -> None:
    """1. To one slot: what is pinned stays, and the job says so. 2. Unpinned, it is enough.

    3. Larger again. 4. The policy changes, what is held does not. 5. No disk, no filter.
    """
    await stored(engine, bus, 1, 2, 3)
    body = {"hashes": hexes(1, 2), "ttl_s": 60, "tier": "host"}
    [pinned] = (await post(client, "/v1/pin", body))["outcomes"]
    job = await job_of(client, "/v1/resize", {"tier": "host", "slots": 1})
    assert job["state"] == "failed"
    assert job["progress"] == {"slots": 2, "evicted": 1}
    assert "1 slots more are in use" in job["errors"]["host-tier.h.0"]
    await post(client, "/v1/unpin", {"tier": "host", **WHERE, "pin": pinned["reply"]["pin"]})
    job = await job_of(client, "/v1/resize", {"tier": "host", "slots": 1})
    assert (job["state"], job["progress"]) == ("done", {"slots": 1, "evicted": 1})
    assert len(await held(bus)) == 1
    assert (await job_of(client, "/v1/resize", {"tier": "host", "slots": 4}))["state"] == "done"
    [changed] = (await post(client, "/v1/policy", {"tier": "host", "policy": "prefix"}))["outcomes"]
    assert changed["reply"] == {"policy": "prefix", "was": "lru"}
    assert len(await held(bus)) == 1
    await post(client, "/v1/filter", {"tier": "disk", "enabled": False}, 404)
    await post(client, "/v1/filter", {"tier": "disk"}, 422)
    verbs = [one["verb"] for one in await audit(client)]
    assert {"resize", "policy"} <= set(verbs)


def test_the_policies_of_the_api_are_those_there_are() -> None:
    """Also in the document."""
    assert set(get_args(BODIES[PolicyRequest].model_fields["policy"].annotation)) == set(POLICIES)
