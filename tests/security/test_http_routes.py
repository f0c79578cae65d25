"""Every route of both HTTP servers, tried with each token and with none."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from fastapi import FastAPI
from kvbm_common.access.http_access import Access, Role, Token
from kvbm_common.access.secret_files import write_secret
from kvbm_common.config.settings import Settings
from kvbm_common.nats.bus import Bus
from kvbm_common.registry.nats_kv import NatsRegistry
from kvbm_common.runtime.metrics import Metrics
from kvbm_common.runtime.processes import free_port
from kvbm_common.service.http_port import http_port
from kvbm_common.wire.operator_verbs import OPERATOR_VERBS
from kvbm_metrics.shell.api import create_app
from kvbm_metrics.shell.fleet import Fleet
from kvbm_metrics.shell.state import Api

TOKENS = {role: f"the-{role}-token" for role in ("scrape", "read", "admin")}
RANK = ("", *TOKENS)
"""What a request may show, by what it is worth."""
OPEN = {"/", "/live/{part}", "/docs", "/openapi.json", "/healthz", "/readyz"}
"""Pages without figures, and what probes ask."""
CHANGES = {verb.route for verb in OPERATOR_VERBS if verb.is_change} | {
    "/v1/jobs/{job}/cancel", "/v1/prefetch",
}  # fmt: skip
UNAUTHORIZED, FORBIDDEN = 401, 403


def wanted_by(path: str) -> str:
    """Return the role that a route is for; empty: it needs none."""
    if path in OPEN:
        return ""
    if path == "/metrics":
        return "scrape"
    return "admin" if path in CHANGES else "read"


def routes_of(app: Any) -> Iterator[tuple[str, str]]:
    """Yield method and path of every route, also of those that are in no document."""
    for route in app.routes:
        if (inner := getattr(route, "original_router", None)) is not None:
            yield from routes_of(inner)
            continue
        for method in sorted(route.methods or ()):
            if method != "HEAD":
                yield method, route.path


@pytest.fixture
def app(bus: Bus) -> FastAPI:
    """The API on another address than loopback, with a token for each role."""
    counters = Metrics()
    access = Access(tokens=tuple(Token(cast(Role, role), text) for role, text in TOKENS.items()))
    registry = NatsRegistry(bus, ttl_s=5.0)
    api = Api(fleet=Fleet(bus, registry, counters), expected=(), version="1", access=access)
    return create_app(api, counters)


@pytest.fixture
async def client(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    """A client of it."""
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as asked:
        yield asked
    await app.state.api.jobs.close()


def test_the_table_knows_every_change(app: FastAPI) -> None:
    """A route of a change that is not in it would be tried as a question."""
    described = app.openapi()["paths"]
    changes = {
        path
        for path, one in described.items()
        if str(FORBIDDEN) in one.get("post", {}).get("responses", {})
    }
    assert {path for _, path in routes_of(app)} >= CHANGES | OPEN
    assert changes == CHANGES


@pytest.mark.slow
@pytest.mark.parametrize("shown", RANK, ids=lambda role: role or "nothing")
async def test_each_route_is_for_its_role(
    app: FastAPI, client: httpx.AsyncClient, shown: str
) -> None:
    """Goal: no route answers without a token, nor to one that it is not for.

    What is let in may be answered 404 or 422; what is not is 401 without a token, else 403.
    """
    headers = {"authorization": f"Bearer {TOKENS[shown]}"} if shown else {}
    tried = 0
    for method, path in routes_of(app):
        if path == "/v1/events" and shown in ("read", "admin"):
            continue  # It would never end.
        url = re.sub(r"{\w+}", "x", path)
        status = (await client.request(method, url, headers=headers)).status_code
        if RANK.index(shown) >= RANK.index(wanted_by(path)):
            assert status not in (UNAUTHORIZED, FORBIDDEN), f"{method} {path}: {status}"
        else:
            expected = FORBIDDEN if shown else UNAUTHORIZED
            assert status == expected, f"{method} {path}: {status}"
        tried += 1
    assert tried > 30


@pytest.mark.parametrize("path", ["/metrics", "/healthz", "/readyz", "/", "/v1/status"])
async def test_a_services_own_port(path: str, tmp_path: Path) -> None:
    """Figures want a token on another address than loopback; probes are told whether, not why."""
    write_secret(tmp_path / "token", TOKENS["scrape"])
    port = free_port("0.0.0.0")
    own = Settings.load(
        {}, {"service_port": port, "service_bind": "0.0.0.0",
             "scrape_token_file": tmp_path / "token"},
    )  # fmt: skip
    async with (
        http_port(own, list, lambda: ["a reason with a name"]),
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as asked,
    ):
        without = await asked.get(path)
        good = await asked.get(path, headers={"authorization": f"Bearer {TOKENS['scrape']}"})
        wrong = await asked.get(path, headers={"authorization": "Bearer wrong-token"})
    expected = {"/metrics": (401, 401, 200), "/healthz": (200, 200, 200),
                "/readyz": (503, 503, 503)}.get(path, (404, 404, 404))  # fmt: skip
    assert (without.status_code, wrong.status_code, good.status_code) == expected
    if path == "/readyz":
        assert "name" not in without.text + wrong.text
        assert "name" in good.text
