"""The engines' socket: a ZMQ ROUTER that speaks wire.local.

It listens at an endpoint of this host tier alone, and also at the well-known endpoint while it
holds the lock on that. One host tier of a host does: the *front*. The kernel releases the lock with
the process. With TCP there is only the well-known endpoint, and one host tier.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

import zmq
import zmq.asyncio
from kvbm_common.access.curve import CurveServer
from kvbm_common.runtime.logs import OncePerKind
from kvbm_common.runtime.metrics import Metrics
from kvbm_common.runtime.processes import LockTaken, remove_own, take_lock
from kvbm_common.wire.codec import SOCKET_BYTES_MAX, WireError
from kvbm_common.wire.local import FromHostTier, Refused, ToHostTier, from_host_tier, to_host_tier

SOCKET_HWM = 10_000
"""Messages per engine that wait in a socket; an engine that does not read loses the rest."""
TURN_MAX = 64
"""Messages that are taken before other tasks have their turn."""
TURN_NS = 2_000_000
"""The longest that they are taken for, beside the message that is being taken."""

IPC = "ipc://"


def own_endpoint(endpoint: str, instance: str) -> str:
    """Return the second endpoint of an instance that shares a well-known one.

    Empty: it has none, because the shared one is not an IPC path.
    """
    if not endpoint.startswith(IPC):
        return ""
    path = Path(endpoint.removeprefix(IPC))
    return f"{IPC}{path.with_name(f'{path.stem}-{instance}{path.suffix}')}"


def is_deserted(endpoint: str) -> bool:
    """Tell whether no process listens at an endpoint, by connecting to it: ZMQ tolerates that."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
            probe.connect(endpoint.removeprefix(IPC))
    except (ConnectionRefusedError, FileNotFoundError):
        return True
    except OSError:  # It is too busy to accept, or we have no descriptor: it may still listen.
        return False
    return False


class EngineSocket:
    """Listens for connectors. Use it in `async with`; `run` feeds `on_message`."""

    def __init__(
        self,
        endpoint: str,
        counters: Metrics,
        *,
        instance: str = "0",
        curve_file: Path | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.own = own_endpoint(endpoint, instance)
        self._lock: TextIO | None = None
        self._is_front = False
        self._files: dict[Path, os.stat_result] = {}
        """The sockets that we have made: path → what the file was then."""
        self._context: zmq.asyncio.Context = zmq.asyncio.Context()
        self._socket: zmq.Socket[bytes] = zmq.Socket(self._context, zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 200)
        self._socket.setsockopt(zmq.SNDHWM, SOCKET_HWM)
        self._socket.setsockopt(zmq.RCVHWM, SOCKET_HWM)
        self._socket.setsockopt(zmq.MAXMSGSIZE, SOCKET_BYTES_MAX)
        self._curve = CurveServer(self._context, curve_file)
        self._log = OncePerKind(logging.getLogger(__name__))
        self._read_soon: Callable[[], object] = lambda: None
        """Has the loop read, while `run` is running."""
        self._dropped = counters.counter(
            "kvbm_local_messages_dropped_total",
            "Messages of engines that could not be taken.",
            labels=("reason",),
        )

    async def __aenter__(self) -> EngineSocket:
        if self.own:
            self._bind(self.own)
        self.take_front()
        return self

    async def __aexit__(self, *_: object) -> None:
        for path, status in self._files.items():
            with contextlib.suppress(OSError):
                remove_own(path, status)  # Another life may have taken the place already.
        self._socket.close()
        self._curve.close()
        self._context.term()
        self._unlock(removes=True)

    @property
    def listens_at(self) -> str:
        """The endpoint at which engines reach this host tier first."""
        return self.endpoint if self._is_front else self.own

    def take_front(self) -> bool:
        """Listen at the well-known endpoint, if no other process does; True once we do.

        Raises OSError and ZMQError where it cannot be locked or bound. It may be tried again.
        """
        if self._is_front:
            return True
        if self.own:
            try:
                self._lock = take_lock(Path(f"{self.endpoint.removeprefix(IPC)}.lock"))
            except LockTaken:
                return False
        try:
            self._bind(self.endpoint)
        except (OSError, zmq.ZMQError):
            self._unlock()
            raise
        self._is_front = True
        return True

    def _unlock(self, *, removes: bool = False) -> None:
        """Let another process have the front; the file goes first, while it is ours."""
        if self._lock is not None:
            if removes:
                with contextlib.suppress(OSError):
                    os.unlink(self._lock.name)
            self._lock.close()
            self._lock = None

    def _bind(self, endpoint: str) -> None:
        self._curve.protect(self._socket, endpoint)
        self._socket.bind(endpoint)
        if endpoint.startswith(IPC):
            path = Path(endpoint.removeprefix(IPC))
            self._files[path] = path.stat()
        self._read_soon()

    async def run(
        self,
        on_message: Callable[[bytes, ToHostTier], bool],
        *,
        on_turn: Callable[[], None] = lambda: None,
    ) -> None:
        """Hand over every message until cancelled. False from `on_message`: no room, dropped.

        `on_turn` is called after the messages of one turn.

        ZMQ's descriptor wakes the loop, which reads in the same turn: a future for each message
        takes longer than the rest of its way. The descriptor tells only of what comes after the
        last look, and each call of the socket is a look. So each ends with another one.
        """
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        is_due = False

        def read_soon() -> None:
            """Have one read in the next turn, however many sends have asked for it."""
            nonlocal is_due
            if not is_due:
                is_due = True
                loop.call_soon(read)

        def look() -> None:
            if not is_due:
                read()

        def read() -> None:
            nonlocal is_due
            is_due = False
            if ended.done():
                return
            try:
                is_empty = self._read(on_message)
                on_turn()
            except Exception as error:  # The service ends by it, as by that of any task.
                ended.set_exception(error)
                return
            if not is_empty:
                read_soon()

        self._read_soon = read_soon
        descriptor = self._socket.getsockopt(zmq.FD)
        assert isinstance(descriptor, int), f"ZMQ's descriptor is {descriptor!r}"
        loop.add_reader(descriptor, look)
        try:
            self._read_soon()
            await ended
        finally:
            self._read_soon = lambda: None
            loop.remove_reader(descriptor)

    def _read(self, on_message: Callable[[bytes, ToHostTier], bool]) -> bool:
        """Take what has arrived; False: there may be more, and others have their turn first."""
        until_ns = time.monotonic_ns() + TURN_NS
        for count in range(TURN_MAX):
            if count and time.monotonic_ns() >= until_ns:
                break
            try:
                connection, *rest = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return True
            try:
                message = to_host_tier.decode(rest[0] if len(rest) == 1 else b"")
            except WireError as error:
                self._dropped.labels(reason=error.kind).inc()
                self._log.warning(error.kind, f"a message of an engine was dropped: {error}")
                self.send(connection, _refusal(error))
                continue
            if not on_message(connection, message):
                self._dropped.labels(reason="inbox_full").inc()
        return False

    def send(self, connection: bytes, message: FromHostTier) -> None:
        """Send without waiting; to an engine that is gone, or does not read, it is dropped."""
        payload = from_host_tier.encode(message)
        try:
            self._socket.send_multipart([connection, payload], zmq.NOBLOCK)
        except zmq.ZMQError:
            self._dropped.labels(reason="engine_not_reading").inc()
        events = self._socket.getsockopt(zmq.EVENTS)
        assert isinstance(events, int), f"ZMQ's events are {events!r}"
        if events & zmq.POLLIN:
            self._read_soon()


def _refusal(error: WireError) -> Refused:
    """Return the answer to a message that does not follow the wire."""
    return Refused(about="message", code=error.code, message=str(error), field=error.field)
