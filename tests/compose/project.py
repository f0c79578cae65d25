"""A compose project under test: started, scaled, killed and looked at as an operator would."""

from __future__ import annotations

import json
import os
import re
import subprocess
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvbm_common.runtime.processes import free_port

from tests.compose.engine import compose_command, docker
from tests.waiting import wait_for

ROOT = Path(__file__).parent.parent.parent
COMPOSE_FILE = "compose/docker-compose.yml"
BUILD_DEADLINE_S = 900.0
COMMAND_DEADLINE_S = 120.0
READY_DEADLINE_S = 90.0
POLL_S = 0.2
"""How often a condition is looked at that nobody announces."""
CREDS_DIR = "/etc/kvbm/creds"
"""Where each container finds the credentials of its role."""
SERVICES = ("nats", "etcd", "consolidator", "index", "host-tier", "disk-tier", "metrics")


def wait_until(
    condition: Callable[[], bool], what: str, *, deadline_s: float = READY_DEADLINE_S
) -> None:
    """Look until it holds; fails the test after the deadline."""
    wait_for(condition, f"{what}: not after {deadline_s} s", deadline_s=deadline_s, poll_s=POLL_S)


class Project:
    """One project; its ports, volumes and network are its own."""

    def __init__(
        self, name: str, variables: Mapping[str, str], *, files: tuple[str, ...] = (COMPOSE_FILE,)
    ) -> None:
        self.name = name
        self.api_port = free_port()
        self.files = files
        self._token = ""
        self.environ = os.environ | {
            "COMPOSE_PROJECT_NAME": name,
            "KVBM_HOST": name,
            "KVBM_NATS_PORT": str(free_port()),
            "KVBM_ETCD_PORT": str(free_port()),
            "KVBM_METRICS_PUBLISH": f"127.0.0.1:{self.api_port}",
            "DYN_KVBM_CPU_CACHE_GB": "0.1",
            "DYN_KVBM_DISK_CACHE_GB": "1",
            **variables,
        }

    def compose(self, *arguments: str, deadline_s: float = COMMAND_DEADLINE_S) -> str:
        """Run a compose command; fails the test with what it printed."""
        done = subprocess.run(
            self.command(*arguments), cwd=ROOT, env=self.environ, timeout=deadline_s,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{arguments}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
        return done.stdout

    def command(self, *arguments: str) -> list[str]:
        """The words of a compose command."""
        files = [word for file in self.files for word in ("-f", file)]
        return [*compose_command(), *files, *arguments]

    def containers(self, service: str) -> list[str]:
        """The containers of a service that run, by id."""
        label = "label=com.docker.compose"
        listed = docker(
            "ps", "-q", "--filter", f"{label}.project={self.name}",
            "--filter", f"{label}.service={service}", "--filter", f"{label}.oneoff=False",
        )  # fmt: skip
        return listed.split()

    def get(self, path: str) -> Any:
        """Ask the HTTP API as the operator; None where it does not answer."""
        request = urllib.request.Request(f"http://127.0.0.1:{self.api_port}{path}")
        try:
            request.add_header("authorization", f"Bearer {self.token()}")
            with urllib.request.urlopen(request, timeout=5) as answer:
                body = answer.read().decode()
        except (OSError, subprocess.CalledProcessError):
            return None
        return body if path == "/metrics" else json.loads(body)

    def token(self) -> str:
        """Return the operator's token; raises CalledProcessError while nothing has it."""
        if not self._token:
            [container] = self.containers("metrics") or [self.name]
            self._token = docker("exec", container, "cat", f"{CREDS_DIR}/admin.token")
        return self._token

    def forget_token(self) -> None:
        """Read the operator's token again at the next question: a rotation has replaced it."""
        self._token = ""

    def is_ready(self) -> bool:
        """Whether everything that is expected serves."""
        answer = self.get("/readyz")
        return bool(answer and answer["ready"])

    def wait_ready(self) -> None:
        """Wait for that."""
        wait_until(self.is_ready, f"{self.name} is ready")

    def instances(self, kind: str) -> int:
        """How many instances of a kind are registered and ready."""
        return int(self.figure("kvbm_ready", kind=kind))

    def figure(self, name: str, **labels: str) -> float:
        """A figure of /metrics, summed over all lines that have these labels."""
        total = 0.0
        for line in (self.get("/metrics") or "").splitlines():
            match = re.match(rf"{name}(?:{{(.*)}})? (\S+)$", line)
            wanted = [f'{label}="{value}"' for label, value in labels.items()]
            if match and all(text in (match[1] or "") for text in wanted):
                total += float(match[2])
        return total

    def health(self, container: str) -> str:
        """What the container's health check says: starting, healthy or unhealthy."""
        return docker("inspect", "-f", "{{.State.Health.Status}}", container)

    def down(self) -> None:
        """Remove everything, volumes included."""
        self.compose("--profile", "demo", "down", "--volumes", "--timeout", "5")


class Demo:
    """The demo on a project, in the background."""

    def __init__(self, project: Project, *, requests: int) -> None:
        environ = project.environ | {"KVBM_DEMO_REQUESTS": str(requests)}
        self._project = project
        self._lookups = project.figure("kvbm_lookups_total")
        command = project.command("--profile", "demo", "run", "--rm", "-T", "demo")
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=environ, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def wait_traffic(self, *, lookups: int = 20) -> None:
        """Wait until engines have asked for blocks so many times."""

        def is_there() -> bool:
            assert self._process.poll() is None, self._process.communicate()[0]
            return self._project.figure("kvbm_lookups_total") >= self._lookups + lookups

        wait_until(is_there, "the engines ask for blocks")

    @property
    def runs(self) -> bool:
        """Whether it has not ended yet."""
        return self._process.poll() is None

    def wait_passed(self, *, deadline_s: float = 240.0) -> str:
        """Wait for its end: every block was what it must be, nothing was left over."""
        try:
            output, _ = self._process.communicate(timeout=deadline_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            output, _ = self._process.communicate()
            raise AssertionError(f"the demo does not end: {output[-3000:]}") from None
        assert self._process.returncode == 0, output[-4000:]
        assert "0 mismatches" in output, output[-4000:]
        assert "passed" in output, output[-4000:]
        return output
