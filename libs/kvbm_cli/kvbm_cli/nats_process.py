"""The NATS of a stack: an embedded nats-server, which is restarted after a crash if wanted."""

from __future__ import annotations

import asyncio
import logging

from kvbm_common.errors import KvbmError
from kvbm_common.nats.embedded_server import NatsServer

from kvbm_cli.service_process import Pauses

LOOK_S = 0.5
"""How often the supervisor looks whether nats-server runs: services work without it meanwhile."""

_log = logging.getLogger(__name__)


class NatsProcess:
    """One nats-server: with the same port, store and users in all its lives."""

    def __init__(self, server: NatsServer, *, restart: bool) -> None:
        self.server = server
        self.restarts = 0
        self._restart = restart
        self._task: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        """The process id; 0 when it does not run."""
        return self.server.pid

    async def start(self) -> None:
        """Start and wait until it answers; raises ServiceFailed."""
        await self.server.start()
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
            log = self.server.directory / "nats-server.log"
            _log.warning("nats-server has ended; restarting in %s s; its log is %s", pause_s, log)
            await asyncio.sleep(pause_s)
            pauses.begin()
            try:
                await self.server.start()
            except (OSError, KvbmError) as error:
                _log.warning("nats-server cannot be started: %s", error)
            else:
                self.restarts += 1
