"""The metrics service as a real process: HTTP on its port, signals, a port that is taken."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from kvbm_cli.stack import Stack
from kvbm_common.config.settings import Settings
from kvbm_common.errors import ConfigError, ServiceFailed
from kvbm_common.runtime.processes import free_port
from kvbm_metrics.shell.service import expected_kinds, open_socket


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    """NATS and a metrics service, nothing else."""
    async with Stack.private(services=("metrics",)) as running:
        yield running


def url_of(stack: Stack) -> str:
    """Where the service says that it listens."""
    return stack.services["metrics"].description


async def test_it_serves_and_stops(stack: Stack) -> None:
    """1. Say where. 2. See itself through NATS. 3. SIGTERM with a connection open ends in 0."""
    assert url_of(stack) == f"http://127.0.0.1:{stack.settings.metrics_port}"
    async with httpx.AsyncClient(base_url=url_of(stack)) as client:
        assert (await client.get("/healthz")).status_code == 200
        ready = await client.get("/readyz")
        assert ready.status_code == 503
        assert [one.split(":")[0] for one in ready.json()["reasons"]] == [
            "index", "host-tier", "disk-tier", "consolidator",
        ]  # fmt: skip
        text = (await client.get("/metrics")).text
        assert f'kvbm_up{{host="{stack.settings.host}",instance="0",kind="metrics"}} 1.0' in text
        metrics = stack.services["metrics"]
        [life] = [one for one in asyncio.all_tasks() if one.get_name() == "supervise metrics"]
        async with asyncio.timeout(4):
            await metrics.end(signal.SIGTERM, deadline_s=4)
        assert life.result() == 0


async def test_the_port_is_taken() -> None:
    """Goal: the operator reads which setting to change. KVBM panics here."""
    with socket.create_server(("127.0.0.1", 0)) as squatter:
        port = squatter.getsockname()[1]
        stack = Stack.private({"metrics_port": port}, services=("metrics",))
        with pytest.raises(ServiceFailed, match=f"DYN_KVBM_METRICS_PORT is '{port}'"):
            async with stack:
                pass


def test_a_taken_port_is_a_typed_error() -> None:
    """Port and address are told apart."""
    with socket.create_server(("127.0.0.1", 0)) as squatter:
        port = squatter.getsockname()[1]
        with pytest.raises(ConfigError) as caught:
            open_socket(Settings(metrics_port=port))
        assert caught.value.variable == "DYN_KVBM_METRICS_PORT"
    with pytest.raises(ConfigError) as caught:
        open_socket(Settings(metrics_port=free_port(), metrics_bind="192.0.2.1"))
    assert caught.value.variable == "KVBM_METRICS_BIND"


def test_loopback_is_the_default() -> None:
    """Nobody opens an admin API to the network by accident."""
    with open_socket(Settings(metrics_port=free_port())) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


def test_a_service_that_is_switched_off_is_not_expected(tmp_path: Path) -> None:
    """The consolidator can be."""
    assert "consolidator" in expected_kinds(Settings(runtime_dir=tmp_path))
    off = Settings(runtime_dir=tmp_path, consolidator_enabled=False)
    assert expected_kinds(off) == ("index", "host-tier", "disk-tier", "metrics")
