"""Links: a connector's sockets to its host tier and its consolidator, in one thread of their own.

    DOWN --hello--> GREETING --welcome--> UP --silence, "unknown engine"--> DOWN

A link introduces itself again and again until it is welcomed, beats while it is up, and is down
again when the other side has said nothing for `SILENCE_BEATS` beats. An engine thread only ever
puts a message into a bounded queue; what does not fit is dropped and counted.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import zmq
from kvbm_common.wire.codec import MESSAGE_BYTES_MAX, MsgpackCodec, WireError
from kvbm_common.wire.local import Alive, Attached, Refused, Welcome

log = logging.getLogger(__name__)

BEAT_MS = 1_000
SILENCE_BEATS = 4
"""A service that is busy for a few seconds is not gone; one that is gone costs only misses."""
GREET_EVERY_MS = 250
REFUSED_GREET_EVERY_MS = 5_000
"""A refusal is the operator's to mend; asking faster does not help."""
QUEUE_MAX = 10_000
"""Messages to a service that does not take them: about a minute of a busy engine."""
SOCKET_HWM = 10_000
POLL_MS_MAX = 100


class LinkState(Enum):
    """The states of the drawing above."""

    DOWN = "down"
    GREETING = "greeting"
    UP = "up"


@dataclass(slots=True)
class Link:
    """One DEALER socket and its state. Only the link thread touches it, `say` excepted."""

    name: str
    endpoint: str
    encode: MsgpackCodec[Any]
    decode: MsgpackCodec[Any]
    hello: Callable[[], Any]
    beat: Any
    on_message: Callable[[Any], None]
    """Everything that is not about the link itself, and `Welcome`/`Attached`."""
    on_down: Callable[[], None] = lambda: None
    state: LinkState = LinkState.DOWN
    counts: Counter[str] = field(default_factory=Counter)
    outbox: deque[Any] = field(default_factory=deque)
    socket: zmq.Socket[bytes] | None = None
    next_greet_ms: int = 0
    next_beat_ms: int = 0
    heard_ms: int = 0

    def open(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        """Connect; ZMQ reconnects by itself for ever."""
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 200)
        socket.setsockopt(zmq.SNDHWM, SOCKET_HWM)
        socket.setsockopt(zmq.RCVHWM, SOCKET_HWM)
        socket.setsockopt(zmq.MAXMSGSIZE, MESSAGE_BYTES_MAX)
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1_000)
        socket.connect(self.endpoint)
        self.socket = socket

    def tick(self, now_ms: int) -> None:
        """Greet, beat, notice silence."""
        if self.state is LinkState.UP and now_ms - self.heard_ms > SILENCE_BEATS * BEAT_MS:
            self._down("silence", now_ms)
        if self.state is not LinkState.UP:
            if now_ms >= self.next_greet_ms:
                self.state = LinkState.GREETING
                self.next_greet_ms = now_ms + GREET_EVERY_MS
                self._send(self.hello())
        elif now_ms >= self.next_beat_ms:
            self.next_beat_ms = now_ms + BEAT_MS
            self._send(self.beat)
        self._drain()

    def _drain(self) -> None:
        while self.outbox:
            message = self.outbox.popleft()
            if self.state is LinkState.UP:
                self._send(message)
            else:
                self.counts["dropped.link_down"] += 1

    def _send(self, message: Any) -> None:
        assert self.socket is not None
        try:
            self.socket.send(self.encode.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            self.counts["dropped.send_queue_full"] += 1

    def receive(self, now_ms: int) -> None:
        """Take everything that has arrived."""
        assert self.socket is not None
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = self.decode.decode(frames[-1])
            except WireError as error:
                self.counts[f"dropped.{error.kind}"] += 1
                continue
            self._received(message, now_ms)

    def _received(self, message: Any, now_ms: int) -> None:
        self.heard_ms = now_ms
        match message:
            case Refused(code="unknown_engine"):
                self.next_greet_ms = now_ms
                self._down("unknown_engine", now_ms)
            case Refused():
                self.counts[f"refused.{message.code}"] += 1
                log.warning(
                    "%s refused %s: %s (%s)",
                    self.name,
                    message.about,
                    message.message,
                    message.code,
                )
                if message.about in ("hello", "attach"):
                    self.next_greet_ms = now_ms + REFUSED_GREET_EVERY_MS
            case Alive():
                pass
            case Welcome() | Attached():
                if self.state is not LinkState.UP:
                    log.info("%s: attached", self.name)
                    self.state = LinkState.UP
                    self.next_beat_ms = now_ms + BEAT_MS
                self.on_message(message)
            case _:
                self.on_message(message)

    def _down(self, reason: str, now_ms: int) -> None:
        if self.state is LinkState.UP:
            log.warning("%s: lost (%s), passing through", self.name, reason)
            self.counts[f"lost.{reason}"] += 1
            self.on_down()
        self.state = LinkState.DOWN
        self.next_greet_ms = min(self.next_greet_ms, now_ms)


class LinkThread:
    """Runs some links until `close`. `on_tick` is called about every 100 ms, in the thread."""

    def __init__(
        self, links: list[Link], *, name: str, on_tick: Callable[[int], None] = lambda now_ms: None
    ) -> None:
        self._links = links
        self._on_tick = on_tick
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._bell = f"inproc://{name}-{id(self)}"
        self._ringer = self._context.socket(zmq.PAIR)
        self._ringer.bind(self._bell)
        self._ringing = threading.Lock()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin to connect."""
        self._thread.start()

    def say(self, link: Link, message: Any) -> None:
        """Send a message; from any thread, never blocks."""
        if len(link.outbox) >= QUEUE_MAX:
            link.counts["dropped.queue_full"] += 1
            return
        link.outbox.append(message)
        self._ring()

    def _ring(self) -> None:
        if threading.current_thread() is self._thread:
            return  # The loop drains every outbox before it sleeps.
        # An error means that the bell has rung a thousand times already.
        with self._ringing, contextlib.suppress(zmq.ZMQError):
            self._ringer.send(b"", zmq.NOBLOCK)

    def close(self, *, timeout_s: float = 2.0) -> None:
        """Send what is queued and end the thread."""
        self._closing = True
        self._ring()
        self._thread.join(timeout_s)
        self._ringer.close(linger=0)
        if not self._thread.is_alive():
            self._context.term()

    def _run(self) -> None:
        bell = self._context.socket(zmq.PAIR)
        bell.connect(self._bell)
        poller = zmq.Poller()
        poller.register(bell, zmq.POLLIN)
        for link in self._links:
            link.open(self._context)
            poller.register(link.socket, zmq.POLLIN)
        while not self._closing:
            now_ms = time.monotonic_ns() // 1_000_000
            for link in self._links:
                link.receive(now_ms)
                link.tick(now_ms)
            self._on_tick(now_ms)
            for link in self._links:
                link.tick(now_ms)
            if bell in dict(poller.poll(POLL_MS_MAX)):
                _empty(bell)
        for link in self._links:
            link.tick(time.monotonic_ns() // 1_000_000)
            assert link.socket is not None
            link.socket.close()
        bell.close(linger=0)


def _empty(bell: zmq.Socket[bytes]) -> None:
    try:
        while True:
            bell.recv(zmq.NOBLOCK)
    except zmq.Again:
        pass
