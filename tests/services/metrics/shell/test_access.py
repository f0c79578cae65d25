"""Who may do what over HTTP: tokens, loopback, and pages of other sites."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest
from kvbm_common.config.settings import Settings
from kvbm_common.errors import ConfigError
from kvbm_common.nats.bus import Bus
from kvbm_common.registry.nats_kv import NatsRegistry
from kvbm_common.runtime.metrics import Metrics
from kvbm_metrics.shell.access import Access, access_of
from kvbm_metrics.shell.api import create_app
from kvbm_metrics.shell.fleet import Fleet
from kvbm_metrics.shell.state import Api

READ = {"authorization": "Bearer read-token"}
ADMIN = {"authorization": "Bearer admin-token"}
DRAIN = {"tier": "all"}
CLOSED = Access(read_token="read-token", admin_token="admin-token", without_token="none")


@pytest.fixture
async def registry(bus: Bus) -> AsyncIterator[NatsRegistry]:
    """Nobody is registered: a change that gets in is answered 404."""
    registry = NatsRegistry(bus, ttl_s=5.0)
    yield registry
    await registry.close()


def client(bus: Bus, registry: NatsRegistry, access: Access) -> httpx.AsyncClient:
    """An API with this access."""
    counters = Metrics()
    api = Api(fleet=Fleet(bus, registry, counters), expected=(), version="1", access=access)
    transport = httpx.ASGITransport(create_app(api, counters))
    return httpx.AsyncClient(transport=transport, base_url="http://localhost:6880")


async def codes(asked: httpx.AsyncClient, headers: dict[str, str]) -> tuple[int, int]:
    """The status of a question and of a change."""
    question = await asked.get("/v1/services", headers=headers)
    change = await asked.post("/v1/drain", json=DRAIN, headers=headers)
    return question.status_code, change.status_code


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, (401, 401)),
        (READ, (200, 403)),
        (ADMIN, (200, 404)),
        ({"authorization": "Bearer wrong"}, (401, 401)),
        ({"authorization": "Basic YTpi"}, (401, 401)),
        ({"authorization": "Bearer r\u00e9ad-token"}, (401, 401)),
    ],
    ids=["nothing", "read", "admin", "wrong", "basic", "not ascii"],
)
async def test_two_roles(
    bus: Bus, registry: NatsRegistry, headers: dict[str, str], expected: tuple[int, int]
) -> None:
    """Who may ask may not change; a wrong token is worth less than none."""
    raw = {name: value.encode("latin-1") for name, value in headers.items()}
    async with client(bus, registry, CLOSED) as asked:
        assert await codes(asked, raw) == expected  # type: ignore[arg-type]


async def test_a_refusal_says_what_to_do(bus: Bus, registry: NatsRegistry) -> None:
    """The problem names the variables, the header the scheme."""
    async with client(bus, registry, CLOSED) as asked:
        refused = await asked.post("/v1/drain", json=DRAIN)
    assert refused.headers["www-authenticate"] == "Bearer"
    assert refused.headers["content-type"] == "application/problem+json"
    assert refused.json()["code"] == "unauthorized"
    assert "KVBM_ADMIN_TOKEN" in refused.json()["detail"]


async def test_probes_and_prometheus_need_no_token(bus: Bus, registry: NatsRegistry) -> None:
    """Also where everything else needs one."""
    async with client(bus, registry, CLOSED) as asked:
        pages = ("/", "/live/live.js", "/docs", "/openapi.json")
        for path in (*pages, "/healthz", "/readyz", "/metrics"):
            assert (await asked.get(path)).status_code in (200, 503), path


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 404),
        ({"origin": "http://localhost:6880"}, 404),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"host": "evil.example:6880"}, 403),
        ({"host": "127.0.0.1:6880"}, 404),
        ({"host": "[::1]:6880"}, 404),
    ],
)
async def test_other_sites_pages_change_nothing(
    bus: Bus, registry: NatsRegistry, headers: dict[str, str], status: int
) -> None:
    """Without tokens a browser on this machine is the way in: by its Origin, or a rebound name."""
    async with client(bus, registry, Access()) as asked:
        response = await asked.post("/v1/drain", json=DRAIN, headers=headers)
    assert response.status_code == status


@pytest.mark.parametrize(
    ("bind", "tokens", "open_role", "expected"),
    [
        ("127.0.0.1", False, None, "admin"),
        ("::1", False, None, "admin"),
        ("localhost", False, None, "admin"),
        ("0.0.0.0", False, None, "none"),
        ("127.0.0.1", True, None, "none"),
        ("0.0.0.0", False, "read", "read"),
        ("127.0.0.1", False, "none", "none"),
    ],
)
def test_what_needs_no_token(bind: str, tokens: bool, open_role: str | None, expected: str) -> None:
    """By default everything on loopback, and nothing elsewhere or where there are tokens."""
    access = access_of(
        bind=bind,
        read_token="",
        admin_token="admin-token" if tokens else "",
        open_role=open_role,  # type: ignore[arg-type]
    )
    assert access.role_of(None) == expected


def test_a_bad_token_is_not_shown() -> None:
    """Too short: the error names the variable, not the secret."""
    with pytest.raises(ConfigError) as caught:
        Settings.load({"KVBM_ADMIN_TOKEN": "hunter2"})
    assert "KVBM_ADMIN_TOKEN" in str(caught.value)
    assert "hunter2" not in str(caught.value)
