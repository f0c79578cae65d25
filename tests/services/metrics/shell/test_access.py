"""Who may do what over HTTP: tokens, loopback, and pages of other sites."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from kvbm_common.access.http_access import (
    HIDDEN,
    Access,
    Token,
    admin_token_of,
    api_access,
)
from kvbm_common.access.secret_files import write_secret
from kvbm_common.config.settings import Settings
from kvbm_common.errors import ConfigError
from kvbm_common.nats.bus import Bus
from kvbm_common.registry.nats_kv import NatsRegistry
from kvbm_common.runtime.metrics import Metrics
from kvbm_metrics.shell.api import create_app
from kvbm_metrics.shell.fleet import Fleet
from kvbm_metrics.shell.state import Api

READ = {"authorization": "Bearer read-token"}
ADMIN = {"authorization": "Bearer admin-token"}
DRAIN = {"tier": "all"}
CLOSED = Access(tokens=(Token("read", "read-token"), Token("admin", "admin-token"),
                        Token("scrape", "scrape-token")))  # fmt: skip
SCRAPE = {"authorization": "Bearer scrape-token"}


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
        (SCRAPE, (403, 403)),
        (ADMIN, (200, 404)),
        ({"authorization": "Bearer wrong"}, (401, 401)),
        ({"authorization": "Basic YTpi"}, (401, 401)),
        ({"authorization": "Bearer r\u00e9ad-token"}, (401, 401)),
    ],
    ids=["nothing", "read", "scrape", "admin", "wrong", "basic", "not ascii"],
)
async def test_the_read_token_may_ask_and_not_change(
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


@pytest.mark.slow
async def test_probes_need_no_token_and_figures_do(bus: Bus, registry: NatsRegistry) -> None:
    """1. A probe is told whether, not why. 2. Figures and reasons are for the role scrape."""
    await bus.close()
    async with client(bus, registry, CLOSED) as asked:
        pages = ("/", "/live/live.js", "/docs", "/openapi.json")
        for path in (*pages, "/healthz", "/readyz"):
            assert (await asked.get(path)).status_code in (200, 503), path
        assert (await asked.get("/readyz")).json() == {"ready": False, "reasons": [HIDDEN]}
        assert (await asked.get("/metrics")).status_code == 401
        for headers in (SCRAPE, READ, ADMIN):
            assert (await asked.get("/metrics", headers=headers)).status_code == 200
            assert HIDDEN not in (await asked.get("/readyz", headers=headers)).json()["reasons"]


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
    async with client(bus, registry, Access(without_token="admin")) as asked:
        response = await asked.post("/v1/drain", json=DRAIN, headers=headers)
    assert response.status_code == status


def settings(directory: Path, **more: object) -> Settings:
    """Settings with a directory of credentials of the test's own."""
    return Settings.load({}, {"creds_dir": directory / "creds", **more})


@pytest.mark.parametrize(
    ("bind", "more", "expected"),
    [
        ("127.0.0.1", {}, "scrape"),
        ("::1", {}, "scrape"),
        ("localhost", {}, "scrape"),
        ("127.0.0.1", {"admin_token": "a-token-of-ours"}, "scrape"),
        ("127.0.0.1", {"admin_open": "none"}, "scrape"),
        ("127.0.0.1", {"admin_open": "admin"}, "admin"),
        ("0.0.0.0", {"admin_token": "a-token-of-ours"}, "none"),
        ("0.0.0.0", {"admin_open": "read"}, "read"),
        ("0.0.0.0", {"admin_open": "none"}, "none"),
        ("0.0.0.0", {"admin_open": "none", "metrics_open": True}, "scrape"),
    ],
)
def test_what_needs_no_token(
    tmp_path: Path, bind: str, more: dict[str, object], expected: str
) -> None:
    """By default figures on loopback, and nothing else anywhere."""
    access = api_access(settings(tmp_path, metrics_bind=bind, **more))
    assert access.role_of(None) == expected


def test_another_address_without_a_token_is_refused(tmp_path: Path) -> None:
    """The text says what to set."""
    with pytest.raises(ConfigError, match="KVBM_ADMIN_TOKEN_FILE") as caught:
        api_access(settings(tmp_path, metrics_bind="0.0.0.0"))
    assert "KVBM_METRICS_BIND" in str(caught.value)


def test_a_token_is_made_once(tmp_path: Path) -> None:
    """1. Where none is set one is made, for the owner's eyes. 2. The next start takes the same."""
    own = settings(tmp_path)
    api_access(own)
    made = admin_token_of(own)
    assert made is not None
    assert made.path.stat().st_mode & 0o777 == 0o600
    assert made.path.parent.stat().st_mode & 0o777 == 0o700
    assert api_access(own).role_of(made.text()) == "admin"
    assert len(made.text()) > 32


def test_a_token_in_a_file_is_changed_without_a_restart(tmp_path: Path) -> None:
    """1. The file's token is good. 2. Another one is written: the old one is worth nothing. 3. The
    file is gone: no token is good."""
    path = tmp_path / "token"
    write_secret(path, "first-token\n")
    access = api_access(settings(tmp_path, admin_token_file=path))
    assert access.role_of("first-token") == "admin"
    write_secret(path, "second-token\n")
    assert access.role_of("first-token") is None
    assert access.role_of("second-token") == "admin"
    path.unlink()
    assert access.role_of("second-token") is None


@pytest.mark.parametrize("text", ["", "short", "two words here", "\u00e9" * 20])
def test_a_file_without_a_token_ends_the_start(tmp_path: Path, text: str) -> None:
    """The text names the file, not what is in it."""
    path = tmp_path / "token"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        api_access(settings(tmp_path, admin_token_file=path))
    assert str(path) in str(caught.value)
    assert not text or text not in str(caught.value)


def test_a_bad_token_is_not_shown() -> None:
    """Too short: the error names the variable, not the secret."""
    with pytest.raises(ConfigError) as caught:
        Settings.load({"KVBM_ADMIN_TOKEN": "hunter2"})
    assert "KVBM_ADMIN_TOKEN" in str(caught.value)
    assert "hunter2" not in str(caught.value)
