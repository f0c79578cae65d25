"""Calls that block, in a few daemon threads: a store that hangs holds up neither loop nor end.

A call has a deadline, whatever it is doing. A thread that goes on after it keeps its turn, so no
more than the few of them ever hang; the others' callers are told that there is no answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

THREADS = 4
T = TypeVar("T")


class Calls:
    """The turns of one store, for one event loop."""

    def __init__(
        self, interrupt: Callable[[int], None] | None = None, threads: int = THREADS
    ) -> None:
        """Start without threads; `interrupt` gets the thread whose time is over."""
        self._turns = asyncio.Semaphore(threads)
        self._interrupt = interrupt

    async def run(self, call: Callable[[], T], *, deadline_s: float) -> T:
        """Run a call in a thread; raises what it raises, and TimeoutError.

        Where no thread can be started, that is an OSError: a container has no process left.
        """
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(call())
            except BaseException as error:  # Whatever it is, the caller gets it.
                done.set_exception(error)
            finally:
                with contextlib.suppress(RuntimeError):  # The loop is closed: no task waits.
                    loop.call_soon_threadsafe(self._turns.release)

        loop = asyncio.get_running_loop()
        thread = threading.Thread(target=run, name="object store", daemon=True)
        try:
            async with asyncio.timeout(deadline_s):
                await self._turns.acquire()
                done.set_running_or_notify_cancel()
                self._start(thread)
                return await asyncio.wrap_future(done)
        except TimeoutError:
            if self._interrupt is not None and thread.ident is not None and not done.done():
                self._interrupt(thread.ident)
            raise

    def _start(self, thread: threading.Thread) -> None:
        try:
            thread.start()
        except RuntimeError as error:
            self._turns.release()
            raise OSError(errno.EAGAIN, str(error)) from error
