"""A service's own HTTP port: what it says in which state, and what clients cannot do to it."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from kvbm_common.config.settings import Settings
from kvbm_common.nats.embedded_server import NatsServer
from kvbm_common.runtime.metrics import Metrics
from kvbm_common.runtime.processes import free_port
from kvbm_common.service import http_port as module
from kvbm_common.service.context import ServiceContext
from kvbm_common.service.http_port import http_port, open_listener
from kvbm_common.service.process import BAD_SETTINGS, serve
from kvbm_common.wire.verbs import StatsReply
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.waiting import wait_until

DEADLINE_S = 10.0
REQUEST = b"GET /healthz HTTP/1.0\r\n\r\n"


def settings(port: int, **more: Any) -> Settings:
    return Settings.load({}, {"service_port": port, "host": "h", **more})


def a_page() -> Metrics:
    """One counter."""
    metrics = Metrics()
    metrics.counter("kvbm_x_total", "X.", labels=("what",)).labels('a"b').inc(2)
    return metrics


@asynccontextmanager
async def asking(port: int) -> AsyncIterator[httpx.AsyncClient]:
    """A client whose questions end."""
    url = f"http://127.0.0.1:{port}"
    async with httpx.AsyncClient(base_url=url, timeout=DEADLINE_S, trust_env=False) as client:
        yield client


async def status(client: httpx.AsyncClient, path: str) -> int:
    return (await client.get(path)).status_code


# --- a life -------------------------------------------------------------------------------------


async def test_the_port_follows_a_services_life(nats_server: NatsServer) -> None:
    """Goal: alive from the first moment, ready when the service has said so, then gone.

    1. NATS is away. 2. It has come, and the service starts. 3. It serves. 4. What it says of itself
    is that it is not ready. 5. It stops.
    """
    nats_server.kill()
    port, stopping, began = free_port(), asyncio.Event(), asyncio.Event()
    given: list[ServiceContext] = []

    async def main(context: ServiceContext) -> None:
        given.append(context)
        began.set()
        await context.stopping.wait()

    own = settings(port, nats_url=nats_server.url, registry_ttl_s=0.3)
    life = asyncio.create_task(serve("sample", main, own, stopping))
    async with asyncio.timeout(DEADLINE_S), asking(port) as client:
        await wait_until(lambda: not free(port))
        assert await status(client, "/healthz") == 200
        assert await reasons(client) == ["waiting for NATS"]
        await nats_server.start()
        await began.wait()
        assert await reasons(client) == ["starting"]
        given[0].ready("here")
        assert await reasons(client) == []
        reply = StatsReply(kind="sample", host="h", instance="0", epoch=1, ready=False,
                           reasons=["reading"])  # fmt: skip
        given[0].set_stats(lambda: reply)
        assert await reasons(client) == ["reading"]
        assert await status(client, "/healthz") == 200
        stopping.set()
        assert await life == 0
    assert free(port)


async def reasons(client: httpx.AsyncClient) -> list[str]:
    """Why it is not ready; the status fits."""
    answer = await client.get("/readyz")
    said = answer.json()
    assert said["ready"] is (answer.status_code == 200) is (said["reasons"] == [])
    return list(said["reasons"])


def free(port: int) -> bool:
    """Nothing listens there."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def test_a_connection_sends_small_pieces_at_once() -> None:
    """A body after its headers is not held back until the client has acknowledged those."""
    with (
        open_listener("127.0.0.1", 0, address_variable="A", port_variable="P") as listener,
        socket.create_connection(listener.getsockname()),
        listener.accept()[0] as connection,
    ):
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0


async def test_a_port_that_is_taken_ends_the_service(caplog: pytest.LogCaptureFixture) -> None:
    """Goal: the error names the setting, and the exit code keeps a supervisor from restarting."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

        async def main(_: ServiceContext) -> None:
            raise AssertionError

        assert await serve("sample", main, settings(port), asyncio.Event()) == BAD_SETTINGS
    assert "KVBM_SERVICE_PORT" in caplog.text


async def test_without_a_port_nothing_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is off unless it is asked for."""
    monkeypatch.setattr(module, "open_listener", None)
    async with http_port(settings(0), list, list):
        pass
    assert Settings.load({}, {}).service_port == 0
    assert Settings.load({}, {}).service_bind == "127.0.0.1"


# --- answers ------------------------------------------------------------------------------------


async def test_metrics_are_read_by_prometheus_own_parser() -> None:
    """In both formats that a Prometheus may ask for, and only by GET."""
    port = free_port()
    async with http_port(settings(port), a_page().collect, list), asking(port) as client:
        answer = await client.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        [family] = text_string_to_metric_families(answer.text)
        assert [(one.name, one.labels, one.value) for one in family.samples] == [
            ("kvbm_x_total", {"what": 'a"b'}, 2.0)
        ]
        openmetrics = {"accept": "application/openmetrics-text;version=1.0.0"}
        assert (await client.get("/metrics", headers=openmetrics)).text.endswith("# EOF\n")
        found = await client.get("/metrics", params={"name[]": "kvbm_y_total"})
        assert (found.status_code, found.text) == (200, "")
        assert (await client.post("/metrics")).status_code == 405
        assert await status(client, "/v1/status") == 404


async def test_metrics_can_be_off_while_probes_are_answered() -> None:
    port = free_port()
    own = settings(port, metrics=False)
    async with http_port(own, a_page().collect, list), asking(port) as client:
        assert await status(client, "/metrics") == 404
        assert await status(client, "/healthz") == await status(client, "/readyz") == 200


async def test_a_mistake_in_the_service_is_an_answer(caplog: pytest.LogCaptureFixture) -> None:
    """Goal: 500 and a log line, and the next question is answered."""
    port = free_port()

    def broken() -> list[str]:
        raise RuntimeError("broken")

    async with http_port(settings(port), list, broken), asking(port) as client:
        assert await status(client, "/readyz") == 500
        assert await status(client, "/healthz") == 200
    assert "/readyz cannot be answered" in caplog.text


async def test_cores_are_asked_in_their_own_thread() -> None:
    """They are changed without locks: a thread that reads them meets a dict of another size."""
    port, asked_in = free_port(), set[int]()

    def collect() -> list[Any]:
        asked_in.add(threading.get_ident())
        return []

    async with http_port(settings(port), collect, list), asking(port) as client:
        assert await status(client, "/metrics") == 200
    assert asked_in == {threading.get_ident()}


@pytest.mark.slow
async def test_a_loop_that_stands_still_is_neither_alive_nor_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Goal: both answers come while it stands, and say so; it is well again afterwards."""
    monkeypatch.setattr(module, "SILENT_S", 1.5)
    monkeypatch.setattr(module, "BEAT_S", 0.1)
    port, found = free_port(), dict[str, httpx.Response]()

    def look() -> None:
        until_s = time.monotonic() + DEADLINE_S
        for path in ("/readyz", "/metrics"):
            found[path] = httpx.get(f"http://127.0.0.1:{port}{path}", trust_env=False)
        while time.monotonic() < until_s:
            found["/healthz"] = httpx.get(f"http://127.0.0.1:{port}/healthz", trust_env=False)
            if found["/healthz"].status_code != 200:
                return

    async with http_port(settings(port), list, list), asking(port) as client:
        looking = threading.Thread(target=look)
        looking.start()
        looking.join(2 * DEADLINE_S)  # On purpose in the event loop.
        assert {path: one.status_code for path, one in found.items()} == dict.fromkeys(
            ("/readyz", "/metrics", "/healthz"), 503
        )
        assert "silent" in found["/healthz"].text
        await wait_until_well(client)


async def wait_until_well(client: httpx.AsyncClient) -> None:
    """The loop has had a turn."""
    async with asyncio.timeout(DEADLINE_S):
        while await status(client, "/healthz") != 200:
            pass


# --- clients ------------------------------------------------------------------------------------


async def test_a_client_that_says_nothing_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte now and then does not help it: the deadline is that of the whole connection."""
    monkeypatch.setattr(module, "CLIENT_DEADLINE_S", 0.5)
    port = free_port()
    async with http_port(settings(port), list, list):
        assert await asyncio.to_thread(lived_s, port) < DEADLINE_S / 2


def lived_s(port: int) -> float:
    """How long a connection lives on which a request comes byte by byte."""
    began_s = time.monotonic()
    with socket.create_connection(("127.0.0.1", port), timeout=0.1) as client:
        while time.monotonic() - began_s < DEADLINE_S:
            try:
                client.sendall(b"G")
                if client.recv(1) == b"":
                    break
            except TimeoutError:
                continue
            except OSError:
                break
    return time.monotonic() - began_s


@pytest.mark.slow
async def test_clients_that_hang_do_not_keep_a_probe_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: with every place taken by silence a probe is answered soon, and threads are few."""
    monkeypatch.setattr(module, "CROWDED_DEADLINE_S", 0.2)
    port = free_port()
    before = threading.active_count()
    async with http_port(settings(port), list, list):
        silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(30)]
        try:
            assert await asyncio.to_thread(answered, port)
            # The acceptor, and those of asyncio.to_thread.
            assert threading.active_count() <= before + module.CLIENTS_MAX + 3
        finally:
            for one in silent:
                one.close()


def answered(port: int) -> bool:
    """Whether a probe that tries again is answered long before the clients' own deadline."""
    until_s = time.monotonic() + module.CLIENT_DEADLINE_S / 2
    while time.monotonic() < until_s:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1.0) as client:
                client.sendall(REQUEST)
                if client.recv(12) == b"HTTP/1.0 200":
                    return True
        except OSError:
            continue
    return False


async def test_scrapes_at_once_collect_once() -> None:
    """Scrapers without patience do not slow the service: its loop collects once for all."""
    collected: list[int] = []

    def collect() -> list[Metric]:
        collected.append(1)
        return a_page().collect()

    port = free_port()
    async with http_port(settings(port), collect, list), asking(port) as client:
        answers = await asyncio.gather(*(client.get("/metrics") for _ in range(6)))
    assert {answer.status_code for answer in answers} == {200}
    assert len(collected) < 6
