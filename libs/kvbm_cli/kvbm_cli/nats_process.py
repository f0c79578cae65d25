"""The NATS of a stack: an embedded nats-server, which is restarted after a crash if wanted."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

from kvbm_common.errors import KvbmError, ServiceFailed
from kvbm_common.nats.embedded_server import NatsServer

from kvbm_cli.service_process import Pauses

LOOK_S = 0.5
"""The pause between two looks whether nats-server runs: services work without it meanwhile."""
STREAMS_PAUSE_S = 5.0
"""The pause before streams that could not be made are tried again."""

_log = logging.getLogger(__name__)


class NatsProcess:
    """One nats-server: with the same port, store and users in all its lives.

    `make_streams` is called in each life: a store may be lost with a life.
    """

    def __init__(
        self, server: NatsServer, *, restart: bool, make_streams: Callable[[], Awaitable[None]]
    ) -> None:
        self.server = server
        self._make_streams = make_streams
        self._restart = restart
        self._task: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        """The process id; 0 when it does not run."""
        return self.server.pid

    async def start(self) -> None:
        """Start, and wait until it answers and has its streams.

        Raises ServiceFailed, and what `make_streams` raises.
        """
        await self.server.start()
        await self._while_it_runs(self._make_streams())
        if self._restart:
            self._task = asyncio.create_task(self._supervise(), name="supervise nats")

    async def kill(self) -> None:
        """Kill nats-server with SIGKILL, like a crash, and do not restart it."""
        await self._let_be()
        self.server.kill()

    async def stop(self, *, deadline_s: float) -> None:
        """Stop nats-server, by force after the deadline. Its store stays."""
        await self._let_be()
        await self.server.stop(deadline_s=deadline_s)

    async def _let_be(self) -> None:
        """End the supervision, and a restart that it may have begun."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
            self._task = None

    async def _supervise(self) -> None:
        pauses = Pauses()
        while True:
            while self.server.running:  # noqa: ASYNC110 - a child without a watcher has no event.
                await asyncio.sleep(LOOK_S)
            pause_s = pauses.next_s()
            _log.warning(
                "nats-server has ended; restarting in %s s; its log is %s", pause_s, self._log_path
            )
            await asyncio.sleep(pause_s)
            pauses.begin()
            try:
                await self.server.start()
            except (OSError, KvbmError) as error:
                _log.warning("nats-server cannot be started: %s", error)
                self.server.kill()
                continue
            with contextlib.suppress(ServiceFailed):  # The loop logs its end.
                await self._while_it_runs(self._make_at_last())

    @property
    def _log_path(self) -> Path:
        return self.server.directory / "nats-server.log"

    async def _make_at_last(self) -> None:
        """Have the streams made, again after each failure: the server serves what it has."""
        while True:
            try:
                await self._make_streams()
            except (OSError, KvbmError) as error:
                _log.warning(
                    "nats-server runs, but its streams could not be made: %s; again in %s s",
                    error,
                    STREAMS_PAUSE_S,
                )
            else:
                return
            await asyncio.sleep(STREAMS_PAUSE_S)

    async def _while_it_runs(self, work: Awaitable[None]) -> None:
        """Wait for work on the server; raises ServiceFailed when the server ends before it.

        A connection would be tried until its deadline, which a start has long.
        """
        task = asyncio.ensure_future(work)
        try:
            while self.server.running and not task.done():
                await asyncio.wait({task}, timeout=LOOK_S)
        finally:
            was_late = not task.done()
            task.cancel()
            await asyncio.wait({task})
        if was_late:
            raise ServiceFailed(
                f"nats-server ended before it had its streams; its log is {self._log_path}"
            )
        task.result()
