"""docs/deploy.md: every command of the page is run, in its order.

Two projects on one engine stand for the two hosts. What differs from the page are addresses, ports
and the names of the projects; and Grafana, whose image cannot be had without pulling, is stood in
for by another one.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvbm_cli.creds.containers import HOME, SETS, VOLUMES
from kvbm_common.access.roles import CONSUMER
from kvbm_common.runtime.processes import free_port

from tests.compose.engine import compose_command
from tests.compose.project import (
    BUILD_DEADLINE_S,
    COMPOSE_FILE,
    ROOT,
    SERVICES,
    Project,
    wait_until,
)
from tests.compose.relay import Relay
from tests.compose.test_observability import IMAGE, build_prometheus

DOCUMENT = ROOT / "docs/deploy.md"
ADDRESS = "10.0.0.1"
"""Host a on the page."""


def commands() -> list[tuple[str, str]]:
    """Host and command line, in order."""
    found: list[tuple[str, str]] = []
    host = "a"
    without_files = re.sub(r"(?ms)^```.*?^```$", "", DOCUMENT.read_text())
    for line in without_files.splitlines():
        if match := re.match(r"<!-- on: (\w) -->", line):
            host = match[1]
        elif match := re.match(r" {4}(\S.*)", line):
            found.append((host, match[1]))
    return found


def test_the_page_has_commands_for_both_hosts() -> None:
    """Goal: the parser finds them; compose files are the ones that exist."""
    found = commands()
    assert {host for host, _ in found} == {"a", "b"}
    for _, command in found:
        assert command.split()[0] in ("docker", "curl", "export", "unset"), command
        for file in re.findall(r"-f (\S+)", command):
            if file.startswith("compose/"):
                assert (ROOT / file).exists()
    copied = [command for _, command in found if command.startswith("docker cp")]
    assert any(f"{VOLUMES}/{CONSUMER} " in command for command in copied)
    assert any(f"{HOME}/{SETS}/b " in command for command in copied)


def own_address() -> str:
    """An address of this machine that containers reach, too. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((ADDRESS, 9))
        return str(probe.getsockname()[0])


class Page:
    """Runs a line of the page as if it were typed."""

    def __init__(self, images: dict[str, str], home: Path) -> None:
        self._address = own_address()
        self._home = home
        more = {
            **images,
            "KVBM_DEMO_REQUESTS": "100",
            "KVBM_PROMETHEUS_IMAGE": IMAGE,
            "KVBM_GRAFANA_IMAGE": IMAGE,
            "KVBM_PROMETHEUS_PUBLISH": f"127.0.0.1:{free_port()}",
            "KVBM_GRAFANA_PUBLISH": f"127.0.0.1:{free_port()}",
        }
        self.hosts = {name: Project(f"kvbm-page-{name}", more) for name in "ab"}
        self._given = {"KVBM_VERSION": images["KVBM_VERSION"]}
        published = self.hosts["a"].environ
        self.relays = {
            port: Relay(self._address, (self._address, int(published[f"KVBM_{name}_PORT"])))
            for name, port in (("NATS", 4222), ("ETCD", 2379))
        }

    def run(self, host: str, line: str) -> str:
        """Run it on a host; fails the test with what it printed."""
        project = self.hosts[host]
        for written, meant in (
            ("docker compose", " ".join(compose_command())),
            ("localhost:6880", f"localhost:{project.api_port}"),
            *(
                (f"{ADDRESS}:{port}", f"{self._address}:{relay.port}")
                for port, relay in self.relays.items()
            ),
            (ADDRESS, self._address),
            ("run --rm", "run --rm -T"),
            ("-T -T", "-T"),
            (" exec ", " exec -T "),
            ("~/", f"{self._home}/"),
        ):
            line = line.replace(written, meant)
        if self._is_setting(project, line):
            return ""
        if line.endswith("kvbm status"):  # It ends with 1 until everything serves.
            project.wait_ready()
        done = subprocess.run(
            ["bash", "-c", line], cwd=ROOT, env=project.environ, timeout=BUILD_DEADLINE_S,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{line}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
        return done.stdout

    def _is_setting(self, project: Project, line: str) -> bool:
        """`export` and `unset` hold for the later lines of a host, as in one terminal."""
        word, *settings = shlex.split(line)
        if word == "export":
            for setting in settings:
                name, _, project.environ[name] = setting.partition("=")
        elif word == "unset":
            for name in settings:
                project.environ[name] = self._given[name]
        return word in ("export", "unset")

    def check(self, host: str, line: str, output: str) -> None:
        """What the page promises of a line."""
        a, b = self.hosts["a"], self.hosts["b"]
        if line.endswith("--no-follow"):
            assert "stored" in output
        elif line.endswith("kvbm status"):
            assert "host-tier" in output
        elif line.endswith("admin.token"):
            assert output.strip() == a.token()
        elif line.endswith("--rotate"):
            a.forget_token()
        elif "--import" in line:
            assert "imported" in output
        elif line.endswith("run --rm demo"):
            assert "passed" in output
            if host == "b":
                assert a.figure("kvbm_peer_pulled_blocks_total", host="b") > 0
        elif "--scale" in line:
            wait_until(lambda: a.instances("index") == 3, "three indexes")
            wait_until(lambda: a.instances("disk-tier") == 2, "two disk tiers")
        elif line.endswith("--no-recreate"):
            wait_until(lambda: a.instances("index") == 1, "one index")
        elif host == "b" and "up -d" in line:
            wait_until(lambda: a.figure("kvbm_ready", host="b", kind="host-tier") == 1, "host b")
        elif line.endswith("up -d disk-tier"):
            wait_until(lambda: a.figure("kvbm_recovered_blocks_total", host="a") > 0, "its blocks")
        elif "down" in line:
            project = a if host == "a" else b
            assert not any(project.containers(service) for service in SERVICES)


@pytest.fixture
def page(images: dict[str, str], tmp_path: Path) -> Iterator[Page]:
    """Two hosts, empty."""
    build_prometheus(images["KVBM_BASE_IMAGE"])
    page = Page(images, tmp_path)
    try:
        with contextlib.ExitStack() as relays:
            for relay in page.relays.values():
                relays.enter_context(relay)
            yield page
    finally:
        for project in page.hosts.values():
            project.files = (COMPOSE_FILE, "compose/docker-observability.yml")
            project.down()


def test_every_command_of_the_page_works(engine: object, page: Page) -> None:
    """Goal: what the page tells to type works, from an empty host to the end."""
    for host, line in commands():
        output = page.run(host, line)
        page.check(host, line, output)
        print(f"{host}: {line}")
