"""A real etcd, of one member or of three, as child processes on free ports."""

from __future__ import annotations

import asyncio
import shutil
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import httpx
import pytest
from kvbm_common.runtime.processes import dying_with_parent, free_port

from tests.waiting import ask_until

START_DEADLINE_S = 20.0
"""It answers after a few tenths of a second."""
HEARTBEAT_MS = 10
ELECTION_MS = 50
"""A lease lasts at least one and a half elections, and whole seconds: 1 s, instead of 2."""
CLUSTER_TIMES = (100, 1000)
"""Heartbeat and election in ms, as etcd has them by default."""


class EtcdServer:
    """One etcd. Its ports stay the same from start to start."""

    def __init__(self, directory: Path, *, tls: Path | None = None, name: str = "test") -> None:
        """Prepare a server. `tls`: a directory with ca.pem, server.pem and server.key.

        With TLS only clients with a certificate of that authority are served.
        """
        self.name = name
        self.times_ms = (HEARTBEAT_MS, ELECTION_MS)
        self.members = [self]
        self.directory = directory
        self.tls = tls
        self._client_port = free_port("127.0.0.1")
        self._peer_port = free_port("127.0.0.1")
        self._health_port = free_port("127.0.0.1")
        self._process: subprocess.Popen[bytes] | None = None
        self.headers: dict[str, str] = {}
        """Of what an administrator does: a token, where etcd wants one."""

    @property
    def server(self) -> str:
        """Where it listens, as HOST:PORT."""
        return f"127.0.0.1:{self._client_port}"

    @property
    def _peer(self) -> str:
        return f"http://127.0.0.1:{self._peer_port}"

    async def start(self) -> None:
        """Start and wait until it serves; raises AssertionError with the end of its log.

        While it is away, a connection of somebody else's may have its port for an instant.
        """
        self._process = self._spawn()

        async def serves() -> bool:
            if await self._answers():
                return True
            if self._process is not None and self._process.poll() is not None:
                assert "address already in use" in self._log_tail(), self._log_tail()
                self._process = self._spawn()
            return False

        try:
            await ask_until(serves, deadline_s=START_DEADLINE_S)
        except TimeoutError:
            raise AssertionError(self._log_tail()) from None

    def _log_tail(self) -> str:
        return (self.directory / "log").read_text(errors="replace")[-500:]

    def kill(self) -> None:
        """End it like a crash, and wait for its death."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        """From now on it keeps its connections and answers nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """It goes on where it stood; its clock did not stand."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def empty(self) -> None:
        """Lose all data. Only while it does not run."""
        assert self._process is None
        shutil.rmtree(self.directory / "data")

    async def administer(self, call: str, body: Mapping[str, object]) -> dict[str, Any]:
        """What an administrator does, by the JSON gateway; keys and values are base64."""
        assert self.tls is None
        async with httpx.AsyncClient(trust_env=False, timeout=10) as client:
            answer = await client.post(
                f"http://{self.server}/v3/{call}", json=body, headers=self.headers
            )
        found: dict[str, Any] = answer.raise_for_status().json()
        return found

    def _spawn(self) -> subprocess.Popen[bytes]:
        self.directory.mkdir(parents=True, exist_ok=True)
        with (self.directory / "log").open("ab") as log:
            return subprocess.Popen(
                self._command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=dying_with_parent(),
            )

    def _command(self) -> list[str]:
        client = f"{'https' if self.tls else 'http'}://{self.server}"
        peer = self._peer
        heartbeat_ms, election_ms = self.times_ms
        members = ",".join(f"{one.name}={one._peer}" for one in self.members)
        return [
            find_etcd(),
            *("--name", self.name, "--data-dir", str(self.directory / "data")),
            *("--listen-client-urls", client, "--advertise-client-urls", client),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
            *("--initial-cluster", members),
            *("--heartbeat-interval", str(heartbeat_ms)),
            *("--election-timeout", str(election_ms)),
            *("--listen-metrics-urls", f"http://127.0.0.1:{self._health_port}"),
            *self._tls_arguments(),
        ]

    def _tls_arguments(self) -> list[str]:
        if self.tls is None:
            return []
        return [
            *("--cert-file", str(self.tls / "server.pem"), "--key-file",
              str(self.tls / "server.key")),
            *("--client-cert-auth", "--trusted-ca-file", str(self.tls / "ca.pem")),
        ]  # fmt: skip

    async def leads(self) -> bool:
        """Whether it leads its cluster, by its own account."""
        status = await self.administer("maintenance/status", {})
        return bool(status["leader"] == status["header"]["member_id"])

    async def version(self) -> tuple[int, ...]:
        """Return which etcd it is."""
        status = await self.administer("maintenance/status", {})
        return tuple(map(int, status["version"].split(".")))

    async def _answers(self) -> bool:
        """Its page /health says whether it has a leader."""
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._health_port)
        except OSError:
            return False
        try:
            async with asyncio.timeout(1.0):
                writer.write(b"GET /health HTTP/1.0\r\n\r\n")
                return b'"health":"true"' in await reader.read()
        except (OSError, TimeoutError):
            return False
        finally:
            writer.close()


class EtcdCluster:
    """Three members; any one of them may be lost."""

    def __init__(self, directory: Path) -> None:
        names = ("a", "b", "c")
        self.members = [EtcdServer(directory / name, name=name) for name in names]
        for member in self.members:
            member.members, member.times_ms = self.members, CLUSTER_TIMES

    @property
    def url(self) -> str:
        """All members, as the setting of the registry has them."""
        return "etcd://" + ",".join(member.server for member in self.members)

    async def __aenter__(self) -> Self:
        try:
            await asyncio.gather(*(member.start() for member in self.members))
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        for member in self.members:
            member.kill()

    async def leader(self) -> EtcdServer:
        """The member that leads."""
        [found] = [member for member in self.members if await member.leads()]
        return found


def find_etcd() -> str:
    """The path of etcd; skips the test where it is not installed."""
    found = shutil.which("etcd")
    if found is None:
        pytest.skip("etcd is not installed (Debian: etcd-server)")
    return found
