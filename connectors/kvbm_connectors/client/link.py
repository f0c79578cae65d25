"""Links: a connector's sockets to its host tier and its consolidator.

A link greets the service until it is welcomed, and sends beats while it is up. It goes down when
`SILENCE_BEATS` beats were not answered, or when another life of the service answers a beat.
A link that was moved greets at the endpoint that `Moved` names; without an answer it returns to its
own endpoint. `docs/state_machines.md` draws the table of its states; `link_thread.py` runs the
links of a connector.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import msgspec
import zmq
from kvbm_common.access.curve import TCP, use_client_keys
from kvbm_common.config.settings import Settings
from kvbm_common.errors import KvbmError
from kvbm_common.runtime.logs import OncePerKind
from kvbm_common.tier.machine import Machine
from kvbm_common.wire.codec import SOCKET_BYTES_MAX, MsgpackCodec, WireError
from kvbm_common.wire.consolidator import Attached
from kvbm_common.wire.local import Alive, Moved, Refused, Welcome

log = logging.getLogger(__name__)

BEAT_MS = 1_000
SILENCE_BEATS = 3
"""Beats without an answer after which the service is gone: it may be busy for some seconds. Beats
are counted, not seconds: an engine whose threads had to wait has sent no beat."""
GREET_EVERY_MS = 250
REFUSED_GREET_EVERY_MS = 5_000
"""The pause between two greetings of a refused link: an operator has to act first."""
SOCKET_HWM = 10_000
LINGER_MS = 200


class LinkState(Enum):
    """The states of a link."""

    DOWN = "down"
    GREETING = "greeting"
    UP = "up"
    LEAVING = "leaving"
    MOVING = "moving"


LINK = Machine(
    "link",
    {
        (LinkState.DOWN, "greets"): LinkState.GREETING,
        (LinkState.DOWN, "welcomed"): LinkState.UP,
        (LinkState.DOWN, "lost"): LinkState.DOWN,
        (LinkState.DOWN, "sent elsewhere"): LinkState.MOVING,
        (LinkState.GREETING, "greets"): LinkState.GREETING,
        (LinkState.GREETING, "welcomed"): LinkState.UP,
        (LinkState.GREETING, "lost"): LinkState.DOWN,
        (LinkState.GREETING, "sent elsewhere"): LinkState.MOVING,
        (LinkState.UP, "moved"): LinkState.LEAVING,
        (LinkState.UP, "lost"): LinkState.DOWN,
        (LinkState.LEAVING, "moved"): LinkState.LEAVING,
        (LinkState.LEAVING, "lost"): LinkState.DOWN,
        (LinkState.LEAVING, "said bye"): LinkState.DOWN,
        (LinkState.MOVING, "opened"): LinkState.DOWN,
        (LinkState.MOVING, "lost"): LinkState.MOVING,
    },
)
ATTACHED = (LinkState.UP, LinkState.LEAVING)


@dataclass(slots=True)
class Link:
    """One DEALER socket and its state. Only the link thread touches it, but for `flush`."""

    name: str
    endpoint: str
    encode: MsgpackCodec[Any]
    decode: MsgpackCodec[Any]
    hello: Callable[[], Any]
    beat: Any
    on_message: Callable[[Any], None]
    """Called with `Welcome`, `Attached`, refused offers, and all messages not about the link."""
    on_down: Callable[[], None] = lambda: None
    on_moved: Callable[[Moved], None] = lambda moved: None
    """Called when another service is to serve the engine: begin nothing new here."""
    may_leave: Callable[[], bool] = lambda: True
    """Tells whether nothing is under way, so that the link may leave."""
    bye: Any = None
    """The message that is sent before the link leaves."""
    state: LinkState = LinkState.DOWN
    counts: Counter[str] = field(default_factory=Counter)
    outbox: deque[Any] = field(default_factory=deque)
    limiter: OncePerKind = field(default_factory=lambda: OncePerKind(log))
    using: threading.Lock = field(default_factory=threading.Lock)
    """Held by the thread that uses the socket, for one call of it or a few."""
    socket: zmq.Socket[bytes] | None = None
    has_sent: bool = False
    """True if something was sent since the last look for news."""
    next_greet_ms: int = 0
    next_beat_ms: int = 0
    unanswered: int = 0
    """Beats since the last message of the other side."""
    epoch: int = 0
    """The life of the host tier that has welcomed us last."""
    heard_ms: int = 0
    opened_ms: int = 0
    has_keys: bool = True
    """True if the keys could be read; if not, the socket is not connected."""
    shards: int = 0
    """The version of the shard map that names `endpoint`; 0: it is our own endpoint."""
    greeted: Any = None
    """The last greeting that was sent, as `hello` made it."""
    was_welcomed: bool = False
    home: str = ""
    moved: Moved | None = None
    """The message that names where to go to once nothing is under way; None: none has come."""

    def __post_init__(self) -> None:
        self.home = self.endpoint

    def open(self, context: zmq.Context[zmq.Socket[bytes]], now_ms: int) -> None:
        """Connect; ZMQ reconnects by itself, unless the other side has broken its protocol.

        If its keys cannot be read, the socket stays unconnected. A deaf link is opened again.
        """
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        socket.setsockopt(zmq.SNDHWM, SOCKET_HWM)
        socket.setsockopt(zmq.RCVHWM, SOCKET_HWM)
        socket.setsockopt(zmq.MAXMSGSIZE, SOCKET_BYTES_MAX)
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1_000)
        self.has_keys = self._give_keys(socket)
        if self.has_keys:
            try:
                socket.connect(self.endpoint)
            except zmq.ZMQError:
                if not self.shards:
                    raise
                self.counts["dropped.moved_nowhere"] += 1
                self.endpoint, self.shards = self.home, 0
                socket.connect(self.endpoint)
        self.opened(socket, now_ms)

    def _give_keys(self, socket: zmq.Socket[bytes]) -> bool:
        """Give a socket the keys that its endpoint needs; False: they cannot be read now."""
        if not self.endpoint.startswith(TCP):
            return True
        try:
            use_client_keys(socket, self.endpoint, Settings.load().curve_client_file)
        except (KvbmError, zmq.ZMQError) as error:
            self.counts["dropped.no_keys"] += 1
            self.limiter.warning("no_keys", f"{self.name} cannot be reached now: {error}")
            return False
        return True

    def opened(self, socket: zmq.Socket[bytes], now_ms: int) -> None:
        """Use this socket from now on."""
        self.socket, self.opened_ms = socket, now_ms
        if self.state is LinkState.MOVING:
            self._move("opened")

    def needs_socket(self, now_ms: int) -> bool:
        """Tell whether the link needs a new socket: elsewhere, or after a long silence."""
        return self.state is LinkState.MOVING or self._is_deaf(now_ms)

    def _is_deaf(self, now_ms: int) -> bool:
        """Tell whether the silence is so long that only another socket may help.

        After a message over MAXMSGSIZE, or a stranger on the endpoint, ZMQ never connects again.
        A new socket also forgets the greetings that have piled up in the old one.
        """
        if self.state in ATTACHED:
            return False
        return now_ms - max(self.heard_ms, self.opened_ms) > SILENCE_BEATS * BEAT_MS

    def reopen(self, context: zmq.Context[zmq.Socket[bytes]], now_ms: int) -> None:
        """Open another socket: where `Moved` sent us or, without an answer there, at home."""
        assert self.socket is not None
        moving = self.state is LinkState.MOVING
        self.socket.close(linger=LINGER_MS if moving else 0)
        if not moving:
            self.endpoint, self.shards = self.home, 0
        self.open(context, now_ms)

    def tick(self, now_ms: int) -> None:
        """Greet, beat, notice silence, leave."""
        if self.state is LinkState.MOVING:
            return  # The socket at the new endpoint comes first.
        if not self.has_keys:
            self._drain()
            return
        beats = self.state in ATTACHED and now_ms >= self.next_beat_ms
        if beats and self.unanswered == SILENCE_BEATS and self._is_gone(now_ms):
            return
        if self.was_welcomed and self.state in ATTACHED and self.hello() != self.greeted:
            self._greet()  # What was said before the welcome was dropped.
        self.was_welcomed = False
        if self.state is LinkState.LEAVING and self.may_leave():
            self._leave(now_ms)
        elif self.state not in ATTACHED:
            if now_ms >= self.next_greet_ms:
                self._move("greets")
                self.next_greet_ms = now_ms + GREET_EVERY_MS
                self._greet()
        elif beats:
            self.next_beat_ms = now_ms + BEAT_MS
            self.unanswered += 1
            self._send(self.beat)
        if self.outbox:
            self._drain()

    @property
    def is_quiet(self) -> bool:
        """Tell whether the link has nothing to send before its next beat."""
        return self.state is LinkState.UP and not self.outbox

    def _greet(self) -> None:
        self.greeted = hello = self.hello()
        self._send(msgspec.structs.replace(hello, shards=self.shards) if self.shards else hello)

    def descriptor(self) -> int:
        """Return what is readable when ZMQ has news; it tells of each once (see `has_news`)."""
        assert self.socket is not None, f"{self.name} is not open"
        found = self.socket.getsockopt(zmq.FD)
        assert isinstance(found, int), f"{self.name}: ZMQ's descriptor is {found!r}"
        return found

    def has_news(self) -> bool:
        """Tell whether a message waits. Each use of the socket may be what its descriptor told."""
        assert self.socket is not None, f"{self.name} is not open"
        self.has_sent = False
        events = self.socket.getsockopt(zmq.EVENTS)
        assert isinstance(events, int), f"{self.name}: ZMQ's events are {events!r}"
        return bool(events & zmq.POLLIN)

    def flush(self) -> bool:
        """Send what is queued, if the link is up; False: it is not, and `tick` decides."""
        if self.state not in ATTACHED:
            return False
        self._drain()
        return True

    def _drain(self) -> None:
        while self.outbox:
            message = self.outbox.popleft()
            if self.state in ATTACHED:
                self._send(message)
            else:
                self.counts["dropped.link_down"] += 1

    def _send(self, message: Any) -> None:
        assert self.socket is not None
        self.has_sent = True
        try:
            self.socket.send(self.encode.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            self.counts["dropped.send_queue_full"] += 1
        except UnicodeEncodeError as error:  # A name has a lone surrogate.
            self.counts["dropped.no_text"] += 1
            self.limiter.warning(
                "no_text", f"a message to {self.name} has a name that is not valid text: {error}"
            )

    def receive(self, now_ms: int) -> None:
        """Handle every message that has arrived."""
        assert self.socket is not None
        while self.state is not LinkState.MOVING:
            try:
                with self.using:
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
            case Alive(epoch=epoch) if self.state in ATTACHED and epoch != self.epoch:
                # The welcome came late from an earlier life, or this life's was lost.
                self._down("other_life", now_ms)
            case Alive():
                pass
            case Moved():
                self._moved(message, now_ms)
            case Welcome() | Attached():
                if self.state not in ATTACHED:
                    log.info("%s: attached", self.name)
                    self._move("welcomed")
                    self.next_beat_ms = now_ms + BEAT_MS
                    self.was_welcomed = True  # `tick` looks at it: it has the socket.
                self.epoch = message.epoch
                self.on_message(message)
            case _:
                self.on_message(message)

    def _refused(self, refused: Refused, now_ms: int) -> None:
        self.counts[f"refused.{refused.code}"] += 1
        is_greeting = refused.about in ("hello", "attach")
        if is_greeting:
            self.next_greet_ms = now_ms + REFUSED_GREET_EVERY_MS
        kind = "refused" if is_greeting else "refused_message"
        if refused.code == "arena_refused":
            kind = "no_arena"  # It may follow another refusal at once, and must be logged.
        why = f"{refused.message} ({refused.code})"
        self.limiter.warning(kind, f"{self.name} refused {refused.about}: {why}")

    def _moved(self, moved: Moved, now_ms: int) -> None:
        """Go to another host tier, at once or when nothing is under way here."""
        known = self.shards if self.moved is None else self.moved.version
        if self.state in ATTACHED:
            if moved.version > known:
                self.moved = moved
                self._move("moved")
                self.on_moved(moved)
            return
        self.counts["moved"] += 1
        if moved.version > self.shards:
            self.on_moved(moved)
            self._go(moved, now_ms)
            return
        # Impossible: a host tier whose map is not newer than ours welcomes us.
        self.counts["dropped.moved_back"] += 1
        self._go(Moved(endpoint=self.home, version=0), now_ms)
        self.next_greet_ms = now_ms + BEAT_MS

    def _is_gone(self, now_ms: int) -> bool:
        """Give up an endpoint that does not answer; True: another one is known, and used."""
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
        log.info("%s: moving to %s", self.name, moved.endpoint)
        self.on_down()
        self.moved = None
        self._move("said bye")
        self._go(moved, now_ms)

    def _go(self, moved: Moved, now_ms: int) -> None:
        self.endpoint, self.shards = moved.endpoint, moved.version
        self.next_greet_ms = now_ms
        self._move("sent elsewhere")

    def fail(self, now_ms: int) -> None:
        """Take the link down after an error: its thread serves it no longer."""
        try:
            self._down("failed", now_ms)
        except Exception:
            log.exception("%s: cannot be given up", self.name)

    def close(self, now_ms: int) -> None:
        """Send what is queued, and close the socket, if there is one, whatever happens."""
        if self.socket is None:
            return
        try:
            self.tick(now_ms)
        except Exception:  # Other links of the thread are to be closed, too.
            log.exception("%s: what was queued is lost", self.name)
        finally:
            self.socket.close()

    def _down(self, reason: str, now_ms: int) -> None:
        if self.state in ATTACHED:
            log.warning("%s: lost (%s); passing through", self.name, reason)
            self.counts[f"lost.{reason}"] += 1
            self.on_down()
        self.moved = None
        self._move("lost")
        self.next_greet_ms = min(self.next_greet_ms, now_ms)

    def _move(self, event: str) -> None:
        self.state = LINK.next(self.state, event, self.name)
