"""DNS rebinding: a page of another site whose name is pointed at a port of KVBM.

A browser here then asks KVBM as if it were that site, and the page reads the answer.
It has no token, and the name of its site is in the header Host.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from kvbm_common.access.http_access import HIDDEN, Access, Token, api_access
from kvbm_common.config.settings import Settings
from kvbm_common.nats.bus import Bus
from kvbm_common.registry.nats_kv import NatsRegistry
from kvbm_common.runtime.metrics import Metrics
from kvbm_common.runtime.processes import free_port
from kvbm_common.service.http_port import http_port
from kvbm_metrics.shell.api import create_app
from kvbm_metrics.shell.fleet import Fleet
from kvbm_metrics.shell.state import Api

REBOUND = (
    "evil.example",
    "evil.example.",
    "localhost.evil.example",
    "svc.evil.com",
    "127.0.0.1.x.io",
)
OURS = ("localhost", "127.0.0.1", "[::1]", "10.2.0.7", "metrics", "kvbm.gpu.svc",
        "kvbm.gpu.svc.cluster.local", "gpu-a.internal", "kvbm.localhost")  # fmt: skip
TOKEN = {"authorization": "Bearer read-token"}
QUESTIONS = ("/v1/services", "/v1/audit", "/v1/history", "/metrics")


@asynccontextmanager
async def api(bus: Bus, access: Access) -> AsyncIterator[httpx.AsyncClient]:
    """The HTTP API with this access."""
    registry, counters = NatsRegistry(bus, ttl_s=5.0), Metrics()
    served = Api(
        fleet=Fleet(bus, registry, counters), expected=("index",), version="1", access=access
    )
    transport = httpx.ASGITransport(create_app(served, counters))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost:6880") as client:
        yield client
    await registry.close()


OPEN = Access(tokens=(Token("read", "read-token"),), without_token="read")


@pytest.mark.parametrize("name", REBOUND)
async def test_another_sites_page_reads_nothing(bus: Bus, name: str) -> None:
    """Goal: what needs no token is for this network, not for a page of any site.

    1. Without a token each question is refused, and the reasons of `/readyz` stay hidden. 2. Probes
    get their answers. 3. A token, which such a page does not have, is good under any name.
    """
    async with api(bus, OPEN) as client:
        host = {"host": f"{name}:6880"}
        for path in QUESTIONS:
            assert (await client.get(path, headers=host)).status_code == 403, path
            assert (await client.get(path, headers=host | TOKEN)).status_code == 200, path
        assert (await client.get("/healthz", headers=host)).status_code == 200
        ready = (await client.get("/readyz", headers=host)).json()
        assert ready["reasons"] == [HIDDEN]


@pytest.mark.parametrize("name", OURS)
async def test_names_that_no_other_site_can_have_are_answered(bus: Bus, name: str) -> None:
    """Prometheus asks by an address, by a container's name, or by that of a Kubernetes service."""
    async with api(bus, OPEN) as client:
        for path in QUESTIONS:
            response = await client.get(path, headers={"host": f"{name}:6880"})
            assert response.status_code == 200, path


@pytest.mark.parametrize(
    ("bind", "metrics_open", "name", "expected"),
    [
        ("127.0.0.1", False, "evil.example", 401),
        ("127.0.0.1", False, "localhost", 200),
        ("127.0.0.1", True, "evil.example", 401),
        ("0.0.0.0", True, "gpu-a.example.com", 200),
        ("0.0.0.0", True, "10.2.0.7", 200),
    ],
)
async def test_figures_of_a_service_are_not_for_other_sites_pages(
    bind: str, metrics_open: bool, name: str, expected: int
) -> None:
    """On loopback no name of another site is taken; a port that is declared open takes any."""
    port = free_port()
    values = {"service_port": port, "host": "h", "service_bind": bind, "metrics_open": metrics_open}
    settings, counters = Settings.load({}, values), Metrics()
    url = f"http://127.0.0.1:{port}"
    async with (
        http_port(settings, counters.collect, lambda: ["starting"]),
        httpx.AsyncClient(base_url=url, trust_env=False) as client,
    ):
        host = {"host": f"{name}:{port}"}
        assert (await client.get("/metrics", headers=host)).status_code == expected
        hidden = (await client.get("/readyz", headers=host)).json()["reasons"] == [HIDDEN]
        assert hidden is (expected == 401)


def test_the_api_that_is_declared_open_is_scraped_by_any_name_and_read_by_ours() -> None:
    """`KVBM_METRICS_OPEN` is about figures. Questions are for names of this network even so."""
    values = {"metrics_bind": "0.0.0.0", "admin_open": "read", "metrics_open": True}
    access = api_access(Settings.load({}, values))
    assert access.may_by("scrape", None, "kvbm.example.com")
    assert access.may_by("read", None, "kvbm")
    assert not access.may_by("read", None, "kvbm.example.com")
