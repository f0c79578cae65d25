"""One service of a stack: a child process, which is restarted after a crash if wanted."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from kvbm_common.errors import ServiceFailed
from kvbm_common.runtime.processes import dying_with_parent
from kvbm_common.service.process import BAD_SETTINGS

BACKOFF_S = (0.1, 0.3, 1.0, 3.0, 5.0)
"""Pauses before a crashed service is restarted; the last one repeats."""
STEADY_S = 30.0
"""A service that has run for so long is restarted after the shortest pause again."""
NOT_STARTED = 126
"""The exit code of a process that could not be started: no memory, process or descriptor left."""

_log = logging.getLogger(__name__)


class Pauses:
    """The pauses before a crashed process is restarted."""

    def __init__(self) -> None:
        self._crashes = 0
        self.begin()

    def begin(self) -> None:
        """Note that the process is started."""
        self._started_s = time.monotonic()

    def next_s(self) -> float:
        """Note that the process has ended; returns how long to wait before the next start."""
        is_steady = time.monotonic() - self._started_s > STEADY_S
        self._crashes = 1 if is_steady else self._crashes + 1
        return BACKOFF_S[min(self._crashes, len(BACKOFF_S)) - 1]


class ServiceProcess:
    """The process of one service, and the task that restarts it."""

    def __init__(
        self, kind: str, *, environ: Mapping[str, str], restart: bool, log_path: Path | None
    ) -> None:
        self.kind = kind
        self.description = ""
        """The service's own words in the line that says that it is ready."""
        self._environ = environ
        self._restart = restart
        self._log_path = log_path
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[int] | None = None
        self._ready = asyncio.Event()
        self._was_ready = False
        """True if it has served since `start`: if not, the start itself failed, and there is no
        restart."""
        self._unwanted = asyncio.Event()

    @property
    def pid(self) -> int:
        """The process id; 0 when it does not run."""
        alive = self._process is not None and self._process.returncode is None
        return self._process.pid if alive and self._process else 0

    def start(self) -> None:
        """Start the service; `wait_ready` waits until it serves."""
        assert self._task is None or self._task.done(), f"{self.kind} runs already"
        self._unwanted.clear()
        self._ready.clear()
        self._was_ready = False
        self._task = asyncio.create_task(self._supervise(), name=f"supervise {self.kind}")

    async def wait_ready(self, *, deadline_s: float) -> None:
        """Wait until the service serves; raises ServiceFailed when it ends or takes too long."""
        assert self._task is not None, f"{self.kind} was not started"
        ready = asyncio.create_task(self._ready.wait())
        await asyncio.wait(
            {ready, self._task}, timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED
        )
        ready.cancel()
        if not self._ready.is_set():
            how = f"is not ready after {deadline_s} s"
            if self._task.done():
                how = f"ended with code {self._task.result()}"
            raise ServiceFailed(f"{self.kind} {how}{self._log_tail()}")

    async def end(self, signal_number: signal.Signals, *, deadline_s: float) -> None:
        """Send a signal and wait for the end, by SIGKILL after the deadline; no restart."""
        self._unwanted.set()
        if self._task is None:
            return
        self._send(signal_number)
        done, _ = await asyncio.wait({self._task}, timeout=deadline_s)
        if not done:
            self._send(signal.SIGKILL)
            await asyncio.wait({self._task})

    def _send(self, signal_number: signal.Signals) -> None:
        if self.pid and self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal_number)

    async def _supervise(self) -> int:
        pauses = Pauses()
        while True:
            pauses.begin()
            try:
                code = await self._live()
            except OSError as error:
                _log.warning("%s cannot be started: %s", self.kind, error)
                code = NOT_STARTED
            hopeless = code == BAD_SETTINGS or not self._was_ready
            if self._unwanted.is_set() or not self._restart or hopeless:
                return code
            pause_s = pauses.next_s()
            _log.warning("%s ended with code %s; restarting in %s s", self.kind, code, pause_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._unwanted.wait()
                    return code

    async def _live(self) -> int:
        """Run the process once, from its start to its exit code."""
        with contextlib.ExitStack() as files:
            log = files.enter_context(self._log_path.open("ab")) if self._log_path else None
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "kvbm_cli.main",
                "serve",
                self.kind,
                env=dict(self._environ),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                preexec_fn=dying_with_parent(),
            )
        if self._unwanted.is_set():
            self._send(signal.SIGKILL)
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            self._take_line(line.decode(errors="replace").rstrip())
        code = await self._process.wait()
        self._ready.clear()
        return code

    def _take_line(self, line: str) -> None:
        prefix = f"ready {self.kind}"
        if line.startswith(prefix):
            self.description = line.removeprefix(prefix).strip()
            self._was_ready = True
            self._ready.set()
        else:
            _log.info("%s: %s", self.kind, line)

    def _log_tail(self) -> str:
        if self._log_path is None or not self._log_path.exists():
            return ""
        return ": …" + self._log_path.read_text(errors="replace")[-2000:]
