"""The link thread: serves the links of a connector, so that an engine thread never waits for them.

An engine thread only ever puts a message into a bounded queue; what does not fit is dropped and
counted.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import zmq

from kvbm_connectors.client.link import Link

log = logging.getLogger(__name__)

QUEUE_MAX = 10_000
"""Messages to a service that does not take them: about a minute of a busy engine."""
POLL_MS_MAX = 100


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
        """Begin to connect all links."""
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
            if link.needs_socket(now_ms):
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
