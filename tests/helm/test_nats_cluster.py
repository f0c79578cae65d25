"""Three nats-servers with the chart's configuration, and clients with the files of each container.

Servers and clients are this machine's: names of pods become addresses of loopback, and nothing else
of what helm has rendered and `kvbm kube-secrets` has made changes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from kvbm_cli.container import environ_of_host
from kvbm_common.access.nats_access import nats_access
from kvbm_common.access.roles import ADMIN
from kvbm_common.config.settings import Settings
from kvbm_common.errors import KvbmError
from kvbm_common.nats.bus import Bus
from kvbm_common.nats.embedded_server import find_binary
from kvbm_common.nats.jetstream import call_api
from kvbm_common.nats.stream_setup import set_up_streams
from kvbm_common.runtime.processes import dying_with_parent, free_port

from tests.helm.chart import Document, Pod, environ_of, of_kind, pod, pods, render
from tests.helm.mounts import MOUNTS, NODE, mounted_files, secrets, write_mounted
from tests.waiting import ask_until, wait_for

DEADLINE_S = 30.0
PORTS = {4222: "clients", 6222: "routes", 8222: "monitor"}


class Server:
    """One pod of the StatefulSet, as a process."""

    def __init__(self, name: str, directory: Path) -> None:
        self.name = name
        self.directory = directory
        self.ports = {number: free_port() for number in PORTS}
        self.log = directory / "log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, text: str) -> None:
        """Start nats-server with a configuration at /etc/nats.conf."""
        (self.directory / "nats.conf").write_text(text)
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [find_binary(), "--config", str(self.directory / "nats.conf")],
                env=os.environ | {"POD_NAME": self.name}, preexec_fn=dying_with_parent(),
                stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def stop(self) -> None:
        """End the process at once: JetStream is safe against that."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(DEADLINE_S)

    def reload(self) -> None:
        """Have it read its configuration again, as `nats-server --signal reload=1` does."""
        assert self._process is not None
        self._process.send_signal(signal.SIGHUP)

    def ask(self, path: str) -> Any:
        """Ask the monitor as a probe does; None where it does not answer, or not with 200."""
        try:
            url = f"http://127.0.0.1:{self.ports[8222]}{path}"
            with urllib.request.urlopen(url, timeout=5) as answer:
                return json.load(answer)
        except OSError:
            return None

    def wait_routes(self, names: set[str]) -> None:
        """Wait until it has routes to these servers."""
        wait_for(lambda: self.routes >= names, f"routes of {self.name}", deadline_s=DEADLINE_S)

    def wait_answer(self, path: str) -> None:
        """Wait until it answers with 200."""
        wait_for(
            lambda: self.ask(path) is not None, f"{path} of {self.name}", deadline_s=DEADLINE_S
        )

    @property
    def routes(self) -> set[str]:
        """The servers that it has routes to."""
        found = self.ask("/routez") or {"routes": []}
        return {route["remote_name"] for route in found["routes"]}


class Cluster:
    """The servers of the chart as it comes."""

    def __init__(self, directory: Path) -> None:
        self.documents = render()
        self._pod = pod(self.documents, "nats")
        [self._text] = [
            document["data"]["nats.conf"]
            for document in of_kind(self.documents, "ConfigMap")
            if "nats.conf" in document["data"]
        ]
        self.servers = [
            self.server(f"kvbm-nats-{number}", directory / str(number)) for number in range(3)
        ]

    def server(self, name: str, directory: Path) -> Server:
        """Return a server with the files of the container."""
        (directory / "data").mkdir(parents=True)
        [container] = self._pod.containers
        write_mounted(directory / "kvbm", mounted_files(self._pod, container))
        configuration = directory / "kvbm/creds/nats-server.conf"
        text = configuration.read_text()
        configuration.chmod(0o600)
        configuration.write_text(
            text.replace('"/data"', f'"{directory}/data"').replace(MOUNTS, f"{directory}/kvbm")
        )
        return Server(name, directory)

    def start(self, server: Server) -> None:
        """Start a server; its own ports and the routes of all are those of this machine."""
        text = self._text.replace(MOUNTS, f"{server.directory}/kvbm")
        for other in self.servers:
            name = f"{other.name}.kvbm-nats:6222"
            assert name in text
            text = text.replace(name, f"localhost:{other.ports[6222]}")
        text = text.replace("0.0.0.0:6222", f"127.0.0.1:{server.ports[6222]}")
        text = text.replace("127.0.0.1:8222", f"127.0.0.1:{server.ports[8222]}")
        configuration = server.directory / "kvbm/creds/nats-server.conf"
        listening = configuration.read_text()
        listening = listening.replace("0.0.0.0:4222", f"127.0.0.1:{server.ports[4222]}")
        configuration.write_text(listening)
        server.start(text)

    def probe(self, name: str) -> str:
        """Return the path that a probe of the container asks."""
        [container] = self._pod.containers
        code: str = container[name]["exec"]["command"][2]
        return code.split("'GET', '")[1].split("'")[0]

    def settings(self, one: Pod, container: Document, directory: Path) -> Settings:
        """Return the settings of a container, with its files below a directory."""
        environ = environ_of_host(environ_of(container, spec_nodeName=NODE, metadata_name="p"))
        for server in self.servers:
            url = f"tls://{server.name}.kvbm-nats:4222"
            assert url in environ["KVBM_NATS_URL"]
            environ["KVBM_NATS_URL"] = environ["KVBM_NATS_URL"].replace(
                url, f"tls://localhost:{server.ports[4222]}"
            )
        place = write_mounted(directory, mounted_files(one, container))
        return Settings.load({name: text.replace(MOUNTS, place) for name, text in environ.items()})


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Three servers with routes to each other."""
    made = Cluster(tmp_path / "servers")
    try:
        for server in made.servers:
            made.start(server)
        names = {server.name for server in made.servers}
        for server in made.servers:
            server.wait_routes(names - {server.name})
        yield made
    finally:
        for server in made.servers:
            server.stop()


async def connected(settings: Settings, role: str) -> Bus:
    """Return a connection of a role; the first tries may find no leader."""
    return await ask_until(
        lambda: Bus.connect(nats_access(settings, role), role, deadline_s=5.0),
        deadline_s=DEADLINE_S, despite=KvbmError,
    )  # fmt: skip


async def test_a_cluster_keeps_streams_three_times_and_each_role_gets_in(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Goal: what helm and kube-secrets have made fits together, with NATS as the judge.

    1. Every probe's path answers on each server.
    2. The container `streams` makes the streams, with three replicas and within the account's room.
    3. Every service connects with its own files. 4. One server is lost: streams still answer.
    """
    for server in cluster.servers:
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            server.wait_answer(cluster.probe(probe))
    one = pod(cluster.documents, "streams")
    [container] = one.containers
    settings = cluster.settings(one, container, tmp_path / "streams")
    bus = await connected(settings, ADMIN)
    try:
        await ask_until(
            lambda: made_streams(bus), deadline_s=DEADLINE_S, despite=KvbmError
        )  # fmt: skip
        assert await replicas_of(bus) == {3}
        for service in pods(cluster.documents):
            for container in service.containers:
                if container.get("args", [""])[0] == "serve":
                    role = container["name"]
                    own = cluster.settings(service, container, tmp_path / role)
                    await (await connected(own, role)).close()
        cluster.servers[0].stop()
        left = await ask_until(
            lambda: replicas_of(bus), deadline_s=DEADLINE_S, despite=KvbmError
        )  # fmt: skip
        assert left == {3}
    finally:
        await bus.close()


async def made_streams(bus: Bus) -> bool:
    """Make the streams; raises what NATS says while it has no leader."""
    await set_up_streams(bus)
    return True


async def replicas_of(bus: Bus) -> set[int]:
    """Return how many servers keep each stream."""
    found = msgspec.json.decode(await call_api(bus, "STREAM.LIST"))["streams"]
    assert len(found) >= 4
    return {stream["config"]["num_replicas"] for stream in found}


def test_servers_take_new_keys_without_a_restart(cluster: Cluster) -> None:
    """Goal: a reload of a server of the cluster succeeds after a rotation has changed its users."""
    for server in cluster.servers:
        file = server.directory / "kvbm/creds/nats-server.conf"
        written = json.loads(file.read_text())
        written["accounts"]["kvbm"]["users"].pop()
        file.write_text(json.dumps(written))
        server.reload()
        wait_for(
            lambda log=server.log: "Reloaded server configuration" in log.read_text(),  # type: ignore[misc]
            f"reload of {server.name}", deadline_s=DEADLINE_S,
        )  # fmt: skip
        assert "Reloaded: accounts" in server.log.read_text()


def test_a_certificate_of_a_client_makes_no_route(cluster: Cluster, tmp_path: Path) -> None:
    """Goal: who has a certificate of etcd's clients, signed by the same authority, stays out.

    All servers refuse it, because it has no name of a route: their log says so.
    """
    stranger = cluster.server("stranger", tmp_path / "stranger")
    creds = stranger.directory / "kvbm/creds"
    own = secrets()["kvbm-index-creds"]
    for server_file, file in (("server.pem", "etcd.pem"), ("server.key", "etcd.key")):
        (creds / server_file).chmod(0o600)
        (creds / server_file).write_text(own[file])
    try:
        cluster.start(stranger)
        logs = [server.log for server in cluster.servers]
        wait_for(
            lambda: all("authentication error" in log.read_text() for log in logs),
            "every server refuses the route",
            deadline_s=DEADLINE_S,
        )
        assert all("stranger" not in server.routes for server in cluster.servers)
    finally:
        stranger.stop()
