"""The port for routers: it has the tokens of prompts, and is read by who has a key."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import zmq
import zmq.asyncio
from kvbm_common.access.curve import use_client_keys, write_keys
from kvbm_common.config.settings import Settings
from kvbm_common.runtime.metrics import Metrics
from kvbm_common.runtime.processes import free_port
from kvbm_common.wire.engine_events import replay_request
from kvbm_connectors.consolidator.core.messages import RouterAsked, RouterJoined
from kvbm_connectors.consolidator.shell.router_sockets import RouterSockets

IN_VAIN_S = 0.5
SOON_S = 5.0


@pytest.fixture
async def context() -> AsyncIterator[zmq.asyncio.Context]:
    """The context of a reader."""
    made: zmq.asyncio.Context = zmq.asyncio.Context()
    yield made
    made.destroy(linger=0)


async def is_heard(
    context: zmq.asyncio.Context, endpoint: str, kind: int, keys: Path | None,
    asked: asyncio.Queue[RouterAsked | RouterJoined],
) -> bool:  # fmt: skip
    """Tell whether a reader with these keys gets as far as to subscribe, or to ask for a replay."""
    reader = context.socket(kind)
    use_client_keys(reader, endpoint, keys)
    reader.connect(endpoint)
    if kind == zmq.SUB:
        reader.setsockopt(zmq.SUBSCRIBE, b"")
    else:
        await reader.send_multipart(replay_request(0))
    try:
        async with asyncio.timeout(SOON_S if keys else IN_VAIN_S):
            await asked.get()
            return True
    except TimeoutError:
        return False
    finally:
        reader.close(linger=0)


@pytest.mark.parametrize("kind", [zmq.SUB, zmq.DEALER], ids=["events", "replays"])
async def test_a_port_on_tcp_is_for_readers_with_a_key(
    context: zmq.asyncio.Context, tmp_path: Path, kind: int
) -> None:
    """Goal: nobody reads token ids from a port: without a key no subscription and no replay."""
    server_file, client_file = write_keys(tmp_path)
    asked: asyncio.Queue[RouterAsked | RouterJoined] = asyncio.Queue()
    ports = [free_port(), free_port()]
    endpoints = [f"tcp://127.0.0.1:{port}" for port in ports]
    async with asyncio.TaskGroup() as tasks:
        sockets = RouterSockets(
            *endpoints, tasks=tasks, counters=Metrics(), asked=asked.put, curve_file=server_file
        )
        sockets.open(0)
        endpoint = endpoints[0] if kind == zmq.SUB else endpoints[1]
        assert not await is_heard(context, endpoint, kind, None, asked)
        assert await is_heard(context, endpoint, kind, client_file, asked)
        sockets.close()
    sockets.term()


def test_by_default_the_port_is_a_socket_file() -> None:
    """In the directory that only the services' user enters."""
    settings = Settings.load({"KVBM_RUNTIME_DIR": "/run/kvbm"})
    assert settings.router_endpoint == "ipc:///run/kvbm/router.sock"
    assert settings.router_replay_endpoint == "ipc:///run/kvbm/router-replay.sock"
