"""A service's own HTTP port: `/metrics`, `/healthz` and `/readyz`, in threads beside its loop.

Prometheus, a pod monitor or a kubelet asks one process here; the metrics service speaks for all of
them. What a client does, or does not do, costs one of a few threads, and that for seconds at most.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import errno
import io
import logging
import math
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable
from http import HTTPStatus
from socketserver import ThreadingMixIn
from typing import Any, TypeVar
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

import msgspec
from prometheus_client import CollectorRegistry, Metric, make_wsgi_app

from kvbm_common.access.addresses import host_of
from kvbm_common.access.http_access import HIDDEN, Access, bearer_of, service_access
from kvbm_common.config.settings import Settings
from kvbm_common.errors import ConfigError, KvbmError
from kvbm_common.runtime.logs import OncePerKind
from kvbm_common.runtime.metrics import Included

CLIENTS_MAX = 8
"""Connections at the same time; Prometheus and a kubelet have one each."""
CLIENT_DEADLINE_S = 5.0
"""From a connection's beginning to its end; then it is cut."""
CROWDED_DEADLINE_S = 1.0
"""The deadline while `CLIENTS_MAX` are connected: silent clients make room for a probe."""
LOOP_DEADLINE_S = 0.8
"""The deadline for an answer of the event loop, in seconds. A kubelet waits 1 s for an answer."""
COLLECT_EVERY_S = 0.1
"""Scrapes that come closer together than this get the same figures."""
BEAT_S = 1.0
SILENT_S = 10.0
"""An event loop that has had no turn for so long counts as dead: no step of a core takes 1 s."""
POLL_S = 0.25
"""The pause between two looks at the connections; stopping takes as long."""
STOP_DEADLINE_S = 1.0
BACKLOG = 16

Answer = TypeVar("Answer")
Headers = list[tuple[str, str]]
StartResponse = Callable[[str, Headers], object]

_log = logging.getLogger(__name__)
_limiter = OncePerKind(_log)


class LoopSilent(KvbmError):
    """The event loop has not answered in time."""

    code = "loop_silent"


def open_listener(
    address: str, port: int, *, address_variable: str, port_variable: str, backlog: int = BACKLOG
) -> socket.socket:
    """Listen on TCP; raises ConfigError that names the setting at fault."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        listener = socket.create_server((address, port), family=family, backlog=backlog)
        # Connections inherit it. Without it a body waits for the client's acknowledgement of the
        # headers, which Linux holds back 40 ms.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except OSError as error:
        why = error.strerror or str(error)
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            accepted = f"a port that this process can open on {address} ({why})"
            raise ConfigError(port_variable, port, accepted) from error
        accepted = f"an address of this machine ({why})"
        raise ConfigError(address_variable, address, accepted) from error


@contextlib.asynccontextmanager
async def http_port(
    settings: Settings,
    collect: Callable[[], list[Metric]],
    reasons: Callable[[], list[str]],
) -> AsyncIterator[None]:
    """Serve while the block runs, if the settings name a port; raises ConfigError.

    `collect` and `reasons` (why the service is not ready) are called in this event loop.
    """
    if not settings.service_port:
        yield
        return
    access = service_access(settings)
    listener = open_listener(
        settings.service_bind,
        settings.service_port,
        address_variable="KVBM_SERVICE_BIND",
        port_variable="KVBM_SERVICE_PORT",
    )
    port = HttpPort(listener, collect if settings.metrics else None, reasons, access)
    port.start()
    try:
        yield
    finally:
        await port.close()


class HttpPort:
    """The port of the process that runs this event loop. It owns the listener."""

    def __init__(
        self,
        listener: socket.socket,
        collect: Callable[[], list[Metric]] | None,
        reasons: Callable[[], list[str]],
        access: Access,
    ) -> None:
        self._access = access
        self._collect = collect
        self._reasons = reasons
        self._loop = asyncio.get_running_loop()
        self._server = _Server(listener, self._answer)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(POLL_S,), name="http-port", daemon=True
        )
        self._scraping = threading.Lock()
        """Many scrapers together must not slow the service: one text is made at a time."""
        self._collected: list[Metric] = []
        self._collected_s = -math.inf
        self._beaten_s = time.monotonic()
        self._beating: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin to answer HTTP requests."""
        self._beat()
        self._thread.start()

    async def close(self) -> None:
        """End, and cut whatever connection there is."""
        if self._beating is not None:
            self._beating.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_DEADLINE_S):
                await asyncio.to_thread(self._server.shutdown)
        self._server.server_close()
        self._server.cut(0.0)

    def _beat(self) -> None:
        self._beaten_s = time.monotonic()
        self._beating = self._loop.call_later(BEAT_S, self._beat)

    # --- in threads ---------------------------------------------------------------------------

    def _answer(self, environ: dict[str, Any], start: StartResponse) -> Iterable[bytes]:
        """Answer one request, as a WSGI application."""
        paths = {"/healthz": self._healthz, "/readyz": self._readyz, "/metrics": self._metrics}
        answer = paths.get(environ["PATH_INFO"])
        if answer is None:
            return _text(start, HTTPStatus.NOT_FOUND, "ask for /metrics, /healthz or /readyz")
        if environ["REQUEST_METHOD"] != "GET":
            return _text(start, HTTPStatus.METHOD_NOT_ALLOWED, "GET only", [("Allow", "GET")])
        try:
            return answer(environ, start)
        except LoopSilent as error:
            return _text(start, HTTPStatus.SERVICE_UNAVAILABLE, str(error))
        except Exception:
            _log.exception("%s cannot be answered", environ["PATH_INFO"])
            return _text(start, HTTPStatus.INTERNAL_SERVER_ERROR, "the log of the service says why")

    def _healthz(self, _environ: dict[str, Any], start: StartResponse) -> Iterable[bytes]:
        silent_s = time.monotonic() - self._beaten_s
        if silent_s > SILENT_S:
            text = f"the event loop has been silent for {silent_s:.0f} s"
            return _json(start, HTTPStatus.SERVICE_UNAVAILABLE, {"status": text})
        return _json(start, HTTPStatus.OK, {"status": "ok"})

    def _is_told(self, environ: dict[str, Any]) -> bool:
        """Tell whether a request may have figures and reasons."""
        token = bearer_of(environ.get("HTTP_AUTHORIZATION", ""))
        return self._access.may_by("scrape", token, host_of(f"//{environ.get('HTTP_HOST', '')}"))

    def _readyz(self, environ: dict[str, Any], start: StartResponse) -> Iterable[bytes]:
        reasons = self._in_loop(self._reasons)
        if reasons and not self._is_told(environ):
            reasons = [HIDDEN]
        status = HTTPStatus.SERVICE_UNAVAILABLE if reasons else HTTPStatus.OK
        return _json(start, status, {"ready": not reasons, "reasons": reasons})

    def _metrics(self, environ: dict[str, Any], start: StartResponse) -> Iterable[bytes]:
        """Return what the loop has collected, which the cores belong to, within the last moment."""
        if self._collect is None:
            return _text(start, HTTPStatus.NOT_FOUND, "DYN_KVBM_METRICS is false")
        if not self._is_told(environ):
            wanted = [("WWW-Authenticate", "Bearer")]
            return _text(start, HTTPStatus.UNAUTHORIZED, "a token of the role scrape", wanted)
        if not self._scraping.acquire(timeout=LOOP_DEADLINE_S):
            raise LoopSilent("the event loop has not answered another scrape")
        try:
            if time.monotonic() - self._collected_s >= COLLECT_EVERY_S:
                self._collected = self._in_loop(self._collect)
                self._collected_s = time.monotonic()
            registry = CollectorRegistry(support_collectors_without_names=True)
            registry.register(Included(lambda: self._collected))
            answer: Iterable[bytes] = make_wsgi_app(registry)(environ, start)
        finally:
            self._scraping.release()
        return answer

    def _in_loop(self, ask: Callable[[], Answer]) -> Answer:
        """Return what a function says in the event loop; raises LoopSilent."""
        answer: concurrent.futures.Future[Answer] = concurrent.futures.Future()

        def run() -> None:
            if not answer.set_running_or_notify_cancel():
                return
            try:
                answer.set_result(ask())
            except Exception as error:
                answer.set_exception(error)

        try:
            self._loop.call_soon_threadsafe(run)
        except RuntimeError as error:
            raise LoopSilent("the event loop has ended") from error
        try:
            return answer.result(LOOP_DEADLINE_S)
        except TimeoutError:
            answer.cancel()
            raise LoopSilent(f"the event loop took longer than {LOOP_DEADLINE_S} s") from None


class _Server(ThreadingMixIn, WSGIServer):
    """A thread per connection, of few, each with a deadline."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, listener: socket.socket, answer: Callable[..., Iterable[bytes]]) -> None:
        address = listener.getsockname()[:2]
        super().__init__(address, _Handler, bind_and_activate=False)
        self.socket.close()
        listener.setblocking(False)  # A client gone before `accept` blocks no other.
        self.socket = listener
        # Not by `server_bind`, which asks DNS for a name.
        self.server_name, self.server_port = address
        self.setup_environ()
        self.set_app(answer)
        self._lock = threading.Lock()
        self._since_s: dict[socket.socket, float] = {}

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread of its own; one connection too many is closed."""
        with self._lock:
            has_room = len(self._since_s) < CLIENTS_MAX
            if has_room:
                self._since_s[request] = time.monotonic()
        if has_room:
            super().process_request(request, client_address)
            return
        text = f"{CLIENTS_MAX} connections at once: one of {client_address} is closed"
        _limiter.warning("crowded", text)
        self.shutdown_request(request)
        self.cut(CROWDED_DEADLINE_S)

    def shutdown_request(self, request: Any) -> None:
        """Note that a connection has ended."""
        with self._lock:
            self._since_s.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Cut old connections; the server calls this between connections and every `POLL_S`."""
        self.cut(CLIENT_DEADLINE_S)

    def cut(self, after_s: float) -> None:
        """End the connections that are older; their threads notice and close them."""
        now_s = time.monotonic()
        with self._lock:
            for request, since_s in self._since_s.items():
                if now_s - since_s >= after_s:
                    with contextlib.suppress(OSError):
                        request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log a client that has gone, or was cut."""
        _log.debug("the connection of %s ended early", client_address, exc_info=True)


class _Handler(WSGIRequestHandler):
    """One connection, with one request."""

    timeout = CLIENT_DEADLINE_S

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing about a request."""

    def get_stderr(self) -> io.StringIO:
        """Return a buffer that is dropped, where wsgiref tells of clients that are gone."""
        return io.StringIO()


def _json(start: StartResponse, status: HTTPStatus, said: object) -> list[bytes]:
    start(f"{status.value} {status.phrase}", [("Content-Type", "application/json")])
    return [msgspec.json.encode(said)]


def _text(
    start: StartResponse, status: HTTPStatus, text: str, headers: Headers | None = None
) -> list[bytes]:
    plain = ("Content-Type", "text/plain; charset=utf-8")
    start(f"{status.value} {status.phrase}", [plain, *(headers or [])])
    return [f"{text}\n".encode()]
