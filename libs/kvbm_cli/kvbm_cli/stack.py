"""The stack: NATS and one service of each kind, as child processes of this one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TextIO
from urllib.parse import urlsplit

from kvbm_common.access.addresses import is_loopback
from kvbm_common.access.nats_access import (
    PORT,
    NatsAccess,
    has_credentials,
    nats_access,
    stream_limits,
)
from kvbm_common.access.roles import ADMIN
from kvbm_common.access.secret_files import make_private_directory
from kvbm_common.config.schema import redacted
from kvbm_common.config.secret_variables import environ_for
from kvbm_common.config.settings import Settings
from kvbm_common.errors import ConfigError, ServiceFailed
from kvbm_common.memory.arena import remove_stale
from kvbm_common.nats.bus import Bus
from kvbm_common.nats.embedded_server import NatsServer
from kvbm_common.nats.stream_setup import set_up_streams
from kvbm_common.runtime.processes import LockTaken, free_port, take_lock
from kvbm_common.service.process import make_runtime_dir

from kvbm_cli.creds.embedded import authorization_of
from kvbm_cli.nats_process import NatsProcess
from kvbm_cli.private_directory import PrivateDirectory, sweep
from kvbm_cli.service_process import ServiceProcess
from kvbm_cli.stack_processes import all_instances, port_of, processes_of

NATS = "nats"
SERVICES = ("consolidator", "index", "host-tier", "disk-tier", "object-tier", "metrics")
READY_DEADLINE_S = 60.0
"""The seconds that a service may take to start. Two are usual; a machine with ten busy processes
for two cores took more than 15. A service that ends is noticed at once."""
ALLOCATE_S_PER_GB = 8.0
"""Additional time for the arena, which is allocated first. Measured: 0.2 s per GB, and 4 s on a
busy virtual machine that gets the memory from its host at that moment."""
STOP_DEADLINE_S = 3.7
"""A service ends itself after 3 s at the latest; then it is killed."""
NATS_STOP_DEADLINE_S = 0.8
LOOPBACK = "127.0.0.1"
OF_ITS_OWN = "KVBM_RUNTIME_DIR, KVBM_STATE_DIR, KVBM_NATS_URL, KVBM_HOST and DYN_KVBM_METRICS_PORT"
"""Settings that a second stack on a machine does not share with the first."""


def environ_of(kind: str, settings: Settings) -> dict[str, str]:
    """Return the variables of a service: those of this process without secrets of others."""
    return environ_for(kind, os.environ) | settings.as_environ(kind)


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
        self._owned: PrivateDirectory | None = None
        self._nats = None if nats_url is not None else self._make_nats(restart=restart)
        processes = [
            (kind, name, own)
            for kind in services
            for name, own in processes_of(kind, self.settings).items()
        ]
        self.services = {
            name: ServiceProcess(
                kind,
                environ=environ_of(kind, self.settings) | own | port_of(number, self.settings),
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
        nats_url: str | None = None,
        restart: bool = False,
    ) -> Stack:
        """Create a stack with a name, ports and directories of its own, which are removed with it.

        It has a NATS of its own, unless `nats_url` names another.
        """
        directory = PrivateDirectory()
        own: dict[str, object] = {
            "host": directory.host,
            "runtime_dir": directory.path / "run",
            "disk_cache_dirs": directory.path / "disk",
            "nats_url": f"nats://127.0.0.1:{free_port()}",
            "metrics_port": free_port(),
            "service_port": 0,
            "router_endpoint": "off",
            "router_replay_endpoint": "off",
        }
        try:
            stack = cls(
                own | dict(overrides or {}),
                state_dir=directory.path / "state",
                services=services,
                nats_url=nats_url,
                restart=restart,
                log_dir=directory.path / "logs",
            )
        except BaseException:
            directory.remove()
            raise
        stack._owned = directory
        sweep(stack.settings.shm_dir)
        return stack

    @property
    def nats_url(self) -> str:
        """Return the address of NATS, for people."""
        return redacted(self.settings.nats_url)

    @property
    def admin(self) -> NatsAccess:
        """Return how the role admin reaches NATS; raises ConfigError."""
        return nats_access(self.settings, ADMIN)

    @property
    def log_dir(self) -> Path | None:
        """Return the directory of the services' logs."""
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
        make_private_directory(self.settings.state_dir, "KVBM_STATE_DIR")
        await self._start_nats()
        for service in self.services.values():
            service.start()
        # The first failure ends the start, however long the others may still take.
        await asyncio.gather(*(self.wait_ready(kind) for kind in self.services))

    async def close(self, *, deadline_s: float = STOP_DEADLINE_S) -> None:
        """Stop everything and clean up; by default it takes less than 5 s."""
        ends = (
            service.end(signal.SIGTERM, deadline_s=deadline_s) for service in self.services.values()
        )
        try:
            await asyncio.gather(*ends)
            if self._nats is not None:
                await self._nats.stop(deadline_s=NATS_STOP_DEADLINE_S)
        finally:  # Where this is broken off: the processes end with this one.
            if self._lock is not None:
                self._release_runtime_dir()
            if self._owned is not None:
                self._owned.remove()

    def keep_logs(self) -> Path | None:
        """Keep a private stack's logs at its end; returns where. Other stacks keep theirs."""
        if self._owned is None:
            return None
        self._log_dir = self._owned.keep_logs()
        return self._log_dir

    async def kill(self, kind: str) -> None:
        """Kill one service (or `nats`) with SIGKILL, like a crash, and do not restart it."""
        if kind == NATS:
            assert self._nats is not None, "NATS is not ours"
            await self._nats.kill()
        else:
            await self.services[kind].end(signal.SIGKILL, deadline_s=1.0)

    async def start(self, kind: str) -> None:
        """Start one service (or `nats`) again, with the same settings."""
        if kind == NATS:
            assert self._nats is not None, "NATS is not ours"
            await self._start_nats()
        else:
            self.services[kind].start()

    async def wait_ready(self, kind: str, *, deadline_s: float | None = None) -> None:
        """Wait until one service serves; raises ServiceFailed."""
        if kind != NATS:
            deadline_s = deadline_s or ready_deadline_s(kind, self.settings)
            await self.services[kind].wait_ready(deadline_s=deadline_s)

    async def _start_nats(self) -> None:
        """Start our NATS, if it is ours, and have its streams made, if we may."""
        if self._nats is not None:
            await self._take_nats_directory(self._nats.server)
            users = authorization_of(
                self.settings.creds_dir,
                host=self.settings.host,
                instances=all_instances(self.settings),
                kinds=[service.kind for service in self.services.values()],
                partitions=self.settings.index_partitions,
            )
            self._nats.server.more = {"authorization": users}
            await self._nats.start()
        elif has_credentials(self.settings, ADMIN):
            await self._make_streams()
        else:
            self._leave_streams()

    async def _make_streams(self) -> None:
        access = self.admin
        if access.guarded:
            bus = await Bus.connect(access, "kvbm-up", deadline_s=READY_DEADLINE_S)
            try:
                await set_up_streams(bus)
            finally:
                await bus.close()

    def _leave_streams(self) -> None:
        """Leave the streams to where the admin's credential is; raises ConfigError for a service.

        A further host has credentials of its services alone. One that finds no stream says so.
        """
        for kind in {service.kind for service in self.services.values()}:
            nats_access(self.settings, kind)

    def _make_nats(self, *, restart: bool) -> NatsProcess:
        """Make the server at the address of the settings; raises ConfigError for a remote one."""
        url = urlsplit(self.settings.nats_url)
        address = url.hostname or LOOPBACK
        if not (is_loopback(address) or self.settings.nats_open):
            accepted = (
                "an address of loopback: the NATS of `kvbm up` has no TLS. Run a nats-server of "
                "yours (kvbm nats-config), or set KVBM_NATS_OPEN=true where the network is KVBM's "
                "alone"
            )
            raise ConfigError("KVBM_NATS_URL", self.nats_url, accepted)
        server = NatsServer(
            self.settings.state_dir / "nats",
            address=address,
            port=url.port or PORT,
            store_bytes=stream_limits(self.settings).store_bytes,
        )
        return NatsProcess(server, restart=restart, make_streams=self._make_streams)

    def _take_lock(self) -> None:
        """Take the lock of the runtime directory: a second stack would take its sockets away."""
        try:
            self._lock = take_lock(self.settings.runtime_dir / "stack.lock")
        except LockTaken as error:
            raise ServiceFailed(
                f"process {error.holder} runs a stack in {self.settings.runtime_dir}; "
                f"set {OF_ITS_OWN} to run another"
            ) from error

    async def _take_nats_directory(self, server: NatsServer) -> None:
        """Lock the store of NATS before its credentials are written; raises ServiceFailed."""
        try:
            await server.take_directory()
        except LockTaken as error:
            raise ServiceFailed(
                f"process {error.holder} runs NATS in {server.directory}; "
                "set KVBM_STATE_DIR and KVBM_NATS_URL as well to run another stack"
            ) from error

    def _router_sockets(self) -> list[Path]:
        """Return the sockets for routers in the locked directory: those of a killed consolidator.

        Elsewhere they may be another stack's.
        """
        names = [
            Path(endpoint.removeprefix("ipc://")).name
            for endpoint in (self.settings.router_endpoint, self.settings.router_replay_endpoint)
            if endpoint.startswith(f"ipc://{self.settings.runtime_dir}/")
        ]
        return [
            path
            for name in names
            for pattern in (name, f"{name}_dp[0-9]*")
            for path in self.settings.runtime_dir.glob(pattern)
        ]

    def _release_runtime_dir(self) -> None:
        """Remove what killed services left behind, then let another stack in."""
        assert self._lock is not None
        runtime_dir = self.settings.runtime_dir
        leftovers: list[Path] = []
        if "host-tier" in self.services:
            # Arenas of another stack on a host of the same name are locked, and stay.
            remove_stale(self.settings.shm_dir, f"kvbm-{self.settings.host}-")
            path = Path(self.settings.host_tier_endpoint.removeprefix("ipc://"))
            leftovers += [path, Path(f"{path}.lock")]
            leftovers += path.parent.glob(f"{path.stem}-*{path.suffix}")
        if "consolidator" in self.services:
            socket = self.settings.consolidator_endpoint.removeprefix("ipc://")
            leftovers += [Path(socket), Path(f"{socket}.lock")]
            leftovers += self._router_sockets()
        # Its lock goes last: without it another stack may begin here.
        for path in (*leftovers, runtime_dir / "stack.lock"):
            with contextlib.suppress(OSError):
                path.unlink()
        self._lock.close()
        self._lock = None
        with contextlib.suppress(OSError):
            runtime_dir.rmdir()
