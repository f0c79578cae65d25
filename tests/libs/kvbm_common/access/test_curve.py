"""Keys of ZMQ sockets: who has one connects, who has none waits in vain."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path

import pytest
import zmq
import zmq.asyncio
from kvbm_common.access.curve import (
    CurveServer,
    refuse_open,
    refuse_open_to_engines,
    use_client_keys,
    write_keys,
)
from kvbm_common.access.secret_files import SecretUnreadable, write_secret
from kvbm_common.config.settings import Settings
from kvbm_common.errors import ConfigError
from kvbm_common.runtime.processes import free_port

ANSWER_S = 5.0
IN_VAIN_S = 0.5
"""A stranger is given so long to be answered, who is not."""


@pytest.fixture
async def context() -> AsyncIterator[zmq.asyncio.Context]:
    """A context that ends with the test."""
    made: zmq.asyncio.Context = zmq.asyncio.Context()
    yield made
    made.destroy(linger=0)


async def asks(
    context: zmq.asyncio.Context, router: zmq.asyncio.Socket, endpoint: str, file: Path | None
) -> bool:
    """Tell whether a message of a client with these keys arrives."""
    client = context.socket(zmq.DEALER)
    use_client_keys(client, endpoint, file)
    client.connect(endpoint)
    await client.send(b"hello")
    try:
        async with asyncio.timeout(ANSWER_S if file is not None else IN_VAIN_S):
            return bool((await router.recv_multipart())[-1] == b"hello")
    except TimeoutError:
        return False
    finally:
        client.close(linger=0)


@pytest.mark.slow
async def test_a_client_that_the_file_names_is_served(
    context: zmq.asyncio.Context, tmp_path: Path
) -> None:
    """1. Without keys nothing arrives. 2. With them it does. 3. Another pair is a stranger's.

    4. Its key is written into the file: it is served, without a restart. 5. The first is taken
    out of it.
    """
    server_file, client_file = write_keys(tmp_path / "ours")
    _, stranger_file = write_keys(tmp_path / "theirs")
    keys = json.loads(stranger_file.read_text())
    keys["server"] = json.loads(client_file.read_text())["server"]
    write_secret(stranger_file, json.dumps(keys))
    guard = CurveServer(context, server_file)
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    router = context.socket(zmq.ROUTER)
    guard.protect(router, endpoint)
    router.bind(endpoint)
    try:
        assert not await asks(context, router, endpoint, None)
        assert await asks(context, router, endpoint, client_file)
        assert not await briefly(asks(context, router, endpoint, stranger_file))
        known = json.loads(server_file.read_text())
        write_secret(server_file, json.dumps(known | {"clients": [keys["public"]]}))
        assert await asks(context, router, endpoint, stranger_file)
        assert not await briefly(asks(context, router, endpoint, client_file))
    finally:
        router.close(linger=0)
        guard.close()


async def briefly(asking: Awaitable[bool]) -> bool:
    """Return what a question says, or False when it takes too long."""
    try:
        async with asyncio.timeout(IN_VAIN_S):
            return await asking
    except TimeoutError:
        return False


async def test_ipc_needs_no_keys(context: zmq.asyncio.Context, tmp_path: Path) -> None:
    """A file with keys changes nothing there: the directory is the lock."""
    server_file, _ = write_keys(tmp_path)
    guard = CurveServer(context, server_file)
    endpoint = f"ipc://{tmp_path}/socket"
    router = context.socket(zmq.ROUTER)
    guard.protect(router, endpoint)
    router.bind(endpoint)
    try:
        assert await asks(context, router, endpoint, tmp_path / "not-there")
    finally:
        router.close(linger=0)
        guard.close()


def test_a_wrong_file_is_named(tmp_path: Path) -> None:
    """The text names the file, never a key."""
    server_file, client_file = write_keys(tmp_path)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    guard = CurveServer(context, client_file)
    secret = json.loads(client_file.read_text())["secret"]
    with context.socket(zmq.ROUTER) as socket:
        with pytest.raises(ConfigError, match="KVBM_CURVE_SERVER_FILE") as caught:
            guard.protect(socket, "tcp://127.0.0.1:1")
        with pytest.raises(SecretUnreadable, match=str(server_file)):
            use_client_keys(socket, "tcp://127.0.0.1:1", server_file)
    assert secret not in str(caught.value)
    assert server_file.stat().st_mode & 0o777 == client_file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:1", "tcp://0.0.0.0:1"])
def test_tcp_without_keys_is_refused(endpoint: str, tmp_path: Path) -> None:
    """On loopback as well: another user of this machine reaches it. The text says what to set."""
    with pytest.raises(ConfigError, match="KVBM_ENGINES_OPEN") as caught:
        refuse_open_to_engines(Settings.load({}), endpoint, "KVBM_HOST_TIER_ENDPOINT")
    assert "KVBM_CURVE_SERVER_FILE" in str(caught.value)
    open_settings = Settings.load({"KVBM_ENGINES_OPEN": "true"})
    refuse_open_to_engines(open_settings, endpoint, "KVBM_HOST_TIER_ENDPOINT")
    with_keys = Settings.load({"KVBM_CURVE_SERVER_FILE": str(tmp_path)})
    refuse_open(with_keys, endpoint, "KVBM_ROUTER_ENDPOINT", is_open=False, open_variable="")
    refuse_open_to_engines(Settings.load({}), "ipc:///run/x", "KVBM_HOST_TIER_ENDPOINT")
