"""Links: a connector's sockets to its host tier and its consolidator, in one thread of their own.

    DOWN --hello--> GREETING --welcome--> UP --silence, "unknown engine"--> DOWN
                       |                   |
                       |                 moved --> LEAVING --nothing is under way, bye--> DOWN
                     moved --> DOWN, another endpoint

A link introduces itself again and again until it is welcomed, beats while it is up, and is down
again when `SILENCE_BEATS` beats were not answered. A link that was moved greets at the endpoint
that it was told, and comes back to its own one when nobody is heard there. An engine thread only
ever puts a message into a bounded queue; what does not fit is dropped and counted.
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

import msgspec
import zmq
from kvbm_common.logs import OncePerKind
from kvbm_common.wire.codec import SOCKET_BYTES_MAX, MsgpackCodec, WireError
from kvbm_common.wire.local import Alive, Attached, Moved, Refused, Welcome

log = logging.getLogger(__name__)

BEAT_MS = 1_000
SILENCE_BEATS = 3
"""A service that is busy for a few seconds is not gone; one that is gone costs only misses. Beats
are counted, not seconds: an engine whose own threads had to wait has not asked anybody."""
GREET_EVERY_MS = 250
REFUSED_GREET_EVERY_MS = 5_000
"""A refusal is the operator's to mend; asking faster does not help."""
QUEUE_MAX = 10_000
"""Messages to a service that does not take them: about a minute of a busy engine."""
SOCKET_HWM = 10_000
LINGER_MS = 200
POLL_MS_MAX = 100


class LinkState(Enum):
    """The states of the drawing above."""

    DOWN = "down"
    GREETING = "greeting"
    UP = "up"
    LEAVING = "leaving"
    """As up, until what is under way has ended; then it is down, and greets elsewhere."""


ATTACHED = (LinkState.UP, LinkState.LEAVING)


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
    """Everything that is not about the link itself, `Welcome`/`Attached`, and refused offers."""
    on_down: Callable[[], None] = lambda: None
    on_moved: Callable[[Moved], None] = lambda moved: None
    """Another one serves us: begin nothing new."""
    may_leave: Callable[[], bool] = lambda: True
    """Nothing is under way."""
    bye: Any = None
    """Said before it leaves."""
    state: LinkState = LinkState.DOWN
    counts: Counter[str] = field(default_factory=Counter)
    outbox: deque[Any] = field(default_factory=deque)
    limiter: OncePerKind = field(default_factory=lambda: OncePerKind(log))
    socket: zmq.Socket[bytes] | None = None
    next_greet_ms: int = 0
    next_beat_ms: int = 0
    unanswered: int = 0
    """Beats since the other side was heard."""
    heard_ms: int = 0
    opened_ms: int = 0
    shards: int = 0
    """The version of the shard map by which we greet at `endpoint`; 0: it is our own."""
    home: str = ""
    moved: Moved | None = None
    """Where to go, when nothing is under way."""
    wants_socket: bool = False

    def __post_init__(self) -> None:
        self.home = self.endpoint

    def open(self, context: zmq.Context[zmq.Socket[bytes]], now_ms: int) -> None:
        """Connect; ZMQ reconnects by itself, unless the other side has broken its protocol."""
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        socket.setsockopt(zmq.SNDHWM, SOCKET_HWM)
        socket.setsockopt(zmq.RCVHWM, SOCKET_HWM)
        socket.setsockopt(zmq.MAXMSGSIZE, SOCKET_BYTES_MAX)
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1_000)
        try:
            socket.connect(self.endpoint)
        except zmq.ZMQError:
            if not self.shards:
                raise
            self.counts["dropped.moved_nowhere"] += 1
            self.endpoint, self.shards = self.home, 0
            socket.connect(self.endpoint)
        self.socket, self.opened_ms, self.wants_socket = socket, now_ms, False

    def is_deaf(self, now_ms: int) -> bool:
        """Nothing was heard for so long that only another socket may help.

        After a message over MAXMSGSIZE, or a stranger on the endpoint, ZMQ never connects again.
        A new socket also forgets the greetings that have piled up in the old one.
        """
        quiet_ms = now_ms - max(self.heard_ms, self.opened_ms)
        return self.state not in ATTACHED and quiet_ms > SILENCE_BEATS * BEAT_MS

    def reopen(self, context: zmq.Context[zmq.Socket[bytes]], now_ms: int) -> None:
        """Try another socket: where we were told, or, if nobody is heard there, at home."""
        assert self.socket is not None
        self.socket.close(linger=LINGER_MS if self.wants_socket else 0)
        if not self.wants_socket:
            self.endpoint, self.shards = self.home, 0
        self.open(context, now_ms)

    def tick(self, now_ms: int) -> None:
        """Greet, beat, notice silence, leave."""
        if self.wants_socket:
            return  # It is to be opened elsewhere first.
        beats = self.state in ATTACHED and now_ms >= self.next_beat_ms
        if beats and self.unanswered == SILENCE_BEATS and self._is_gone(now_ms):
            return
        if self.state is LinkState.LEAVING and self.may_leave():
            self._leave(now_ms)
        elif self.state not in ATTACHED:
            if now_ms >= self.next_greet_ms:
                self.state = LinkState.GREETING
                self.next_greet_ms = now_ms + GREET_EVERY_MS
                self._send(self._greeting())
        elif beats:
            self.next_beat_ms = now_ms + BEAT_MS
            self.unanswered += 1
            self._send(self.beat)
        self._drain()

    def _greeting(self) -> Any:
        hello = self.hello()
        return msgspec.structs.replace(hello, shards=self.shards) if self.shards else hello

    def _drain(self) -> None:
        while self.outbox:
            message = self.outbox.popleft()
            if self.state in ATTACHED:
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
        while not self.wants_socket:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = self.decode.decode(frames[0] if len(frames) == 1 else b"")
            except WireError as error:
                self.counts[f"dropped.{error.kind}"] += 1
                self.limiter.warning(error.kind, f"a message of {self.name} was dropped: {error}")
                continue
            self._received(message, now_ms)

    def _received(self, message: Any, now_ms: int) -> None:
        self.heard_ms, self.unanswered = now_ms, 0
        if isinstance(message, Refused) and message.offer is not None:
            self.on_message(message)
        match message:
            case Refused(code="unknown_engine"):
                self.next_greet_ms = now_ms
                self._down("unknown_engine", now_ms)
            case Refused():
                self._refused(message, now_ms)
            case Alive():
                pass
            case Moved():
                self._moved(message, now_ms)
            case Welcome() | Attached():
                if self.state not in ATTACHED:
                    log.info("%s: attached", self.name)
                    self.state = LinkState.UP
                    self.next_beat_ms = now_ms + BEAT_MS
                self.on_message(message)
            case _:
                self.on_message(message)

    def _refused(self, refused: Refused, now_ms: int) -> None:
        self.counts[f"refused.{refused.code}"] += 1
        is_greeting = refused.about in ("hello", "attach")
        if is_greeting:
            self.next_greet_ms = now_ms + REFUSED_GREET_EVERY_MS
        self.limiter.warning(
            "refused" if is_greeting else "refused_message",
            f"{self.name} refused {refused.about}: {refused.message} ({refused.code})",
        )

    def _moved(self, moved: Moved, now_ms: int) -> None:
        """Somebody else serves this engine: go there, at once or when all is done here."""
        known = self.shards if self.moved is None else self.moved.version
        if self.state in ATTACHED:
            if moved.version > known:
                self.moved, self.state = moved, LinkState.LEAVING
                self.on_moved(moved)
            return
        self.counts["moved"] += 1
        if moved.version > self.shards:
            self.on_moved(moved)
            self._go(moved, now_ms)
            return
        # It cannot be: who is greeted by a map as new as its own would have welcomed us.
        self.counts["dropped.moved_back"] += 1
        self._go(Moved(endpoint=self.home, version=0), now_ms)
        self.next_greet_ms = now_ms + BEAT_MS

    def _is_gone(self, now_ms: int) -> bool:
        """Nobody answers; True: we know where else to go."""
        moved = self.moved
        self._down("silence", now_ms)
        if moved is not None:
            self._go(moved, now_ms)
        return moved is not None

    def _leave(self, now_ms: int) -> None:
        assert self.moved is not None
        moved = self.moved
        self._drain()
        if self.bye is not None:
            self._send(self.bye)
        self.counts["moved"] += 1
        log.info("%s: moves to %s", self.name, moved.endpoint)
        self._down("moved", now_ms)
        self._go(moved, now_ms)

    def _go(self, moved: Moved, now_ms: int) -> None:
        self.endpoint, self.shards = moved.endpoint, moved.version
        self.state, self.next_greet_ms, self.wants_socket = LinkState.DOWN, now_ms, True

    def fail(self, now_ms: int) -> None:
        """Nobody will serve this link any more."""
        self._down("failed", now_ms)

    def close(self, now_ms: int) -> None:
        """Send what is queued."""
        assert self.socket is not None
        self.tick(now_ms)
        self.socket.close()

    def _down(self, reason: str, now_ms: int) -> None:
        if self.state in ATTACHED:
            if reason != "moved":
                log.warning("%s: lost (%s), passing through", self.name, reason)
                self.counts[f"lost.{reason}"] += 1
            self.on_down()
        self.state, self.moved = LinkState.DOWN, None
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

    def say(self, link: Link, message: Any, *, ring: bool = True) -> None:
        """Send a message; from any thread, never blocks. Without `ring` it may wait until the next
        one, or for 100 ms: waking the thread costs the caller some of its own time."""
        if len(link.outbox) >= QUEUE_MAX:
            link.counts["dropped.queue_full"] += 1
            return
        link.outbox.append(message)
        if ring:
            self.ring()

    def ring(self) -> None:
        """Have everything sent now."""
        if threading.current_thread() is self._thread:
            return  # The loop drains every outbox before it sleeps.
        # An error means that the bell has rung a thousand times already.
        with self._ringing, contextlib.suppress(zmq.ZMQError):
            self._ringer.send(b"", zmq.NOBLOCK)

    def close(self, *, timeout_s: float = 2.0) -> None:
        """Send what is queued and end the thread."""
        self._closing = True
        self.ring()
        if self._thread.ident is not None:  # It may never have been started.
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
            link.open(self._context, _now_ms())
            poller.register(link.socket, zmq.POLLIN)
        try:
            while not self._closing:
                self._serve_once(poller)
                if bell in dict(poller.poll(POLL_MS_MAX)):
                    _empty(bell)
        except Exception:  # Whatever it is, the engine must not wait for answers any more.
            log.exception("%s failed: passing through from now on", self._thread.name)
            for link in self._links:
                link.fail(_now_ms())
        finally:
            for link in self._links:
                link.close(_now_ms())
            bell.close(linger=0)

    def _serve_once(self, poller: zmq.Poller) -> None:
        now_ms = _now_ms()
        for link in self._links:
            if link.wants_socket or link.is_deaf(now_ms):
                poller.unregister(link.socket)
                link.reopen(self._context, now_ms)
                poller.register(link.socket, zmq.POLLIN)
            link.receive(now_ms)
            link.tick(now_ms)
        self._on_tick(now_ms)
        for link in self._links:
            link.tick(now_ms)


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000


def _empty(bell: zmq.Socket[bytes]) -> None:
    try:
        while True:
            bell.recv(zmq.NOBLOCK)
    except zmq.Again:
        pass
