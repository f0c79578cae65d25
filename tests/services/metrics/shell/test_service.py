"""The metrics service as a real process: HTTP on its port, signals, a port that is taken."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from kvbm_cli.stack import Stack
from kvbm_common.config.settings import Settings
from kvbm_common.errors import ConfigError, RequestFailed, ServiceFailed
from kvbm_common.nats.bus import Bus
from kvbm_common.registry.nats_kv import NatsRegistry
from kvbm_common.runtime.metrics import Metrics
from kvbm_common.runtime.processes import free_port
from kvbm_common.wire.admin import RemoveReply
from kvbm_metrics.shell.service import expected_kinds, open_socket

from tests.waiting import ask_until


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    """NATS and a metrics service, nothing else."""
    async with Stack.private(services=("metrics",)) as running:
        yield running


def url_of(stack: Stack) -> str:
    """Where the service says that it listens."""
    return stack.services["metrics"].description


@pytest.mark.slow
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


@pytest.mark.slow
async def test_a_host_that_is_gone_for_good_is_forgotten() -> None:
    """1. A reset names the command. 2. It refuses a lost service that answers. 3. That is gone,
    another of its host lives: the reset is done. 4. All of it is in the audit."""
    async with Stack.private({"admin_open": "admin"}, services=("metrics",)) as stack:
        bus, away = [await Bus.connect(stack.admin, "t", counters=Metrics()) for _ in range(2)]
        reset = ["reset", "--everything", "--tier", "disk", "--wait", "--yes"]
        async with httpx.AsyncClient(base_url=url_of(stack)) as client:
            living, silent = NatsRegistry(bus, ttl_s=60.0), NatsRegistry(away, ttl_s=0.5)
            await living.register("disk-tier", "here", "0")
            await silent.register("disk-tier", "away", "0")
            await bus.add_verbs("disk-tier", "0", "here", {"reset": nothing_left})
            await away.add_verbs("disk-tier", "0", "away", {"stats": refuse})
            await status_when(client, lambda said: "away" in said["hosts"])
            await silent.close()
            await status_when(client, lambda said: said["gone"])
            for where in ([], ["--host", "away"]):
                said = await kvbm(1, *reset, *where, stack=stack)
                assert "`kvbm forget away` leaves it out" in said
            for host in ("here", stack.settings.host):
                assert "nothing was forgotten" in await kvbm(1, "forget", host, stack=stack)
            await living.register("host-tier", "away", "0")
            assert "still_there" in await kvbm(1, "forget", "away", stack=stack)
            await away.close()
            await kvbm(0, "forget", "away", stack=stack)
            assert "nothing was forgotten" in await kvbm(1, "forget", "away", stack=stack)
            assert (await client.get("/v1/status")).json()["gone"] == []
            await kvbm(0, *reset, "--tier", "disk", stack=stack)
            entries = (await client.get("/v1/audit")).json()["entries"]
        told = [(one["outcome"], one["request"]) for one in entries if one["verb"] == "forget"]
        assert sorted(outcome for outcome, _ in told) == ["ok"] * 4 + ["still_there"]
        assert all('"lost_host":' in request for _, request in told)
        await living.close()
        await bus.close()


@pytest.mark.slow
async def test_a_disk_tier_that_is_being_started_again_is_not_reset() -> None:
    """Goal: it comes back with its blocks, so a reset of the others would not be done.

    1. A disk tier leaves in order. 2. Resets fail for it. 3. It is back, and one is done.
    """
    async with Stack.private({"admin_open": "admin"}, services=("metrics",)) as stack:
        bus = await Bus.connect(stack.admin, "t", counters=Metrics())
        registry = NatsRegistry(bus, ttl_s=60.0)
        async with httpx.AsyncClient(base_url=url_of(stack)) as client:
            entry = await registry.register("disk-tier", "here", "0")
            await registry.register("host-tier", "here", "0")
            for kind in ("disk-tier", "host-tier"):
                await bus.add_verbs(kind, "0", "here", {"reset": nothing_left})
            await status_when(client, lambda said: "here" in said["hosts"])
            await entry.revoke()
            await status_when(client, lambda said: said["gone"])
            reset = ["reset", "--everything", "--wait", "--yes"]
            refused = [kvbm(1, *reset, "--tier", tier, stack=stack) for tier in ("all", "disk")]
            for said in await asyncio.gather(*refused):
                assert "it may be starting again" in said
            await registry.register("disk-tier", "here", "0")
            await status_when(client, lambda said: not said["gone"])
            await kvbm(0, *reset, "--tier", "disk", stack=stack)
        await registry.close()
        await bus.close()


async def nothing_left(_payload: bytes) -> bytes:
    """Answer a reset as a tier that is empty."""
    return msgspec.json.encode(RemoveReply(removed=0))


async def refuse(_payload: bytes) -> bytes:
    """Answer as a disk tier that has lost its place in the registry."""
    raise RequestFailed("busy", "it answers")


async def status_when(client: httpx.AsyncClient, holds: Callable[[Any], object]) -> None:
    """Wait until the status is as it should be."""

    async def ask() -> bool:
        return bool(holds((await client.get("/v1/status")).json()))

    await ask_until(ask, deadline_s=30.0, poll_s=0.1)


async def kvbm(code: int, *line: str, stack: Stack) -> str:
    """Run a command that ends with this code; returns what it prints."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvbm_cli.main", *line, "--url", url_of(stack),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    said, _ = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == code, said.decode()
    return said.decode()


@pytest.mark.slow
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
        assert caught.value.field == "DYN_KVBM_METRICS_PORT"
    with pytest.raises(ConfigError) as caught:
        open_socket(Settings(metrics_port=free_port(), metrics_bind="192.0.2.1"))
    assert caught.value.field == "KVBM_METRICS_BIND"


def test_loopback_is_the_default() -> None:
    """Nobody opens an admin API to the network by accident."""
    with open_socket(Settings(metrics_port=free_port())) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


def test_a_service_that_is_switched_off_is_not_expected(tmp_path: Path) -> None:
    """The consolidator can be."""
    assert "consolidator" in expected_kinds(Settings(runtime_dir=tmp_path))
    off = Settings(runtime_dir=tmp_path, consolidator_enabled=False)
    assert expected_kinds(off) == ("index", "host-tier", "disk-tier", "metrics")
