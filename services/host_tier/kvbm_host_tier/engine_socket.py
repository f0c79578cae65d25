"""The engines' socket: a ZMQ ROUTER that speaks wire.local."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable

import zmq
import zmq.asyncio
from kvbm_common.counters import Counters
from kvbm_common.logs import OncePerKind
from kvbm_common.wire.codec import SOCKET_BYTES_MAX, WireError
from kvbm_common.wire.local import FromHostTier, Refused, ToHostTier, from_host_tier, to_host_tier

SOCKET_HWM = 10_000
"""Messages per engine that wait in a socket; an engine that does not read loses the rest."""


class EngineSocket:
    """Listens for connectors. Use it in `async with`; `run` feeds `on_message`."""

    def __init__(self, endpoint: str, counters: Counters) -> None:
        self.endpoint = endpoint
        self._context: zmq.asyncio.Context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 200)
        self._socket.setsockopt(zmq.SNDHWM, SOCKET_HWM)
        self._socket.setsockopt(zmq.RCVHWM, SOCKET_HWM)
        self._socket.setsockopt(zmq.MAXMSGSIZE, SOCKET_BYTES_MAX)
        self._log = OncePerKind(logging.getLogger(__name__))
        self._dropped = counters.counter(
            "kvbm_local_messages_dropped_total",
            "Messages of engines that could not be taken.",
            labels=("reason",),
        )

    async def __aenter__(self) -> EngineSocket:
        self._socket.bind(self.endpoint)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._socket.close()
        self._context.term()
        if self.endpoint.startswith("ipc://"):
            os.unlink(self.endpoint.removeprefix("ipc://"))

    async def run(self, on_message: Callable[[bytes, ToHostTier], bool]) -> None:
        """Hand over every message until cancelled. False from `on_message`: no room, dropped."""
        while True:
            frames = await self._socket.recv_multipart()
            connection = frames[0]
            try:
                message = to_host_tier.decode(frames[-1] if len(frames) == 2 else b"")
            except WireError as error:
                self._dropped.add(reason=error.kind)
                self._log.warning(error.kind, f"a message of an engine was dropped: {error}")
                text = str(error)
                self.send(connection, Refused(about="message", code=error.code, message=text))
                continue
            if not on_message(connection, message):
                self._dropped.add(reason="inbox_full")

    def send(self, connection: bytes, message: FromHostTier) -> None:
        """Send without waiting; to an engine that is gone, or does not read, it is dropped."""
        payload = from_host_tier.encode(message)
        sent = self._socket.send_multipart([connection, payload], zmq.NOBLOCK)
        assert isinstance(sent, asyncio.Future)
        if sent.exception() is not None:  # NOBLOCK: the future is done already.
            self._dropped.add(reason="engine_not_reading")
