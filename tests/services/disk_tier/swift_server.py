"""OpenStack Swift with its S3 interface: a store that is run in production, on one disk.

Debian's packages swift-proxy, swift-account, swift-container, swift-object and memcached have it.
Its servers give each other half a second to connect, and leave one alone that was late ten times.
Beside other tests that is too short, so both are set.
"""

from __future__ import annotations

import contextlib
import functools
import shutil
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import httpx
from kvbm_common.runtime.processes import dying_with_parent, free_port

from tests.services.disk_tier.s3_server import S3Server
from tests.waiting import wait_for

NEEDED = ("swift-proxy-server", "swift-ring-builder", "memcached")
START_S = 120.0

BACK_END = """[DEFAULT]
bind_ip = 127.0.0.1
bind_port = {port}
swift_dir = {directory}
devices = {directory}/devices
mount_check = false
workers = 0
user = root
log_level = WARNING
[pipeline:main]
pipeline = {kind}-server
[app:{kind}-server]
use = egg:swift#{kind}
conn_timeout = 30
node_timeout = 30
[{kind}-replicator]
[{kind}-updater]
[{kind}-auditor]
"""
PROXY = """[DEFAULT]
bind_ip = 127.0.0.1
bind_port = {port}
swift_dir = {directory}
workers = 0
user = root
log_level = WARNING
[pipeline:main]
pipeline = catch_errors gatekeeper healthcheck cache listing_formats bulk s3api tempauth slo
    proxy-server
[app:proxy-server]
use = egg:swift#proxy
account_autocreate = true
conn_timeout = 30
node_timeout = 30
error_suppression_limit = 1000000
[filter:catch_errors]
use = egg:swift#catch_errors
[filter:gatekeeper]
use = egg:swift#gatekeeper
[filter:healthcheck]
use = egg:swift#healthcheck
[filter:cache]
use = egg:swift#memcache
memcache_servers = 127.0.0.1:{cache_port}
[filter:listing_formats]
use = egg:swift#listing_formats
[filter:bulk]
use = egg:swift#bulk
[filter:s3api]
use = egg:swift#s3api
location = us-east-1
[filter:slo]
use = egg:swift#slo
[filter:tempauth]
use = egg:swift#tempauth
user_key_user = secret .admin
"""


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 5):
        return True
    return False


def is_installed() -> bool:
    """Whether this machine has Swift."""
    return all(shutil.which(name) for name in NEEDED)


class SwiftServer(S3Server):
    """One proxy, one server of each kind, one device."""

    access_key = "key:user"

    def __init__(self, directory: Path) -> None:
        super().__init__(free_port(), directory / "log")
        self._directory = directory
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Build the rings, start everything, and wait until it answers."""
        ports = {kind: free_port() for kind in ("account", "container", "object")}
        (self._directory / "devices/sda").mkdir(parents=True)
        for kind, port in ports.items():
            self._ring(kind, port)
            text = BACK_END.format(kind=kind, port=port, directory=self._directory)
            self._run(f"swift-{kind}-server", self._config(kind, text))
        for port in ports.values():
            self._wait_until(functools.partial(_listens, port))
        cache_port = free_port()
        self._run("memcached", "-u", "root", "-l", "127.0.0.1", "-p", str(cache_port))
        text = PROXY.format(port=self.port, directory=self._directory, cache_port=cache_port)
        self._run("swift-proxy-server", self._config("proxy", text))
        self._wait_until(self._answers)

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait for a part of the start. The proxy is the last: what it asks must listen by then."""
        wait_for(
            condition,
            lambda: f"Swift has not started: {(self._directory / 'log').read_text()[-2000:]}",
            deadline_s=START_S,
            poll_s=0.1,
        )

    def _ring(self, kind: str, port: int) -> None:
        builder = str(self._directory / f"{kind}.builder")
        for step in (
            ["create", "4", "1", "1"],
            ["add", f"r1z1-127.0.0.1:{port}/sda", "1"],
            ["rebalance"],
        ):
            command = ["swift-ring-builder", builder, *step]
            subprocess.run(command, check=True, capture_output=True, timeout=60)

    def _config(self, kind: str, text: str) -> str:
        path = self._directory / f"{kind}.conf"
        path.write_text(text)
        return str(path)

    def _run(self, *command: str) -> None:
        with (self._directory / "log").open("ab") as log:
            self._processes.append(
                subprocess.Popen(command, stdout=log, stderr=log, preexec_fn=dying_with_parent())
            )

    def _answers(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{self.endpoint}/healthcheck", trust_env=False).is_success
        return False

    def kill(self) -> None:
        """End all of it."""
        for process in self._processes:
            process.kill()
            process.wait(10)
        self._processes.clear()
