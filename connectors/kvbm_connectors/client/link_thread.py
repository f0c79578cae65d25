"""The link thread: serves the links of a connector, so that an engine thread never waits for them.

An engine thread puts its messages into a bounded queue; what does not fit is dropped and counted.
It sends them itself where the link is up and its socket is not in use: waking a thread takes both
longer. So this thread sleeps on descriptors, and touches sockets under a lock only.
"""

from __future__ import annotations

import logging
import os
import select
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
USING_S_MAX = 0.001
"""The longest wait of an engine thread for a socket, in seconds. The link's thread uses one for
some µs, mostly to find that no more has come."""


class LinkThread:
    """Runs some links until `close`. `on_tick` is called about every 100 ms, in the thread.

    While `may_rest` says that no tick has anything to do, they come with the beats, once a second:
    who has something for them again calls `wake`. That takes an engine's call as long as a miss, so
    the thread rests after a tick without work only: a busy engine wakes it once, not ten times a
    second.
    """

    def __init__(
        self,
        links: list[Link],
        *,
        name: str,
        on_tick: Callable[[int], None] = lambda now_ms: None,
        may_rest: Callable[[], bool] = lambda: True,
    ) -> None:
        assert links
        self._links = links
        self._on_tick = on_tick
        self._may_rest = may_rest
        self.is_resting = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._bell: int | None = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        """Readable while it has rung; None once it is closed."""
        self._ringing = threading.Lock()
        self._is_serving = False
        self._closing = False
        self._next_tick_ms = 0
        self._had_work = False
        """The last tick had something to do."""
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
        if not ring:
            self.wake()
        elif not self._is_sent(link):
            self.ring()

    def _is_sent(self, link: Link) -> bool:
        """Send the queued messages from this thread; False: the link's thread has to be woken.

        Messages of the link's own thread leave after it has read those that they answer.
        """
        if threading.current_thread() is self._thread:
            return False
        if not link.using.acquire(timeout=USING_S_MAX):
            return False
        try:
            return self._is_serving and link.flush() and not link.has_news()
        finally:
            link.using.release()

    def wake(self) -> None:
        """Have ticks come every 100 ms again. Costs nothing where they do, or another has rung."""
        if self.is_resting:
            self.is_resting = False  # Before the ring: the thread sets it again when it rests.
            self.ring()

    def ring(self) -> None:
        """Have everything sent now."""
        if threading.current_thread() is self._thread:
            return  # The loop drains every outbox before it sleeps.
        with self._ringing:  # A closed bell's number may be another file's by now.
            if self._bell is not None:
                os.eventfd_write(self._bell, 1)

    def close(self, *, timeout_s: float = 2.0) -> None:
        """Send what is queued and end the thread."""
        self._closing = True
        self.ring()
        if self._thread.ident is not None:  # It may never have been started.
            self._thread.join(timeout_s)
        if not self._thread.is_alive():
            with self._ringing:
                if self._bell is not None:
                    os.close(self._bell)
                self._bell = None
            self._context.term()

    def _run(self) -> None:
        bell = self._bell
        assert bell is not None, f"{self._thread.name} begins after its end"
        poller = select.poll()
        poller.register(bell, select.POLLIN)
        try:
            for link in self._links:
                link.open(self._context, _now_ms())
                poller.register(link.descriptor(), select.POLLIN)
            self._is_serving = True
            while not self._closing:
                has_more = self._serve_once(poller)
                for ready, _ in poller.poll(0 if has_more else self._pause_ms()):
                    if ready == bell:
                        os.eventfd_read(bell)
                self.is_resting = False
        except Exception:  # Whatever it is, the engine must not wait for answers any more.
            log.exception("%s failed: passing through from now on", self._thread.name)
            for link in self._links:
                link.fail(_now_ms())
        finally:
            self._is_serving = False
            for link in self._links:
                with link.using:
                    link.close(_now_ms())

    def _pause_ms(self) -> int:
        """Return how long to sleep at most. Nothing that needs a tick sooner is missed: who has
        it after this look sees that the thread rests."""
        self.is_resting = True
        is_quiet = not self._had_work and all(link.is_quiet for link in self._links)
        if is_quiet and self._may_rest():
            return max(0, min(link.next_beat_ms for link in self._links) - _now_ms())
        self.is_resting = False
        return POLL_MS_MAX

    def _serve_once(self, poller: select.poll) -> bool:
        """Read and send; True: more has come meanwhile, which no descriptor signals."""
        now_ms, has_more = _now_ms(), False
        for link in self._links:
            with link.using:
                if link.needs_socket(now_ms):
                    poller.unregister(link.descriptor())
                    link.reopen(self._context, now_ms)
                    poller.register(link.descriptor(), select.POLLIN)
                has_news = link.has_news()
            if has_news:
                link.receive(now_ms)
            with link.using:
                link.tick(now_ms)
        self._tick(now_ms)
        for link in self._links:
            with link.using:
                if link.outbox:  # What has come, or the tick, may have left something to be sent.
                    link.tick(now_ms)
                has_more = (link.has_sent and link.has_news()) or has_more
        return has_more

    def _tick(self, now_ms: int) -> None:
        """Have a tick, if the last one was so long ago."""
        if now_ms >= self._next_tick_ms:
            self._next_tick_ms = now_ms + POLL_MS_MAX
            self._had_work = not self._may_rest()
            self._on_tick(now_ms)


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000
