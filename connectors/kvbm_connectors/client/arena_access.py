"""Arena access: how a worker comes to read the arena of the host tier's present life.

The table of its states is drawn in `docs/state_machines.md`. Lives of one host tier follow each
other, and their epochs grow. A host tier that a worker has moved to may be older than the one that
it comes from: then only a life that was left is known to be gone.

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
from kvbm_common.nixl.mover_thread import MoverThread
from kvbm_common.runtime.logs import OncePerKind
from kvbm_common.tier.machine import Machine
from kvbm_common.wire.local import Welcome

from kvbm_connectors.client.arena_reader import ArenaReader, reader_of
from kvbm_connectors.client.bounce_pool import BouncePool

if TYPE_CHECKING:
    from kvbm_common.cuda.reading import Gpu

RETRY_MS = 500
RETRY_MS_MAX = 30_000
"""Between attempts to reach the same arena."""
LEFT_MAX = 64
"""Moves that are remembered: a load names a life of seconds ago."""

log = logging.getLogger(__name__)


class Access(Enum):
    """The access to an arena, as a load from some life of the host tier finds it."""

    READY = "ready"
    COMING = "coming"
    FAILED = "failed"
    """The last attempt to reach this arena failed; another one will be made."""
    GONE = "gone"
    """A later life has begun."""


class ArenaState(Enum):
    """The states of the arena of the newest life."""

    UNKNOWN = "unknown"
    COMING = "coming"
    READY = "ready"
    FAILED = "failed"
    RETRYING = "retrying"
    CLOSED = "closed"


ARENA = Machine(
    "arena access",
    {
        (ArenaState.UNKNOWN, "welcomed"): ArenaState.COMING,
        (ArenaState.UNKNOWN, "closed"): ArenaState.CLOSED,
        (ArenaState.COMING, "welcomed"): ArenaState.COMING,
        (ArenaState.COMING, "back again"): ArenaState.READY,
        (ArenaState.COMING, "reached"): ArenaState.READY,
        (ArenaState.COMING, "other one reached"): ArenaState.COMING,
        (ArenaState.COMING, "failed"): ArenaState.FAILED,
        (ArenaState.COMING, "closed"): ArenaState.CLOSED,
        (ArenaState.READY, "welcomed"): ArenaState.COMING,
        (ArenaState.READY, "other one reached"): ArenaState.COMING,
        (ArenaState.READY, "closed"): ArenaState.CLOSED,
        (ArenaState.FAILED, "welcomed"): ArenaState.COMING,
        (ArenaState.FAILED, "back again"): ArenaState.READY,
        (ArenaState.FAILED, "retried"): ArenaState.RETRYING,
        (ArenaState.FAILED, "closed"): ArenaState.CLOSED,
        (ArenaState.RETRYING, "welcomed"): ArenaState.COMING,
        (ArenaState.RETRYING, "back again"): ArenaState.READY,
        (ArenaState.RETRYING, "reached"): ArenaState.READY,
        (ArenaState.RETRYING, "failed"): ArenaState.FAILED,
        (ArenaState.RETRYING, "closed"): ArenaState.CLOSED,
        (ArenaState.CLOSED, "closed"): ArenaState.CLOSED,
    },
)


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
        block_bytes: int,
        counts: Counter[str],
        on_change: Callable[[], None],
        gpu: Gpu | None = None,
    ) -> None:
        self._mover, self._wanted, self._gpu = mover, wanted, gpu
        self._counts, self._on_change = counts, on_change
        self._pool = BouncePool(mover, block_bytes=block_bytes)
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
        self._state = ArenaState.UNKNOWN
        """The state of the arena of the newest welcome."""
        self._failures = 0
        """Attempts for the newest welcome that have failed."""
        self._retry_at_ms = 0

    def attached(self) -> Attached | None:
        """Return the arena that can be read now, or None."""
        return self._attached

    def access(self, epoch: int) -> Access:
        """Return whether a load of this life of the host tier can be read, now or soon."""
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
            if self._state is ArenaState.READY:
                return Access.READY
            has_failed = self._state in (ArenaState.FAILED, ArenaState.RETRYING)
            return Access.FAILED if has_failed else Access.COMING

    def welcomed(self, welcome: Welcome) -> None:
        """Reach the arena that a host tier names, perhaps twice: every greeting is answered. After
        a failure the same welcome is another chance to reach it."""
        with self._lock:
            if self._state is ArenaState.CLOSED:
                return
            known = self._welcome
            if known is not None and known.epoch == welcome.epoch and not self._failures:
                return
            if known is not None and known.instance != welcome.instance:
                self._left.append(known.epoch)
            self._welcome, self._failures, self._is_leaving = welcome, 0, False
            self._move("back again" if self._has(welcome.epoch) else "welcomed")
            self._attacher.submit(self._attach, welcome)

    def leaving(self) -> None:
        """Note that another host tier is about to announce where its arena is."""
        with self._lock:
            self._is_leaving = True

    def _has(self, epoch: int) -> bool:
        return self._attached is not None and self._attached.welcome.epoch == epoch

    def tick(self, now_ms: int) -> None:
        """Try again what failed a while ago, and end what waits for a buffer too long."""
        self._pool.serve()
        with self._lock:
            if self._state is ArenaState.FAILED and now_ms >= self._retry_at_ms:
                assert self._welcome is not None, "failed to reach an arena that is not known"
                self._move("retried")
                self._attacher.submit(self._attach, self._welcome)

    def close(self) -> None:
        """Give the reader back: what it was asked for before ends first."""
        with self._lock:
            self._move("closed")
            attached, self._attached = self._attached, None
        if attached is not None:
            attached.reader.close()

    def wait_closed(self) -> None:
        """End the attaching thread. The mover is closed by now: nothing keeps it any more."""
        self._attacher.shutdown(wait=True, cancel_futures=True)

    # --- the attaching thread ---------------------------------------------------------------

    def _attach(self, welcome: Welcome) -> None:
        reader: ArenaReader | None = None
        try:
            if self._is_wanted(welcome):
                reader = reader_of(
                    welcome, self._mover, self._pool, wanted=self._wanted, gpu=self._gpu
                )
        except (KvbmError, TimeoutError) as error:
            if not self._is_closed:  # An engine that ends at once has closed the mover.
                self._limiter.warning("unreached", f"the arena cannot be reached: {error!r}")
        except Exception as error:  # Loads must not wait for this thread without end.
            log.exception("the arena cannot be attached")
            self._limiter.warning("unreached", f"the arena cannot be reached: {error!r}")
        self._ended(welcome, reader)
        self._on_change()

    @property
    def _is_closed(self) -> bool:
        with self._lock:
            return self._state is ArenaState.CLOSED

    def _is_wanted(self, welcome: Welcome) -> bool:
        with self._lock:
            return welcome is self._welcome and not self._has(welcome.epoch)

    def _ended(self, welcome: Welcome, reader: ArenaReader | None) -> None:
        previous: ArenaReader | None = None
        with self._lock:
            if self._state is ArenaState.CLOSED:
                previous = reader
            elif reader is not None:
                previous = self._attached.reader if self._attached is not None else None
                self._reached(welcome, reader)
            elif welcome is self._welcome and not self._has(welcome.epoch):
                self._failed()
        if previous is not None:
            previous.close()

    def _reached(self, welcome: Welcome, reader: ArenaReader) -> None:
        assert self._welcome is not None, "reached an arena that is not known"
        self._attached, self._failures = Attached(welcome, reader), 0
        self._move("reached" if self._has(self._welcome.epoch) else "other one reached")
        log.info("reading the arena of epoch %d by %s", welcome.epoch, reader.name)

    def _failed(self) -> None:
        self._move("failed")
        pause_ms = min(RETRY_MS << min(self._failures, 16), RETRY_MS_MAX)
        self._failures += 1
        self._retry_at_ms = _now_ms() + pause_ms
        self._counts["arena_failures"] += 1

    def _move(self, event: str) -> None:
        """Take the next state of the newest arena; the lock is held."""
        epoch = 0 if self._welcome is None else self._welcome.epoch
        self._state = ARENA.next(self._state, event, f"arena of epoch {epoch}")


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000
