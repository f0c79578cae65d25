"""The HTTP server on real sockets: what clients that say or read too little cannot do to others."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import repeat
from typing import Any

import httpx
import pytest
from kvbm_common.runtime.metrics import Metrics
from kvbm_common.service.http_port import open_listener
from kvbm_metrics.shell import http_server as module
from kvbm_metrics.shell.http_server import CONNECTIONS_MAX, HttpServer

from tests.waiting import ask_until, wait_until

DEADLINE_S = 10.0
LONG = 16 << 20
"""Bytes of an answer for which no socket has room."""
HEADERS = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n"
Send = Callable[[dict[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[dict[str, Any]]]


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deadlines of a test."""
    monkeypatch.setattr(module, "TICK_S", 0.05)
    monkeypatch.setattr(module, "REQUEST_DEADLINE_S", 0.3)
    monkeypatch.setattr(module, "CROWDED_DEADLINE_S", 0.1)


def request_of(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()


class App:
    """An application that answers `GET /slow` when it is told, everything else at once.

    `/long` is of LONG bytes, `/feed` goes on until its client leaves.
    """

    def __init__(self) -> None:
        self.asked, self.go_on = asyncio.Event(), asyncio.Event()

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        more = True
        while more:
            message = await receive()
            more = message.get("more_body", False)
        if scope["path"] == "/slow":
            self.asked.set()
            await self.go_on.wait()
        parts = {"/long": [bytes(LONG)], "/feed": repeat(bytes(1 << 16), 4_096)}
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for part in parts.get(scope["path"], ()):
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"ok"})


@asynccontextmanager
async def serving(app: App, counters: Metrics) -> AsyncIterator[int]:
    """A server on a port of this machine."""
    listener = open_listener("127.0.0.1", 0, address_variable="A", port_variable="B", backlog=300)
    server = HttpServer(app, counters)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    await server.is_up.wait()
    try:
        yield listener.getsockname()[1]
    finally:
        server.end()
        async with asyncio.timeout(DEADLINE_S):
            await task


async def answered(port: int) -> bool:
    """Whether a new client is served."""
    async with httpx.AsyncClient(timeout=DEADLINE_S, trust_env=False) as client:
        return (await client.get(f"http://127.0.0.1:{port}/")).status_code == 200


@pytest.mark.parametrize("said", [b"", b"GET /he", HEADERS, HEADERS + b"\r\nab"])
async def test_a_connection_without_a_whole_request_is_closed(said: bytes) -> None:
    """Goal: silence, half a line, headers or a body without their end cost a connection 5 s."""
    counters = Metrics()
    async with serving(App(), counters) as port, asyncio.timeout(DEADLINE_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(said)
        assert await reader.read() == b""
        assert counters.value("kvbm_http_connections_cut_total") == 1
        writer.close()


async def test_silent_clients_make_room_for_others() -> None:
    """Goal: as many silent connections as there may be do not keep a probe out."""
    counters = Metrics()
    async with serving(App(), counters) as port, contextlib.AsyncExitStack() as open_ones:
        for _ in range(CONNECTIONS_MAX + 4):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            open_ones.callback(writer.close)
        await ask_until(lambda: answered(port), deadline_s=DEADLINE_S)
        assert counters.value("kvbm_http_connections_cut_total") > 4


async def test_a_client_that_waits_for_its_answer_is_not_closed() -> None:
    """Goal: the deadline is the client's; the answer may take as long as it takes.

    Method: another connection, that says nothing, is closed meanwhile.
    """
    app, counters = App(), Metrics()
    async with serving(app, counters) as port, asyncio.timeout(DEADLINE_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request_of("/slow"))
        await app.asked.wait()
        _, silent = await asyncio.open_connection("127.0.0.1", port)
        await wait_until(lambda: counters.value("kvbm_http_connections_cut_total") == 1)
        app.go_on.set()
        assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
        writer.close()
        silent.close()


@pytest.mark.slow
async def test_a_client_that_goes_on_asking_stays() -> None:
    """Goal: a live page asks again and again over one connection, longer than the deadline."""
    counters = Metrics()
    async with serving(App(), counters) as port, asyncio.timeout(DEADLINE_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        loop = asyncio.get_running_loop()
        until_s = loop.time() + 3 * module.REQUEST_DEADLINE_S
        while loop.time() < until_s:
            writer.write(request_of("/"))
            await reader.readuntil(b"ok")
        assert counters.value("kvbm_http_connections_cut_total") == 0
        writer.close()


@asynccontextmanager
async def connected(port: int, said: bytes) -> AsyncIterator[socket.socket]:
    """A client with little room for an answer, that has said something."""
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, ("127.0.0.1", port))
        await loop.sock_sendall(client, said)
        yield client


@pytest.mark.parametrize(
    "said", [request_of("/long"), request_of("/long") * 3, request_of("/feed")],
    ids=["a long answer", "several", "a feed"],
)  # fmt: skip
async def test_clients_that_do_not_read_make_room_for_others(
    said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: as many as there may be do not keep a probe out, and nothing of them is kept."""
    monkeypatch.setattr(module, "CONNECTIONS_MAX", 8)
    counters = Metrics()
    async with serving(App(), counters) as port, contextlib.AsyncExitStack() as open_ones:
        for _ in range(7):  # uvicorn counts the one that asks.
            await open_ones.enter_async_context(connected(port, said))
        await ask_until(lambda: answered(port), deadline_s=DEADLINE_S)
        await wait_until(lambda: counters.value("kvbm_http_connections_cut_total") == 7)


async def passes(end_s: float) -> None:
    loop = asyncio.get_running_loop()
    await wait_until(lambda: loop.time() > end_s)


@pytest.mark.slow
async def test_a_client_that_reads_slowly_gets_its_answer() -> None:
    """Goal: a piece in each part of the deadline is enough, however long the whole takes."""
    counters, loop, length = Metrics(), asyncio.get_running_loop(), 0
    began_s = loop.time()
    async with serving(App(), counters) as port, connected(port, request_of("/long")) as client:
        while loop.time() < began_s + 5 * module.REQUEST_DEADLINE_S:
            length += len(await loop.sock_recv(client, 1 << 17))
            await passes(loop.time() + module.REQUEST_DEADLINE_S / 8)
        while length < LONG:
            length += len(await loop.sock_recv(client, 1 << 20))
