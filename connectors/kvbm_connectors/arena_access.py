"""Arena access: how a worker comes to read the arena of the host tier's present life.

    NOTHING --welcome--> COMING --peer and readers are there--> READY
                          |  ^                                    |
                     error|  |pause, doubled each time            |
                          v  |                                    |
                         FAILED                COMING <--welcome of another life

Lives of one host tier follow each other, and their epochs grow. A host tier that a worker has moved
to may be older than the one that it comes from: then only a life that was left is known to be gone.

A welcome is known before its arena can be read, and a scheduler half may know of a life before this
worker does. Connecting may block for seconds: it has a thread of its own, so that the link goes on
beating and loads of what is there go on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from kvbm_common.errors import KvbmError
from kvbm_common.logs import OncePerKind
from kvbm_common.nixl import MoverThread
from kvbm_common.wire.local import Welcome

from kvbm_connectors.arena_reader import ArenaReader, fastest, readers_of

if TYPE_CHECKING:
    from kvbm_common.cuda.reading import Gpu

CALL_DEADLINE_S = 10.0
"""Registrations and metadata take milliseconds; a machine in trouble gets some more."""
RETRY_MS = 500
RETRY_MS_MAX = 30_000
"""Between attempts to reach the same arena."""
LEFT_MAX = 64
"""Moves that are remembered: a load names a life of seconds ago."""

log = logging.getLogger(__name__)


class Access(Enum):
    """What a load of some life of the host tier can expect."""

    READY = "ready"
    COMING = "coming"
    FAILED = "failed"
    """The last attempt to reach this arena failed; another one will be made."""
    GONE = "gone"
    """A later life has begun."""


@dataclass(frozen=True, slots=True)
class Attached:
    """An arena that can be read."""

    welcome: Welcome
    reader: ArenaReader


class ArenaAccess:
    """The arena of the present life. `on_change` is called, in the attaching thread, whenever an
    attempt has ended."""

    def __init__(
        self,
        mover: MoverThread,
        *,
        wanted: str,
        name: str,
        counts: Counter[str],
        on_change: Callable[[], None],
        gpu: Gpu | None = None,
    ) -> None:
        self._mover, self._wanted, self._gpu = mover, wanted, gpu
        self._counts, self._on_change = counts, on_change
        self._limiter = OncePerKind(log)
        self._lock = threading.Lock()
        self._attacher = ThreadPoolExecutor(1, thread_name_prefix=f"attach-{name}")
        self._left: deque[int] = deque(maxlen=LEFT_MAX)
        """Lives of other host tiers, by which we were served before."""
        self._is_leaving = False
        """Another host tier will serve us: any life may be its."""
        self._welcome: Welcome | None = None
        """The newest, whether its arena is attached or not."""
        self._attached: Attached | None = None
        self._readers: list[ArenaReader] = []
        self._is_trying = False
        self._failures = 0
        """Attempts for the newest welcome that have failed."""
        self._retry_at_ms = 0
        self._closed = False

    def attached(self) -> Attached | None:
        """The arena that is read now."""
        return self._attached

    def access(self, epoch: int) -> Access:
        """May a load of this life be read, now or soon?"""
        with self._lock:
            known = self._welcome
            if known is None or (self._is_leaving and epoch != known.epoch):
                return Access.COMING
            if epoch != known.epoch and epoch in self._left:
                return Access.GONE
            if known.epoch < epoch:
                return Access.COMING
            if known.epoch > epoch:
                return Access.GONE
            if self._has(epoch):
                return Access.READY
            return Access.FAILED if self._failures else Access.COMING

    def welcomed(self, welcome: Welcome) -> None:
        """The host tier says where its arena is, perhaps twice: every greeting is answered. After a
        failure the same again is another chance to reach it."""
        with self._lock:
            known = self._welcome
            if known is not None and known.epoch == welcome.epoch and not self._failures:
                return
            if known is not None and known.instance != welcome.instance:
                self._left.append(known.epoch)
            self._welcome, self._failures, self._is_leaving = welcome, 0, False
        self._try(welcome)

    def leaving(self) -> None:
        """Another host tier is about to say where its arena is."""
        with self._lock:
            self._is_leaving = True

    def _has(self, epoch: int) -> bool:
        return self._attached is not None and self._attached.welcome.epoch == epoch

    def tick(self, now_ms: int) -> None:
        """Try again what failed a while ago."""
        with self._lock:
            welcome = self._welcome
            is_due = self._failures > 0 and not self._is_trying and now_ms >= self._retry_at_ms
        if is_due and welcome is not None:
            self._try(welcome)

    def close(self) -> None:
        """Give the readers back: what they were asked for before ends first."""
        with self._lock:
            self._closed = True
            readers, self._readers, self._attached = self._readers, [], None
        for reader in readers:
            reader.close()

    def wait_closed(self) -> None:
        """End the attaching thread. The mover is closed by now: nothing keeps it any more."""
        self._attacher.shutdown(wait=True, cancel_futures=True)

    # --- the attaching thread ---------------------------------------------------------------

    def _try(self, welcome: Welcome) -> None:
        with self._lock:
            if self._closed:
                return
            self._is_trying = True
            self._attacher.submit(self._attach, welcome)

    def _attach(self, welcome: Welcome) -> None:
        readers: list[ArenaReader] = []
        try:
            if self._is_wanted(welcome):
                peer = self._mover.add_peer(welcome.agent).result(CALL_DEADLINE_S)
                readers = readers_of(welcome, self._mover, peer, wanted=self._wanted, gpu=self._gpu)
        except (KvbmError, TimeoutError) as error:
            self._limiter.warning("unreached", f"the arena cannot be reached: {error!r}")
        except Exception as error:  # Whatever it is, loads must not wait for this thread for ever.
            log.exception("the arena cannot be attached")
            self._limiter.warning("unreached", f"the arena cannot be reached: {error!r}")
        self._ended(welcome, readers)
        self._on_change()
        if len(readers) > 1 and not self._closed:
            self._choose(readers, welcome)

    def _is_wanted(self, welcome: Welcome) -> bool:
        with self._lock:
            return welcome is self._welcome and not self._has(welcome.epoch)

    def _ended(self, welcome: Welcome, readers: list[ArenaReader]) -> None:
        previous: list[ArenaReader] = []
        with self._lock:
            self._is_trying = False
            if self._closed:
                previous = readers
            elif readers:
                previous, self._readers = self._readers, readers
                self._attached, self._failures = Attached(welcome, readers[0]), 0
            elif welcome is self._welcome and not self._has(welcome.epoch):
                pause_ms = min(RETRY_MS << min(self._failures, 16), RETRY_MS_MAX)
                self._failures += 1
                self._retry_at_ms = _now_ms() + pause_ms
                self._counts["arena_failures"] += 1
        for reader in previous:
            reader.close()

    def _choose(self, readers: list[ArenaReader], welcome: Welcome) -> None:
        chosen = fastest(readers, self._mover, welcome)
        with self._lock:
            if self._readers is readers:
                self._attached = Attached(welcome, chosen)


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000
