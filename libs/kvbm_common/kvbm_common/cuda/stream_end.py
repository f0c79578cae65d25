"""The end of a stream: an event after the work that was put into it; polled, awaited or watched.

Work in a stream cannot be taken back. A caller that gives up waiting may not use its memory again
before the end, which may come much later: an engine's stream stands still while other ranks do.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from concurrent.futures import Future

from kvbm_common.cuda.runtime import CudaError, Runtime

log = logging.getLogger(__name__)

WAIT_DEADLINE_S = 10.0
"""Deadline of checksums, and of copies that are waited for."""
WAIT_POLL_S = 0.00005
LATE_POLL_S = 0.01
"""Between two looks at what has missed its deadline."""


class StreamEnd:
    """The end of what was in a stream at the last `mark`."""

    def __init__(self, runtime: Runtime, stream: int) -> None:
        """Create the event. Raises CudaError: do it before anything is put into the stream."""
        self._runtime, self._stream = runtime, stream
        self._event = runtime.event()
        self._is_recorded = False

    def mark(self) -> None:
        """Mark what is in the stream by now. An event that CUDA does not take would count as done:
        each look tries to record it again, after what is in the stream then."""
        self._is_recorded = False
        try:
            self._record()
        except CudaError as error:
            log.error("an event is not taken, and will be tried again: %s", error)

    def has_come(self) -> bool:
        """Return whether all that was marked is done. Raises CudaError: a broken context copies
        nothing any more."""
        if not self._is_recorded:
            with contextlib.suppress(CudaError):
                self._record()
        return self._runtime.is_done(self._event) and self._is_recorded

    def wait(self) -> bool:
        """Wait for it; return False if it has not come by the deadline. Raises CudaError."""
        give_up_s = time.monotonic() + WAIT_DEADLINE_S
        while not self.has_come():
            if time.monotonic() > give_up_s:
                return False
            time.sleep(WAIT_POLL_S)
        return True

    def watch(self) -> Future[None]:
        """Return a future that ends when it has come, however late, and then close it."""
        come: Future[None] = Future()
        watching = threading.Thread(target=self._watch, args=(come,), name="late", daemon=True)
        try:
            watching.start()
        except RuntimeError:  # The process may have no more threads: this one waits.
            self._watch(come)
        return come

    def close(self) -> None:
        """End the event, which may still be in the stream."""
        with contextlib.suppress(CudaError):  # A broken context has none.
            self._runtime.end_event(self._event)

    def _record(self) -> None:
        self._runtime.record(self._event, self._stream)
        self._is_recorded = True

    def _watch(self, come: Future[None]) -> None:
        with contextlib.suppress(CudaError):
            self._runtime.enter()
            while not self.has_come():
                time.sleep(LATE_POLL_S)
        self.close()
        come.set_result(None)
