"""HTTP server: uvicorn with few connections, each with deadlines for its client.

No other module depends on how uvicorn works inside.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import socket
import termios
import time
from array import array
from collections.abc import Iterator, Sequence

import uvicorn
from kvbm_common.runtime.metrics import Metrics
from kvbm_common.runtime.pauses import pause_s
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

CONNECTIONS_MAX = 256
"""Connections served at the same time; uvicorn answers 503 to more."""
REQUEST_DEADLINE_S = 5.0
"""The seconds that a client may take to send a request's headers, again for its body, and to read
nothing of its answer."""
CROWDED_DEADLINE_S = 1.0
"""The deadline while all connections are in use: silent clients make room for a probe."""
TICK_S = 1.0
STOP_DEADLINE_S = 1
"""The seconds that answers under way may take after the signal to stop."""


class HttpServer(uvicorn.Server):
    """uvicorn in a process that handles signals itself, with a deadline for idle connections."""

    def __init__(self, app: object, counters: Metrics) -> None:
        super().__init__(_config(app))
        self.is_up = asyncio.Event()
        self._ended = asyncio.Event()
        self._waits: dict[H11Protocol, tuple[RequestResponseCycle | None, float]] = {}
        """Connection without a whole request → its last request, and since when it waits."""
        self._unread: dict[H11Protocol, tuple[int, float]] = {}
        """Connection whose client reads nothing → its unread bytes, and since when."""
        self._cut = counters.counter(
            "kvbm_http_connections_cut_total",
            "Connections that were closed: they sent no whole request, or read nothing, in time.",
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals alone: uvicorn would take them over and raise them again at its end."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and set `is_up`."""
        await super().startup(sockets)
        self.is_up.set()

    async def main_loop(self) -> None:
        """Run uvicorn's tick once a second instead of ten times; `end` ends the loop at once."""
        while not await self.on_tick(0):
            self._sweep(time.monotonic())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s(TICK_S)):
                    await self._ended.wait()

    def end(self) -> None:
        """Have `serve` finish the answers under way, and return."""
        self.should_exit = True
        self._ended.set()

    def _sweep(self, now_s: float) -> None:
        """Close the connections whose clients have done nothing for too long."""
        connections = [one for one in self.server_state.connections if isinstance(one, H11Protocol)]
        is_crowded = len(connections) >= CONNECTIONS_MAX
        deadline_s = CROWDED_DEADLINE_S if is_crowded else REQUEST_DEADLINE_S
        self._abort_unread(connections, now_s, deadline_s)
        self._close_silent(connections, now_s, deadline_s)

    def _abort_unread(
        self, connections: Sequence[H11Protocol], now_s: float, deadline_s: float
    ) -> None:
        """Cut off the clients that read nothing of their answers: a `close` would wait for them."""
        unread, self._unread = self._unread, {}
        for connection in connections:
            left = _unread_bytes(connection.transport)
            if not left:
                continue
            before, since_s = unread.get(connection, (left, now_s))
            if left < before:
                since_s = now_s
            if now_s - since_s < deadline_s:
                self._unread[connection] = left, since_s
            else:
                self._cut.inc()
                connection.transport.abort()

    def _close_silent(
        self, connections: Sequence[H11Protocol], now_s: float, deadline_s: float
    ) -> None:
        """Close the connections that have been without a whole request for too long."""
        waits, self._waits = self._waits, {}
        for connection in connections:
            cycle: RequestResponseCycle | None = connection.cycle  # None before the first request.
            if connection.transport.is_closing() or not _is_waited_for(cycle):
                continue
            before, since_s = waits.get(connection, (cycle, now_s))
            if before is not cycle:
                since_s = now_s
            if now_s - since_s < deadline_s:
                self._waits[connection] = cycle, since_s
            else:
                self._cut.inc()
                connection.transport.close()


def _unread_bytes(transport: asyncio.Transport) -> int:
    """Return the bytes of answers that wait for the client, here and in the kernel; 0: none here.

    Those here leave in pieces of a megabyte: a client that reads slowly shows in the kernel's.
    """
    here = transport.get_write_buffer_size()
    if not here:
        return 0
    queued = array("i", [0])
    fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, queued)
    return here + queued[0]


def _is_waited_for(cycle: RequestResponseCycle | None) -> bool:
    """Tell whether the server waits for the client to send a request, or the rest of one."""
    return cycle is None or cycle.response_complete or cycle.more_body


def _config(app: object) -> uvicorn.Config:
    return uvicorn.Config(
        app,  # type: ignore[arg-type]  # uvicorn's own Protocols are narrower than ASGI.
        http=H11Protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        limit_concurrency=CONNECTIONS_MAX,
        timeout_graceful_shutdown=STOP_DEADLINE_S,
    )
