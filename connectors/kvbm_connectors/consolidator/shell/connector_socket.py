"""The connectors' socket: a ZMQ ROUTER that speaks wire.local."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TextIO

import zmq
import zmq.asyncio
from kvbm_common.access.curve import CurveServer
from kvbm_common.errors import ConfigError, KvbmError
from kvbm_common.runtime.logs import OncePerKind
from kvbm_common.runtime.metrics import Metrics
from kvbm_common.runtime.processes import LockTaken, take_lock
from kvbm_common.wire.codec import SOCKET_BYTES_MAX
from kvbm_common.wire.consolidator import (
    FromConsolidator,
    Offered,
    ToConsolidator,
    from_consolidator,
    to_consolidator,
)
from kvbm_common.wire.local import Refused

SOCKET_HWM = 10_000
"""Messages per connector that wait in a socket; one that does not read loses the rest."""


class EndpointTaken(KvbmError):
    """Another consolidator serves these engines."""

    code = "endpoint_taken"


def path_of(endpoint: str) -> Path:
    """Return the path of the file of an ipc endpoint."""
    return Path(endpoint.removeprefix("ipc://"))


def lock_of(endpoint: str) -> TextIO | None:
    """Lock this endpoint for one process, as long as the file is open; raises EndpointTaken.

    ZMQ would take an ipc path away from the process that serves it, and with it all its engines.
    With tcp the operating system ensures that there is one process, and there is no file.
    """
    if not endpoint.startswith("ipc://"):
        return None
    try:
        return take_lock(Path(f"{path_of(endpoint)}.lock"))
    except LockTaken as error:
        raise EndpointTaken(
            f"process {error.holder} serves {endpoint} already: a second consolidator would take "
            "its engines away; set KVBM_CONSOLIDATOR_ENDPOINT if you want another"
        ) from error


class ConnectorSocket:
    """Listens for connectors. Use it in `async with`; `run` feeds `on_message`."""

    def __init__(self, endpoint: str, counters: Metrics, *, curve_file: Path | None = None) -> None:
        self.endpoint = endpoint
        self._context: zmq.asyncio.Context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 200)
        self._socket.setsockopt(zmq.SNDHWM, SOCKET_HWM)
        self._socket.setsockopt(zmq.RCVHWM, SOCKET_HWM)
        self._socket.setsockopt(zmq.MAXMSGSIZE, SOCKET_BYTES_MAX)
        self._curve = CurveServer(self._context, curve_file)
        self._lock: TextIO | None = None
        self._log = OncePerKind(logging.getLogger(__name__))
        self._dropped = counters.counter(
            "kvbm_consolidator_local_dropped_total",
            "Messages of and to connectors that were dropped.",
            labels=("reason",),
        )

    async def __aenter__(self) -> ConnectorSocket:
        try:
            self._lock = lock_of(self.endpoint)
            self._curve.protect(self._socket, self.endpoint)
            self._socket.bind(self.endpoint)
        except (EndpointTaken, ConfigError, zmq.ZMQError) as error:
            self._socket.close(linger=0)
            self._curve.close()
            self._context.term()
            if isinstance(error, zmq.ZMQError):
                raise EndpointTaken(f"cannot listen on {self.endpoint}: {error}") from error
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._socket.close()
        self._curve.close()
        self._context.term()
        if self._lock is not None:
            self._unlink(self._lock)

    def _unlink(self, lock: TextIO) -> None:
        path_of(self.endpoint).unlink(missing_ok=True)
        Path(lock.name).unlink(missing_ok=True)
        lock.close()

    async def run(self, on_message: Callable[[bytes, ToConsolidator], Awaitable[None]]) -> None:
        """Hand over every message until cancelled. A KvbmError is the sender's: Refused."""
        while True:
            peer, *frames = await self._socket.recv_multipart()
            message: ToConsolidator | None = None
            try:
                message = to_consolidator.decode(frames[0] if len(frames) == 1 else b"")
                await on_message(peer, message)
            except KvbmError as error:
                self._refuse(peer, message, error)

    def _refuse(self, peer: bytes, message: ToConsolidator | None, error: KvbmError) -> None:
        about = "message" if message is None else str(message.__struct_config__.tag)
        kind = getattr(error, "kind", error.code)
        self._dropped.labels(reason=kind).inc()
        self._log.warning(kind, f"{about} of a connector: {error}")
        offer = message.offer if isinstance(message, Offered) else None
        refused = Refused(
            about=about, code=error.code, message=str(error), field=error.field, offer=offer
        )
        self.send(peer, refused)

    def send(self, peer: bytes, message: FromConsolidator) -> None:
        """Send without waiting; to a connector that is gone, or does not read, it is dropped."""
        sent = self._socket.send_multipart([peer, from_consolidator.encode(message)], zmq.NOBLOCK)
        assert isinstance(sent, asyncio.Future)
        if sent.done() and sent.exception() is not None:
            self._dropped.labels(reason="not_reading").inc()
