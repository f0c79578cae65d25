"""The stack: NATS and one service of each kind, as child processes of this one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TextIO
from urllib.parse import urlsplit

from kvbm_common.config.settings import Settings
from kvbm_common.errors import ServiceFailed
from kvbm_common.nats.embedded_server import NatsServer
from kvbm_common.runtime.processes import LockTaken, dying_with_parent, free_port, take_lock
from kvbm_common.service.process import BAD_SETTINGS, make_runtime_dir

from kvbm_cli.layout import port_of, processes_of

NATS = "nats"
SERVICES = ("consolidator", "index", "host-tier", "disk-tier", "object-tier", "metrics")
READY_DEADLINE_S = 15.0
"""Five interpreters on a loaded two-core machine; usually it takes one to two seconds."""
ALLOCATE_S_PER_GB = 8.0
"""More for the arena, which is allocated first. Measured: 0.2 s per GB, and 4 s on a busy virtual
machine that gets the memory from its host at that moment."""
STOP_DEADLINE_S = 3.7
"""A service ends itself after 3 s at the latest; then it is killed."""
NATS_STOP_DEADLINE_S = 0.8
BACKOFF_S = (0.1, 0.3, 1.0, 3.0, 5.0)
"""Pauses before a crashed service is started again; the last one repeats."""
STEADY_S = 30.0
"""A service that lived so long starts with the shortest pause again."""

_log = logging.getLogger(__name__)


class ServiceProcess:
    """One service, started again after a crash if wanted."""

    def __init__(
        self, kind: str, *, environ: Mapping[str, str], restart: bool, log_path: Path | None
    ) -> None:
        self.kind = kind
        self.description = ""
        """What the service said when it was ready."""
        self.restarts = 0
        self._environ = environ
        self._restart = restart
        self._log_path = log_path
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[int] | None = None
        self._ready = asyncio.Event()
        self._was_ready = False
        """Who never served since `start` is not started again: the start itself has failed."""
        self._unwanted = asyncio.Event()

    @property
    def pid(self) -> int:
        """The process id; 0 when it does not run."""
        alive = self._process is not None and self._process.returncode is None
        return self._process.pid if alive and self._process else 0

    @property
    def is_ready(self) -> bool:
        """Whether it serves, as far as it said so."""
        return self._ready.is_set()

    def start(self) -> None:
        """Start it; `wait_ready` says when it serves."""
        assert self._task is None or self._task.done(), f"{self.kind} runs already"
        self._unwanted.clear()
        self._ready.clear()
        self._was_ready = False
        self._task = asyncio.create_task(self._supervise(), name=f"supervise {self.kind}")

    async def wait_ready(self, *, deadline_s: float) -> None:
        """Wait until it serves; raises ServiceFailed when it ends or takes too long."""
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
        crashes = 0
        while True:
            started_s = time.monotonic()
            code = await self._live()
            hopeless = code == BAD_SETTINGS or not self._was_ready
            if self._unwanted.is_set() or not self._restart or hopeless:
                return code
            crashes = 0 if time.monotonic() - started_s > STEADY_S else crashes + 1
            pause_s = BACKOFF_S[min(crashes, len(BACKOFF_S)) - 1]
            _log.warning("%s ended with code %s; again in %s s", self.kind, code, pause_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._unwanted.wait()
                    return code
            self.restarts += 1

    async def _live(self) -> int:
        """Run one life of the process, from start to exit code."""
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


def ready_deadline_s(kind: str, settings: Settings) -> float:
    """Return how long a service may take until it serves."""
    if not kind.startswith("host-tier"):
        return READY_DEADLINE_S
    arena_gb = (settings.cpu_cache_bytes or settings.staging_bytes) / 1e9
    return READY_DEADLINE_S + ALLOCATE_S_PER_GB * arena_gb


class Stack:
    """NATS and services; use it in `async with`, which waits until all are ready.

    Without `nats_url` it starts a nats-server of its own where the setting `nats_url` points to.
    With `log_dir` every service writes its log there, otherwise to our standard error. `close`
    leaves no process, socket or shared memory.
    """

    def __init__(
        self,
        overrides: Mapping[str, object] | None = None,
        *,
        state_dir: Path | None = None,
        services: Sequence[str] = SERVICES,
        nats_url: str | None = None,
        restart: bool = False,
        log_dir: Path | None = None,
    ) -> None:
        settings: dict[str, object] = dict(overrides or {})
        if state_dir is not None:
            settings["state_dir"] = state_dir
        if nats_url is not None:
            settings["nats_url"] = nats_url
        self.settings = Settings.load(overrides=settings)
        self._log_dir = log_dir
        self._owned_dir: Path | None = None
        self._nats = None if nats_url is not None else self._make_nats()
        environ = os.environ | self.settings.as_environ()
        processes = [
            (kind, name, own)
            for kind in services
            for name, own in processes_of(kind, self.settings).items()
        ]
        self.services = {
            name: ServiceProcess(
                kind,
                environ=environ | own | port_of(number, self.settings),
                restart=restart,
                log_path=log_dir / f"{name}.log" if log_dir else None,
            )
            for number, (kind, name, own) in enumerate(processes)
        }
        self._lock: TextIO | None = None

    @classmethod
    def private(
        cls,
        overrides: Mapping[str, object] | None = None,
        *,
        services: Sequence[str] = SERVICES,
        restart: bool = False,
    ) -> Stack:
        """Create a stack with a name, ports and directories of its own, which go with it."""
        directory = Path(tempfile.mkdtemp(prefix="kvbm-"))
        for name in ("run", "state", "disk", "logs"):
            (directory / name).mkdir(mode=0o700)
        own: dict[str, object] = {
            "host": f"private-{secrets.token_hex(4)}",
            "runtime_dir": directory / "run",
            "disk_cache_dirs": directory / "disk",
            "nats_url": f"nats://127.0.0.1:{free_port()}",
            "metrics_port": free_port(),
            "service_port": 0,
            "router_endpoint": "off",
            "router_replay_endpoint": "off",
        }
        stack = cls(
            own | dict(overrides or {}),
            state_dir=directory / "state",
            services=services,
            restart=restart,
            log_dir=directory / "logs",
        )
        stack._owned_dir = directory
        return stack

    @property
    def nats_url(self) -> str:
        """Return the address of NATS."""
        return self.settings.nats_url

    @property
    def log_dir(self) -> Path | None:
        """Where the services write their logs."""
        return self._log_dir

    @property
    def pids(self) -> dict[str, int]:
        """The processes that live, by kind; `nats` is the embedded server."""
        pids = {kind: service.pid for kind, service in self.services.items()}
        if self._nats is not None:
            pids[NATS] = self._nats.pid
        return {kind: pid for kind, pid in pids.items() if pid}

    async def __aenter__(self) -> Stack:
        try:
            await self.open()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def open(self) -> None:
        """Start everything, in parallel, and wait; raises ServiceFailed."""
        make_runtime_dir(self.settings)
        self._take_lock()
        self.settings.state_dir.mkdir(parents=True, exist_ok=True)
        if self._nats is not None:
            await self._nats.start()
        for service in self.services.values():
            service.start()
        # The first failure ends the start, however long the others may still take.
        await asyncio.gather(*(self.wait_ready(kind) for kind in self.services))

    async def close(self) -> None:
        """Stop everything and clean up. Takes less than 5 s."""
        await asyncio.gather(
            *(
                service.end(signal.SIGTERM, deadline_s=STOP_DEADLINE_S)
                for service in self.services.values()
            )
        )
        if self._nats is not None:
            await self._nats.stop(deadline_s=NATS_STOP_DEADLINE_S)
        if self._lock is not None:
            self._release_runtime_dir()
        if self._owned_dir is not None:
            shutil.rmtree(self._owned_dir, ignore_errors=True)

    async def kill(self, kind: str) -> None:
        """End one service (or `nats`) like a crash, with SIGKILL; it is not started again."""
        if kind == NATS:
            assert self._nats is not None, "NATS is not ours"
            self._nats.kill()
        else:
            await self.services[kind].end(signal.SIGKILL, deadline_s=1.0)

    async def start(self, kind: str) -> None:
        """Start one service (or `nats`) again, with the same settings."""
        if kind == NATS:
            assert self._nats is not None, "NATS is not ours"
            await self._nats.start()
        else:
            self.services[kind].start()

    async def wait_ready(self, kind: str, *, deadline_s: float | None = None) -> None:
        """Wait until one service serves; raises ServiceFailed."""
        if kind != NATS:
            deadline_s = deadline_s or ready_deadline_s(kind, self.settings)
            await self.services[kind].wait_ready(deadline_s=deadline_s)

    def _make_nats(self) -> NatsServer:
        url = urlsplit(self.settings.nats_url)
        return NatsServer(
            self.settings.state_dir / "nats",
            address=url.hostname or "127.0.0.1",
            port=url.port or 4222,
        )

    def _take_lock(self) -> None:
        """Take the lock of the runtime directory: a second stack would take its sockets away."""
        try:
            self._lock = take_lock(self.settings.runtime_dir / "stack.lock")
        except LockTaken as error:
            raise ServiceFailed(
                f"process {error.holder} runs a stack in {self.settings.runtime_dir}; "
                "set KVBM_RUNTIME_DIR to run another"
            ) from error

    def _release_runtime_dir(self) -> None:
        """Remove what killed services left behind, then let another stack in."""
        assert self._lock is not None
        runtime_dir = self.settings.runtime_dir
        leftovers = [runtime_dir / "stack.lock"]
        if "host-tier" in self.services:
            leftovers += self.settings.shm_dir.glob(f"kvbm-{self.settings.host}-*")
            path = Path(self.settings.host_tier_endpoint.removeprefix("ipc://"))
            leftovers += [path, Path(f"{path}.lock")]
            leftovers += path.parent.glob(f"{path.stem}-*{path.suffix}")
        if "consolidator" in self.services:
            socket = self.settings.consolidator_endpoint.removeprefix("ipc://")
            leftovers += [Path(socket), Path(f"{socket}.lock")]
        for path in leftovers:
            with contextlib.suppress(OSError):
                path.unlink()
        self._lock.close()
        self._lock = None
        with contextlib.suppress(OSError):
            runtime_dir.rmdir()
