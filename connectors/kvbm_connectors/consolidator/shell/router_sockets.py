"""The router sockets: per data-parallel rank a PUB and a replay ROUTER, as vLLM's engines have.

The PUB is an XPUB, which is the same for readers, and tells us when one comes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio
from kvbm_common.access.curve import CurveServer
from kvbm_common.errors import ConfigError, KvbmError
from kvbm_common.runtime.logs import OncePerKind
from kvbm_common.runtime.metrics import Metrics
from kvbm_common.runtime.processes import remove_own
from kvbm_common.wire.codec import WireError
from kvbm_common.wire.engine_events import (
    published_frames,
    replay_end_frames,
    replayed_frames,
    split_replay_request,
)

from kvbm_connectors.consolidator.core.messages import AnswerRouter, RouterAsked, RouterJoined
from kvbm_connectors.consolidator.core.router_stream import Frame

SOCKET_HWM = 100_000
"""Messages that wait for one reader, as in vLLM: a slower one loses the rest and sees a gap."""
REQUEST_BYTES_MAX = 1_024
RANKS_MAX = 64
"""Ports that are opened, at most."""
PORT_MAX = 65_535
SHUT_S, SHUT_MAX = 30.0, 1_024
"""Seconds that a rank without a port is left alone; ranks that are remembered."""
OFF = "off"
IPC = "ipc://"
_SUBSCRIBES = b"\x01"
"""The first byte of an XPUB's message about a new reader; the topic follows."""

Asked = Callable[[RouterAsked | RouterJoined], Awaitable[None]]


class RouterPortTaken(KvbmError):
    """Another process listens where routers are to find us."""

    code = "endpoint_taken"


@dataclass(slots=True)
class _Port:
    pub: zmq.asyncio.Socket
    router: zmq.asyncio.Socket | None
    tasks: list[asyncio.Task[None]] = field(default_factory=list)


class RouterSockets:
    """Opens a port per rank when the rank comes. Its tasks run in the group that is given."""

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str,
        *,
        tasks: asyncio.TaskGroup,
        counters: Metrics,
        asked: Asked,
        curve_file: Path | None = None,
    ) -> None:
        self._endpoint, self._replay_endpoint = endpoint, replay_endpoint
        self._tasks = tasks
        self._asked = asked
        self._context: zmq.asyncio.Context = zmq.asyncio.Context()
        self._curve = CurveServer(self._context, curve_file)
        self._ports: dict[int, _Port] = {}
        self._files: dict[str, os.stat_result] = {}
        """The files of our sockets, which ZMQ leaves behind: by endpoint, what we have made."""
        self._shut: dict[int, float] = {}
        """Ranks without a port, and when to try again."""
        self._log = OncePerKind(logging.getLogger(__name__))
        self._dropped = counters.counter(
            "kvbm_consolidator_router_dropped_total",
            "Batches and requests of routers that were dropped.",
            labels=("reason",),
        )

    @property
    def on(self) -> bool:
        """Tell whether routers are served at all."""
        return self._endpoint != OFF

    def open(self, rank: int) -> None:
        """Listen for readers of a rank; raises RouterPortTaken, ConfigError."""
        assert self.on
        assert rank not in self._ports, rank
        endpoint = endpoint_of(self._endpoint, rank)
        pub = self._bound(zmq.XPUB, endpoint, "KVBM_ROUTER_ENDPOINT")
        try:
            router = self._bound_replay(rank)
        except KvbmError:
            self._unlink(endpoint)
            pub.close(linger=0)
            raise
        port = self._ports[rank] = _Port(pub, router)
        self._start(port, self._welcome(rank, pub), f"router readers {rank}")
        if router is not None:
            self._start(port, self._serve(rank, router), f"router replay {rank}")

    def serve(self, ranks: Iterable[int]) -> None:
        """Listen for readers of these ranks: what a rank says is not written before one comes."""
        for rank in ranks if self.on else ():
            self._port_of(rank)

    def broadcast(self, frame: Frame) -> None:
        """Publish a batch; never waits. Without readers it goes nowhere."""
        port = self._port_of(frame.stream.rank)
        if port is None:
            self._dropped.labels(reason="no_port").inc()
            return
        port.pub.send_multipart(
            published_frames(frame.stream.engine.encode(), frame.seq, frame.payload), zmq.NOBLOCK
        )

    def answer(self, effect: AnswerRouter) -> None:
        """Send a reader what it has missed, then the end."""
        port = self._ports.get(effect.rank)
        if port is None or port.router is None:
            return
        for frames in (*map(_replayed, effect.frames), replay_end_frames()):
            sent = port.router.send_multipart([effect.peer, *frames], zmq.NOBLOCK)
            assert isinstance(sent, asyncio.Future)
            if sent.done() and sent.exception() is not None:
                self._dropped.labels(reason="not_reading").inc()

    def close(self) -> None:
        """Stop listening for routers, and leave no file of ours."""
        for endpoint in list(self._files):
            self._unlink(endpoint)
        for port in self._ports.values():
            for task in port.tasks:
                task.cancel()
            for socket in filter(None, (port.pub, port.router)):
                socket.close(linger=200)
        self._ports.clear()
        self._curve.close()

    def _unlink(self, endpoint: str) -> None:
        """Remove the file of a socket that is still open."""
        if (status := self._files.pop(endpoint, None)) is not None:
            with contextlib.suppress(OSError):
                remove_own(Path(endpoint.removeprefix(IPC)), status)

    def term(self) -> None:
        """End the ZMQ context, once all tasks are over."""
        self._context.term()

    def _port_of(self, rank: int) -> _Port | None:
        """Return a rank's port; one that cannot be opened is logged, and shut for a while."""
        now_s = time.monotonic()
        if rank not in self._ports and now_s >= self._shut.get(rank, 0.0):
            try:
                if len(self._ports) >= RANKS_MAX:
                    raise RouterPortTaken(f"{RANKS_MAX} ranks have ports already")
                self.open(rank)
            except (RouterPortTaken, ConfigError) as error:
                self._leave_shut(rank, now_s + SHUT_S)
                self._log.warning(f"port_{rank}", f"routers do not hear of rank {rank}: {error}")
        return self._ports.get(rank)

    def _leave_shut(self, rank: int, until_s: float) -> None:
        """Remember a rank without a port; the one that was tried longest ago makes room."""
        self._shut.pop(rank, None)
        if len(self._shut) >= SHUT_MAX:
            del self._shut[next(iter(self._shut))]
        self._shut[rank] = until_s

    def _bound_replay(self, rank: int) -> zmq.asyncio.Socket | None:
        if self._replay_endpoint == OFF:
            return None
        endpoint = endpoint_of(self._replay_endpoint, rank)
        return self._bound(zmq.ROUTER, endpoint, "KVBM_ROUTER_REPLAY_ENDPOINT")

    def _bound(self, kind: int, endpoint: str, variable: str) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, SOCKET_HWM)
        socket.setsockopt(zmq.RCVHWM, SOCKET_HWM)
        socket.setsockopt(zmq.MAXMSGSIZE, REQUEST_BYTES_MAX)
        if kind == zmq.XPUB:
            socket.setsockopt(zmq.XPUB_VERBOSE, 1)  # Each reader is reported, not the first alone.
        try:
            self._curve.protect(socket, endpoint)
            socket.bind(endpoint)
            if endpoint.startswith(IPC):
                with contextlib.suppress(OSError):
                    self._files[endpoint] = os.stat(endpoint.removeprefix(IPC))
        except zmq.ZMQError as error:
            socket.close(linger=0)
            raise RouterPortTaken(
                f"cannot listen for routers on {endpoint} ({error}): is another consolidator "
                f"running? Set {variable} to another port, or to off"
            ) from error
        except ConfigError:  # The keys cannot be read.
            socket.close(linger=0)
            raise
        return socket

    def _start(self, port: _Port, coroutine: Coroutine[Any, Any, None], name: str) -> None:
        port.tasks.append(self._tasks.create_task(coroutine, name=name))

    async def _welcome(self, rank: int, pub: zmq.asyncio.Socket) -> None:
        while True:
            said = await pub.recv()
            if said[:1] == _SUBSCRIBES:
                await self._asked(RouterJoined(rank, said[1:]))

    async def _serve(self, rank: int, router: zmq.asyncio.Socket) -> None:
        while True:
            peer, *frames = await router.recv_multipart()
            try:
                from_seq = split_replay_request(frames)
            except WireError as error:
                self._dropped.labels(reason=error.kind).inc()
                self._log.warning(error.kind, f"a router's request: {error}")
                continue
            await self._asked(RouterAsked(rank, from_seq, peer))


def endpoint_of(endpoint: str, rank: int) -> str:
    """Return the endpoint of a rank: its port is the first one's plus the rank.

    Raises RouterPortTaken for a rank beyond the last port, which ZMQ would take for another.

    >>> endpoint_of("tcp://0.0.0.0:57001", 2), endpoint_of("ipc:///run/pub", 2)
    ('tcp://0.0.0.0:57003', 'ipc:///run/pub_dp2')
    """
    if found := re.fullmatch(r"(tcp://.*:)(\d+)", endpoint):
        port = int(found[2]) + rank
        if port > PORT_MAX:
            raise RouterPortTaken(f"its port would be {port}")
        return f"{found[1]}{port}"
    return f"{endpoint}_dp{rank}" if rank else endpoint


def _replayed(frame: Frame) -> list[bytes]:
    return replayed_frames(frame.stream.engine.encode(), frame.seq, frame.payload)
