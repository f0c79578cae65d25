"""The HTTP API and the fleet, on a real NATS with services that answer what the test says."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import httpx
import msgspec
import orjson
import pytest
from kvbm_common.access.http_access import Access
from kvbm_common.errors import KvbmError
from kvbm_common.identity import Namespace
from kvbm_common.nats.bus import Bus, VerbHandler
from kvbm_common.nats.embedded_server import NatsServer
from kvbm_common.registry.nats_kv import NatsRegistry
from kvbm_common.registry.records import ENGINE
from kvbm_common.runtime.metrics import Metrics
from kvbm_common.wire.explain import (
    REQUEST_CHARS_MAX,
    ExplainListReply,
    ExplainListRequest,
    ExplainReply,
    ExplainRequest,
    Explanation,
)
from kvbm_common.wire.index_verbs import HolderMatch, MatchReply, MatchRequest
from kvbm_common.wire.metrics import MetricsSnapshot
from kvbm_common.wire.routes import EngineLoad, RouteRequest
from kvbm_common.wire.verbs import StatsReply
from kvbm_metrics.core import query_models, route_models
from kvbm_metrics.core.query_models import NamespaceQuery
from kvbm_metrics.shell import api, exposition, problems
from kvbm_metrics.shell import fleet as fleet_module
from kvbm_metrics.shell.admission import BODY_BYTES_MAX
from kvbm_metrics.shell.api import create_app
from kvbm_metrics.shell.fleet import Fleet
from kvbm_metrics.shell.state import Api
from prometheus_client.parser import text_string_to_metric_families

from tests.services.metrics.samples import KINDS, WORKER, counted, stats, tier_stats
from tests.waiting import ask_until, wait_until

HASHES = ["0" * 32, "1" * 32]
NAMESPACE = {"model": "test", "block_tokens": 16}


class Refusal(KvbmError):
    """What a stub refuses with."""

    def __init__(self, code: str, message: str, field: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.field = field


@dataclass
class World:
    """NATS with stubs of services, and the API that looks at them."""

    bus: Bus
    registry: NatsRegistry
    counters: Metrics = field(default_factory=Metrics)
    asked: int = 0
    """How often a stub was asked for its stats."""

    async def add(
        self, reply: StatsReply, snapshot: MetricsSnapshot | None = None, **verbs: VerbHandler
    ) -> None:
        """Register a service and serve its verbs; give `stats=` to answer something odd."""

        async def answer_stats(_payload: bytes) -> bytes:
            self.asked += 1
            return msgspec.json.encode(reply)

        async def answer_metrics(_payload: bytes) -> bytes:
            empty = MetricsSnapshot(reply.kind, reply.host, reply.instance, reply.epoch, [])
            return msgspec.json.encode(snapshot or empty)

        await self.registry.register(reply.kind, reply.host, reply.instance)
        own = {"stats": answer_stats, "metrics": answer_metrics} | {
            verb: handler for verb, handler in verbs.items() if verb in ("stats", "metrics")
        }
        shared = {verb: handler for verb, handler in verbs.items() if verb not in own}
        await self.bus.add_verbs(reply.kind, reply.instance, reply.host, own)
        if shared:
            await self.bus.add_verbs(reply.kind, reply.instance, reply.host, shared, shared=True)
        await self.wait_registered(reply.kind, reply.host, reply.instance)

    async def add_everybody(self) -> None:
        """One ready service of each kind."""
        for kind in KINDS:
            if kind.endswith("tier"):
                await self.add(tier_stats(kind, used=1, total=4))
            else:
                await self.add(stats(kind))

    async def wait_registered(self, *identity: str) -> None:
        """Wait until the registry's watch has seen it."""
        key = ".".join(identity)

        async def seen() -> bool:
            return key in [one.key for one in await self.registry.list()]

        await ask_until(seen, deadline_s=5)

    def client(self, *, expose_metrics: bool = True, **fleet: Any) -> httpx.AsyncClient:
        """A client of an API of its own."""
        api = Api(
            fleet=Fleet(self.bus, self.registry, self.counters, **fleet),
            expected=KINDS,
            version="1.2.3",
            expose_metrics=expose_metrics,
            access=Access(without_token="admin"),
        )
        transport = httpx.ASGITransport(create_app(api, self.counters))
        return httpx.AsyncClient(transport=transport, base_url="http://kvbm")


@pytest.fixture
async def world(bus: Bus) -> AsyncIterator[World]:
    """An empty world on a NATS of its own."""
    registry = NatsRegistry(bus, ttl_s=5.0)
    yield World(bus, registry)
    await registry.close()


def answering(message: msgspec.Struct | bytes) -> VerbHandler:
    """A verb that always answers the same."""

    async def answer(_payload: bytes) -> bytes:
        return message if isinstance(message, bytes) else msgspec.json.encode(message)

    return answer


def refusing(error: Exception) -> VerbHandler:
    """A verb that always fails."""

    async def refuse(_payload: bytes) -> bytes:
        raise error

    return refuse


def problem_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The problem in a response, which must be one."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    body = response.json()
    assert isinstance(body, dict)
    assert (body["status"], body["type"]) == (status, f"urn:kvbm:{body['code']}")
    return body


# --- looking at the fleet ---------------------------------------------------------------------


async def test_everybody_ready(world: World) -> None:
    """Every route answers about a whole system."""
    await world.add_everybody()
    async with world.client() as client:
        assert (await client.get("/healthz")).json() == {"status": "ok"}
        ready = await client.get("/readyz")
        assert (ready.status_code, ready.json()) == (200, {"ready": True, "reasons": []})
        status = (await client.get("/v1/status")).json()
        services = (await client.get("/v1/services")).json()
        tiers = (await client.get("/v1/tiers")).json()
        workers = (await client.get("/v1/workers")).json()
    assert status["ready"] is True
    assert status["kvbm"]["kvbm_matched_tokens"] == 0
    assert sorted(one["kind"] for one in services) == sorted(KINDS)
    assert [one["tier"] for one in tiers] == ["disk", "host"]
    assert workers == []


async def test_engines_are_no_services(world: World) -> None:
    """Goal: an engine serves no verbs; its entry in the registry makes nobody unready."""
    await world.add_everybody()
    await world.registry.register(ENGINE, "h", "vllm-0")
    await world.wait_registered(ENGINE, "h", "vllm-0")
    async with world.client() as client:
        assert (await client.get("/readyz")).status_code == 200
        services = (await client.get("/v1/services")).json()
    assert ENGINE not in [one["kind"] for one in services]


async def test_nobody_there(world: World) -> None:
    """Alive, but not ready, and every missing kind is named."""
    async with world.client() as client:
        assert (await client.get("/healthz")).status_code == 200
        ready = await client.get("/readyz")
        assert ready.status_code == 503
        assert ready.json()["reasons"] == [f"{kind}: no instance is registered" for kind in KINDS]
        assert "kvbm_matched_tokens 0.0\n" in (await client.get("/metrics")).text


async def test_those_who_do_not_answer_are_shown_as_down(world: World) -> None:
    """1. One registered without verbs, one silent, one that talks nonsense, one that starts.
    2. All are shown; the silent one costs one deadline, not one each.
    """

    async def hang(_payload: bytes) -> bytes:
        await asyncio.Event().wait()
        raise AssertionError

    await world.registry.register("index", "a", "dead")
    await world.wait_registered("index", "a", "dead")
    await world.add(stats("index", instance="hung"), stats=hang, metrics=hang)
    await world.add(stats("index", instance="mad"), stats=answering(b'{"kind": 3}'))
    starting = refusing(Refusal("not_ready", "starting"))
    await world.add(stats("index", instance="starting"), stats=starting)
    async with world.client(deadline_s=0.2) as client:
        services = {one["instance"]: one for one in (await client.get("/v1/services")).json()}
    assert {name: one["up"] for name, one in services.items()} == {
        "dead": False, "hung": False, "mad": False, "starting": True,
    }  # fmt: skip
    assert not any(one["ready"] for one in services.values())
    assert services["starting"]["reasons"] == ["not_ready: starting"]
    # The codes of instances are theirs to invent, and would be series without end.
    codes = ("no_responder", "deadline_exceeded", "bad_message", "peer_failed")
    for code in codes:
        labels = {"service": "index", "verb": "stats", "code": code}
        assert world.counters.value("kvbm_fleet_failures_total", **labels) == 1, code


@pytest.mark.slow
async def test_host_tiers_explain_at_the_same_time(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: silent host tiers cost one deadline together, not one each.

    Method: two answer when both have been asked; a third one says nothing.
    """
    monkeypatch.setattr(fleet_module, "OPERATOR_DEADLINE_S", 2.0)
    asked = asyncio.Barrier(2)

    async def explain(_payload: bytes) -> bytes:
        await asked.wait()
        said = Explanation(request="r", engine="e", ts_ms=1, blocks=1, hit_blocks=1, reason="",
                           segments=[])  # fmt: skip
        return msgspec.json.encode(ExplainListReply(requests=[said]))

    async def hang(_payload: bytes) -> bytes:
        await asyncio.Event().wait()
        raise AssertionError

    for host, answer in (("a", hang), ("b", explain), ("c", explain)):
        await world.add(tier_stats("host-tier", used=1, total=4, host=host))
        await world.bus.add_verbs("host-tier", "0", host, {"explain_list": answer})
    async with world.client() as client:
        said = (await client.get("/v1/explain")).json()
    assert [one["host"] for one in said["requests"]] == ["b", "c"]
    assert said["silent"] == ["host-tier.a.0: deadline_exceeded"]


async def test_a_reason_that_does_not_exist_is_refused(world: World) -> None:
    """One of a newer host tier does: this release does not know it, and finds it."""
    newer = "newer_reason"

    async def explain(payload: bytes) -> bytes:
        asked = msgspec.json.decode(payload, type=ExplainListRequest).reason
        said = Explanation(request="r", engine="e", ts_ms=1, blocks=1, hit_blocks=0, reason=newer,
                           segments=[])  # fmt: skip
        return msgspec.json.encode(ExplainListReply(requests=[said] if asked == newer else []))

    await world.add(tier_stats("host-tier", used=1, total=4))
    await world.bus.add_verbs("host-tier", "0", "a", {"explain_list": explain})
    async with world.client() as client:
        problem = problem_of(await client.get("/v1/explain?reason=nonsense"), 422)
        assert (problem["code"], problem["field"]) == ("bad_query", "reason")
        assert "no such reason: nonsense; there are never_stored, " in problem["detail"]
        assert (await client.get("/v1/explain?reason=evicted")).json()["requests"] == []
        [found] = (await client.get(f"/v1/explain?reason={newer}")).json()["requests"]
        assert found["reason"] == newer


@pytest.mark.parametrize("request_id", ["cmpl-1", "a\nb\n", "a b+c%2F&x=1", "..", "é" * 300])
async def test_a_request_is_found_by_any_id_that_a_client_may_choose(
    world: World, request_id: str
) -> None:
    """A connector keeps 256 characters of it. Most can be a part of the address as well."""
    kept = request_id[:REQUEST_CHARS_MAX]

    async def explain(payload: bytes) -> bytes:
        asked = msgspec.json.decode(payload, type=ExplainRequest).request
        said = Explanation(request=kept, engine="e", ts_ms=1, blocks=1, hit_blocks=1, reason="",
                           segments=[])  # fmt: skip
        return msgspec.json.encode(ExplainReply(requests=[said] if asked == kept else [], kept=1))

    await world.add(tier_stats("host-tier", used=1, total=4))
    await world.bus.add_verbs("host-tier", "0", "a", {"explain": explain})
    async with world.client() as client:
        said = await client.get("/v1/explanation", params={"request": request_id})
        assert (said.status_code, said.json()["request_id"]) == (200, kept)
        assert len(said.json()["lookups"]) == 1
        if "\n" not in request_id and request_id != "..":
            same = await client.get(f"/v1/explain/{quote(request_id, safe='')}")
            assert same.json() == said.json()
        problem_of(await client.get("/v1/explanation?request="), 422)


async def test_a_storm_of_requests_is_one_question(world: World) -> None:
    """Fifty readers at once; then one within the cache's time; then one after it."""
    await world.add(stats("index"))
    clock = {"now": 0.0}
    async with world.client(clock_s=lambda: clock["now"]) as client:
        responses = await asyncio.gather(*(client.get("/v1/status") for _ in range(50)))
        assert {one.status_code for one in responses} == {200}
        assert world.asked == 1
        clock["now"] = 0.25
        await client.get("/v1/tiers")
        assert world.asked == 1
        clock["now"] = 0.26
        await client.get("/v1/tiers")
        assert world.asked == 2


async def test_nats_goes_away(world: World, nats_server: NatsServer) -> None:
    """The API goes on with what it knew: everybody down, totals kept, the reason said."""
    await world.add(stats("host-tier"), counted("kvbm_matched_tokens", 5))
    async with world.client(cache_s=0.0) as client:
        assert "\nkvbm_matched_tokens 5.0\n" in (await client.get("/metrics")).text
        await nats_server.stop()
        await wait_until(lambda: not world.bus.connected)
        text = (await client.get("/metrics")).text
        assert "\nkvbm_matched_tokens 5.0\n" in text
        assert 'kvbm_up{host="a",instance="0",kind="host-tier"} 0.0' in text
        ready = await client.get("/readyz")
        assert ready.status_code == 503
        assert "NATS is away" in ready.json()["reasons"]
        problem_of(await client.post("/v1/match", json={"hashes": HASHES}), 503)


async def test_workers_and_their_host_tier(world: World) -> None:
    """What the host tier says of its engines arrives at the reader."""
    await world.add(tier_stats("host-tier", used=0, total=1, workers=[WORKER]))
    async with world.client() as client:
        (worker,) = (await client.get("/v1/workers")).json()
    assert worker["engine"] == "sim-0"
    assert worker["namespace"] == Namespace(model="test", block_tokens=16).digest.hex()


# --- metrics ----------------------------------------------------------------------------------


async def test_metrics_are_prometheus_text(world: World) -> None:
    """Prometheus's own parser reads it; our own requests are counted by route, not by path."""
    await world.add(stats("host-tier"), counted("kvbm_matched_tokens", 5))
    async with world.client() as client:
        for path in ("/healthz", "/nothing/1", "/nothing/2"):
            await client.get(path)
        response = await client.get("/metrics")
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    families = {one.name: one for one in text_string_to_metric_families(response.text)}
    assert families["kvbm_up"].samples[0].value == 1
    requests = partial(world.counters.value, "kvbm_http_requests_total")
    assert requests(route="/healthz", status="200") == 1
    assert requests(route="other", status="404") == 2
    assert requests(route="/metrics", status="200") == 1


async def test_the_page_is_written_in_a_thread(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page of a hundred instances takes longer than an event loop has to spare."""
    written_in: list[int] = []

    def render(*given: Any, **named: Any) -> bytes:
        written_in.append(threading.get_ident())
        return b""

    monkeypatch.setattr(exposition, "render", render)
    async with world.client() as client:
        assert (await client.get("/metrics")).status_code == 200
    assert len(written_in) == 1
    assert threading.get_ident() not in written_in


async def test_orjson_renders_what_routes_return(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every JSON route, and errors too."""
    rendered: list[object] = []

    def dumps(said: object) -> bytes:
        rendered.append(said)
        return orjson.dumps(said)

    for module in (api, problems):
        monkeypatch.setattr(module, "orjson", SimpleNamespace(dumps=dumps))
    await world.add(tier_stats("host-tier", used=0, total=1))
    paths = ("/healthz", "/readyz", "/v1/status", "/v1/services", "/v1/tiers", "/v1/workers")
    async with world.client() as client:
        for path in (*paths, "/nothing"):
            assert (await client.get(path)).json() == rendered[-1]
    assert len(rendered) == len(paths) + 1


async def test_metrics_can_be_hidden(world: World) -> None:
    """DYN_KVBM_METRICS=false: a problem, while the admin API stays."""
    async with world.client(expose_metrics=False) as client:
        assert (
            problem_of(await client.get("/metrics"), 404)["detail"] == "DYN_KVBM_METRICS is false"
        )
        assert (await client.get("/v1/status")).status_code == 200


# --- match ------------------------------------------------------------------------------------


async def test_the_other_questions_reach_the_index(world: World) -> None:
    """Batch, score, route, where and holders: what is asked arrives, the answer comes back."""
    asked: dict[str, dict[str, Any]] = {}
    place = {"host": "a", "source": "e", "rank": 0, "blocks": 2, "score": 1.5}
    costs = {"cost": 2.2, "compute": 1, "load": 0.2, "queue": 1.0, "found": {"host": 1}}
    ranked = {"host": "a", "source": "e", "rank": 0, **costs}
    left_out = {"host": "a", "source": "f", "reason": "behind"}
    holder = {"host": "a", "source": "e", "tier": "device", "rank": 0, "group": 0}
    answers: dict[str, dict[str, Any]] = {
        "match_batch": {"replies": [{"asked": 2, "matches": [{**holder, "blocks": 1}]}]},
        "score": {"asked": 2, "scores": [place]},
        "route": {"asked": 2, "engines": [ranked], "left_out": [left_out]},
        "where": {"blocks": [{"hash": HASHES[0], "holders": [holder]}]},
        "holders": {"holders": [{**holder, "epoch": 1, "seq": 2, "blocks": 3}]},
    }

    def answering(verb: str) -> VerbHandler:
        async def answer(payload: bytes) -> bytes:
            asked[verb] = msgspec.json.decode(payload)
            return msgspec.json.encode(answers[verb])

        return answer

    verbs = {verb: answering(verb) for verb in answers}
    await world.add(stats("index"), None, **verbs)
    bodies: dict[str, dict[str, Any]] = {
        "match_batch": {"questions": [{"hashes": HASHES}]},
        "score": {"hashes": HASHES, "weights": {"disk": 0.25}},
        "route": {"hashes": HASHES, "engines": [{"source": "e", "running": 1}], "peer_weight": 0.5},
        "where": {"hashes": HASHES[:1]},
    }
    async with world.client() as client:
        for verb, body in bodies.items():
            assert (await client.post(f"/v1/{verb}", json=body)).json() == answers[verb]
        found = await client.get("/v1/holders", params={"source": "e"})
        assert found.json() == answers["holders"]
        for verb, body in (
            ("match_batch", {"questions": [{}]}),
            ("score", {"hashes": HASHES, "weights": {"device": -1}}),
            ("route", {"hashes": HASHES, "engines": [{"source": "e", "running": -1}]}),
            ("route", {"hashes": HASHES, "engines": [{"host": "a"}]}),
            ("where", {}),
        ):
            problem_of(await client.post(f"/v1/{verb}", json=body), 422)
        problem_of(await client.get("/v1/holders", params={"source": "no dots."}), 422)
    assert asked["match_batch"]["questions"][0]["hashes"] == HASHES
    assert asked["score"]["weights"] == {"disk": 0.25}
    assert [one["source"] for one in asked["route"]["engines"]] == ["e"]
    assert asked["where"]["hashes"] == HASHES[:1]
    assert asked["holders"]["source"] == "e"


async def test_match_asks_the_index(world: World) -> None:
    """The question arrives as the wire says, the answer goes back as it came."""
    asked: list[MatchRequest] = []
    holder = HolderMatch(host="a", source="disk-tier-0", tier="disk", blocks=2)

    async def match(payload: bytes) -> bytes:
        asked.append(msgspec.json.decode(payload, type=MatchRequest))
        return msgspec.json.encode(MatchReply(asked=2, matches=[holder]))

    await world.add(stats("index"), match=match)
    tokens = {"tokens": [1, 2], "namespace": NAMESPACE, "salt": "s", "lora": "l"}
    async with world.client() as client:
        answers = [await client.post("/v1/match", json=one) for one in ({"hashes": HASHES}, tokens)]
    assert asked == [
        MatchRequest(hashes=HASHES),
        MatchRequest(
            tokens=[1, 2],
            namespace=Namespace(model="test", block_tokens=16),
            salt="s",
            lora="l",
        ),
    ]
    for answer in answers:
        assert answer.json() == {
            "asked": 2,
            "matches": [
                {
                    "host": "a",
                    "source": "disk-tier-0",
                    "tier": "disk",
                    "rank": 0,
                    "group": 0,
                    "blocks": 2,
                }
            ],
        }


def test_a_question_takes_every_field_of_a_namespace() -> None:
    """Goal: a namespace of the wire can be asked for, with the defaults that it has there."""
    namespace = Namespace(model="m", block_tokens=4)
    assert NamespaceQuery(model="m", block_tokens=4).to_namespace() == namespace
    assert NamespaceQuery.model_fields.keys() == set(namespace.__struct_fields__)


@pytest.mark.parametrize(
    ("body", "at_fault"),
    [
        ({}, "hashes"),
        ({"hashes": ["xyz"]}, "hashes.0"),
        ({"hashes": ["0" * 32, 7]}, "hashes.1"),
        ({"hashes": "0" * 32}, "hashes"),
        ({"hashes": ["0" * 32] * 65_537}, "hashes"),
        ({"hashes": [], "tokens": [1]}, "tokens"),
        ({"tokens": [1]}, "namespace"),
        ({"tokens": [-1], "namespace": NAMESPACE}, "tokens.0"),
        ({"tokens": [1, 2**32], "namespace": NAMESPACE}, "tokens.1"),
        ({"tokens": ["1"], "namespace": NAMESPACE}, "tokens.0"),
        ({"tokens": [1], "namespace": {"model": "m"}}, "namespace.block_tokens"),
        ({"tokens": [1], "namespace": NAMESPACE | {"model": ""}}, "namespace.model"),
        ({"tokens": [1], "namespace": NAMESPACE | {"block_tokens": 0}}, "namespace.block_tokens"),
        ({"tokens": [1], "namespace": NAMESPACE | {"colour": 1}}, "namespace.colour"),
        ({"tokens": [1], "namespace": NAMESPACE | {"group": -1}}, "namespace.group"),
        ({"tokens": [1], "namespace": NAMESPACE | {"layers": 2**63}}, "namespace.layers"),
        ({"tokens": [1], "namespace": NAMESPACE | {"format": 2}}, "namespace.format"),
        ({"tokens": [1], "namespace": NAMESPACE | {"parts": "4" * 4097}}, "namespace.parts"),
        ({"hashes": [], "salt": "s"}, "salt"),
        ({"hashes": [], "hash": "x"}, "hash"),
        ([], "body"),
        (None, "body"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_a_bad_question_names_the_field(world: World, body: object, at_fault: str) -> None:
    """Refused here, before anybody else has work with it."""
    async with world.client() as client:
        problem = problem_of(await client.post("/v1/match", json=body), 422)
    assert problem["field"] == at_fault
    assert at_fault in problem["errors"]
    assert (problem["code"], world.asked) == ("bad_query", 0)


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"", 422),
        (b"{", 400),
        (b"\xff", 400),
        (b"[" * 100_000, 400),
        (b'{"hashes": [NaN]}', 422),
        (b'{"salt": "\\ud800", "hashes": []}', 422),
        (b'{"tokens": [1], "namespace": {"model": "m", "block_tokens": 16}, '
         b'"salt": "\\ud800"}', 422),
        (b'{"tokens": [1], "namespace": {"model": "m", "block_tokens": 16}, '
         b'"lora": "\\udfff"}', 422),
        (b" " * (BODY_BYTES_MAX + 1), 413),
    ],
    ids=["empty", "cut", "not utf-8", "nested", "nan", "surrogate", "salt", "lora", "oversized"],
)  # fmt: skip
@pytest.mark.parametrize("verb", ["match", "score", "route"])
async def test_a_body_that_is_not_a_question_is_a_problem(
    world: World, verb: str, content: bytes, status: int
) -> None:
    """Always a problem, never a crash."""
    async with world.client() as client:
        headers = {"content-type": "application/json"}
        problem_of(await client.post(f"/v1/{verb}", content=content, headers=headers), status)


@pytest.mark.parametrize(
    ("make", "status", "code"),
    [
        (
            lambda: refusing(Refusal("bad_identity", "block_tokens", "namespace")),
            400,
            "bad_identity",
        ),
        (lambda: refusing(Refusal("not_ready", "catching up")), 503, "not_ready"),
        (lambda: refusing(ValueError("a mistake")), 502, "internal"),
        (lambda: answering(b"{}"), 502, "bad_message"),
    ],
    ids=["refused", "not ready", "crashed", "nonsense"],
)
async def test_the_index_cannot_answer(
    world: World, make: Callable[[], VerbHandler], status: int, code: str
) -> None:
    """Whose fault it is shows in the status; the index's own code and field arrive."""
    await world.add(stats("index"), match=make())
    async with world.client() as client:
        problem = problem_of(await client.post("/v1/match", json={"hashes": HASHES}), status)
    assert problem["code"] == code
    assert problem["field"] == ("namespace" if code == "bad_identity" else "")


async def test_no_index_there(world: World) -> None:
    """503: try again later."""
    async with world.client() as client:
        problem = problem_of(await client.post("/v1/match", json={"hashes": HASHES}), 503)
    assert problem["code"] == "no_responder"


# --- the API as such --------------------------------------------------------------------------


async def test_unknown_routes_and_methods_are_problems(world: World) -> None:
    """Also what FastAPI answers by itself."""
    async with world.client() as client:
        assert problem_of(await client.get("/v2"), 404)["code"] == "not_found"
        response = await client.get("/v1/match")
        assert problem_of(response, 405)["code"] == "method_not_allowed"
        assert response.headers["allow"] == "POST"


async def test_a_mistake_of_ours_is_a_problem_without_secrets(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The type goes to the asker, the rest to the log."""

    async def broken(_fleet: Fleet) -> None:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(Fleet, "view", broken)
    async with world.client() as client:
        client._transport.raise_app_exceptions = False  # type: ignore[attr-defined]
        problem = problem_of(await client.get("/v1/status"), 500)
    assert "secret" not in problem["detail"]


async def test_openapi_is_complete(world: World) -> None:
    """Each route has a summary and says what it answers, errors included."""
    async with world.client() as client:
        document = (await client.get("/openapi.json")).json()
    assert set(document["paths"]) == {
        "/healthz", "/readyz", "/metrics",
        "/v1/status", "/v1/history", "/v1/bounds", "/v1/services", "/v1/tiers", "/v1/workers",
        "/v1/match",
        "/v1/match_batch", "/v1/score", "/v1/route", "/v1/where", "/v1/holders", "/v1/blocks",
        "/v1/blocks/{hash}", "/v1/pins", "/v1/pin", "/v1/unpin", "/v1/evict", "/v1/reset",
        "/v1/prefetch", "/v1/resize", "/v1/policy", "/v1/filter", "/v1/drain", "/v1/undrain",
        "/v1/log_level", "/v1/audit", "/v1/jobs", "/v1/jobs/{job}", "/v1/jobs/{job}/cancel",
        "/v1/forget", "/v1/events", "/v1/explain", "/v1/explain/{request_id}", "/v1/explanation",
    }  # fmt: skip
    for path, methods in document["paths"].items():
        for method in methods.values():
            assert method["description"], path
            for status, response in method["responses"].items():
                assert response["content"], (path, status)
                if int(status) >= 400 and path != "/readyz":
                    assert list(response["content"]) == ["application/problem+json"]
    for name, schema in document["components"]["schemas"].items():
        assert schema.get("description"), name


def test_questions_have_the_fields_of_the_wire() -> None:
    """The HTTP body and the wire message cannot drift apart."""
    on_wire = set(MatchRequest.__struct_fields__) - {"v"}
    assert set(query_models.MatchQuery.model_fields) == on_wire
    on_wire = set(RouteRequest.__struct_fields__) - {"v"}
    assert set(route_models.RouteQuery.model_fields) == on_wire
    assert set(route_models.EngineQuery.model_fields) == set(EngineLoad.__struct_fields__)
    for one in msgspec.structs.fields(Namespace):
        default = query_models.NamespaceQuery.model_fields[one.name].get_default()
        if not one.required:
            assert default == ("" if one.default is msgspec.UNSET else one.default), one.name
    assert set(query_models.NamespaceQuery.model_fields) == set(Namespace.__struct_fields__)


@pytest.mark.parametrize("sent", ["application/x-www-form-urlencoded", "text/plain", ""])
async def test_a_body_of_another_type_is_told_which_type_to_send(world: World, sent: str) -> None:
    """As curl's `-d` sends it. A body of the right type is told what is wrong in it."""
    async with world.client() as client:
        for path in ("/v1/match", "/v1/score"):
            said = await client.post(path, content=b"{}", headers={"content-type": sent})
            problem = problem_of(said, 422)
            assert problem["field"] == "body"
            told = "body: send JSON with the header Content-Type: application/json"
            assert problem["detail"] == told
            as_json = problem_of(await client.post(path, json=[5]), 422)
            assert "Content-Type" not in as_json["detail"]
            assert as_json["field"] == "body"


LINE_END = "%0A"


@pytest.mark.parametrize(
    "path",
    [
        "/v1/events?host=a", "/v1/events?source=a", "/v1/events?kind=stored", "/v1/events?host=*",
        "/v1/explain?reason=a", "/v1/explain?engine=a", "/v1/holders?source=a",
        f"/v1/blocks/{HASHES[0]}", "/v1/jobs/0123456789abcdef",
    ],
)  # fmt: skip
async def test_a_name_in_an_address_does_not_end_in_a_line_break(world: World, path: str) -> None:
    """It would become a word of a NATS subject. In Python's patterns `$` lets it pass."""
    async with world.client() as client:
        problem = problem_of(await client.get(path + LINE_END), 422)
        assert problem["code"] == "bad_query"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("match", {"hashes": [HASHES[0] + "\n"]}),
        ("match_batch", {"questions": [{"hashes": [HASHES[0] + "\n"]}]}),
        ("score", {"hashes": [HASHES[0] + "\n"]}),
        ("where", {"hashes": [HASHES[0] + "\n"]}),
        ("route", {"hashes": HASHES, "engines": [{"source": "e\n"}]}),
        ("route", {"hashes": HASHES, "engines": [{"source": "e", "host": "a\n"}]}),
        ("prefetch", {"hashes": [HASHES[0] + "\n"]}),
        ("prefetch", {"hashes": HASHES, "host": "a\n"}),
        ("prefetch", {"hashes": HASHES, "instance": "a\n"}),
        ("evict", {"tier": "all", "hashes": [HASHES[0] + "\n"]}),
        ("evict", {"tier": "all", "namespace": "0" * 64 + "\n"}),
        ("drain", {"tier": "all", "host": "a\n"}),
        ("drain", {"tier": "all", "instance": "a\n"}),
    ],
)
async def test_a_name_in_a_body_does_not_end_in_a_line_break(
    world: World, path: str, body: dict[str, Any]
) -> None:
    """Bodies have patterns of the wire, which Python's engine reads."""
    async with world.client() as client:
        response = await client.post(f"http://localhost/v1/{path}", json=body)
        assert problem_of(response, 422)["code"] == "bad_query"
