"""The pods of the Helm chart, as containers: the demo on them, and one of each kind killed."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvbm_common.access.roles import ADMIN
from kvbm_common.config.schema import host_of

from tests.compose.engine import docker
from tests.compose.pods import GROUP, RunningPod
from tests.compose.project import CREDS_DIR, wait_until
from tests.helm.chart import Document, of_kind, pod, pods, render, tool
from tests.helm.mounts import NODE, secrets

VALUES = (
    "--set", "image.repository=kvbm,image.tag=test,node.diskTier.cacheGB=1",
    "--set-json", "node.hostTier.cacheGB=0.1",
)  # fmt: skip
REPLICAS = {"nats": 3, "index": 2}
NETWORK = "kvbm-chart"
DEMO_DEADLINE_S = 600.0
DEMO_REQUESTS = 3000
ASK = """
import urllib.request as r
token = open("/etc/kvbm/creds/admin.token").read().strip()
asked = r.Request("http://127.0.0.1:6880/metrics", headers={"authorization": f"Bearer {token}"})
print(r.urlopen(asked, timeout=5).read().decode())
"""


class Release:
    """What a cluster of one node would run."""

    def __init__(self, directory: Path) -> None:
        self.documents = render(*VALUES)
        self.directory = directory
        self.node = directory / "node"
        self.node.mkdir()
        configuration: dict[str, str] = {}
        for document in of_kind(self.documents, "ConfigMap"):
            configuration |= document["data"]
        self.pods: dict[str, RunningPod] = {}
        for template in sorted(pods(self.documents), key=lambda one: one.name != "nats"):
            for number in range(REPLICAS.get(template.name, 1)):
                name = f"kvbm-{template.name}-{number}"
                self.pods[name] = RunningPod(
                    template, name, network=NETWORK, directory=directory, node=self.node,
                    configuration=configuration,
                )  # fmt: skip

    def start(self) -> None:
        """Start all pods and wait for their probes."""
        docker("network", "create", NETWORK)
        for one in self.pods.values():
            one.start()
        self.wait_ready()

    def wait_ready(self) -> None:
        """Wait until every pod is ready."""
        for one in self.pods.values():
            one.wait_ready()

    def remove(self) -> None:
        """Remove containers and network."""
        for one in self.pods.values():
            one.remove()
        subprocess.run(["docker", "network", "rm", NETWORK], capture_output=True, check=False)

    def lookups(self) -> float:
        """Return how many lookups the metrics service has counted; 0 while it does not answer."""
        command = ["docker", "exec", self.pods["kvbm-metrics-0"].id_of("metrics"), "python3", "-c"]
        done = subprocess.run([*command, ASK], capture_output=True, text=True, check=False)
        lines = re.findall(r"^kvbm_lookups_total(?:{.*})? (\S+)$", done.stdout, re.MULTILINE)
        return sum(map(float, lines))

    def demo(self, requests: int) -> subprocess.Popen[str]:
        """Start engines in a container of their own, with what the patch gives an engine's pod."""
        creds = self.directory / ADMIN
        creds.mkdir(exist_ok=True)
        for name, text in secrets()[ADMIN].items():
            (creds / name).write_text(text)
            (creds / name).chmod(0o444)
        host_tier = container_of(pod(self.documents, "node").containers, "host-tier")
        given = {one["name"]: one.get("value", "") for one in host_tier["env"]}
        environ = {
            "KVBM_HOST": host_of(NODE),
            "KVBM_CREDS_DIR": CREDS_DIR,
            "KVBM_SCRAPE_TOKEN_FILE": f"{CREDS_DIR}/scrape.token",
            "DYN_KVBM_DISK_CACHE_GB": "1",
        } | {
            name: given[name]
            for name in (
                "KVBM_NATS_URL", "KVBM_NATS_CA_FILE", "KVBM_RUNTIME_DIR", "UCX_NET_DEVICES",
                "DYN_KVBM_CPU_CACHE_GB",
            )
        }  # fmt: skip
        words = [
            "docker", "run", "--rm", "--name", f"{NETWORK}-demo", "--network", NETWORK,
            "--ipc", "host", "--pid", "host", "--cap-drop", "ALL", "--cap-add", "SYS_PTRACE",
            "--read-only", "--tmpfs", "/tmp:size=64m,mode=1777", "--user", f"10001:{GROUP}",
            "--volume", f"{creds}:{CREDS_DIR}:ro", "--volume", f"{self.node}/run:/run/kvbm",
            "--volume", f"{self.node}/disk:/var/lib/kvbm/disk",
        ]  # fmt: skip
        for name, text in environ.items():
            words += ["--env", f"{name}={text}"]
        words += ["kvbm/tools:test", "demo", "--attach", "--requests", str(requests)]
        return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def container_of(containers: list[Document], name: str) -> Document:
    """Return the container of this name."""
    [found] = [one for one in containers if one["name"] == name]
    return found


def passed(demo: subprocess.Popen[str]) -> str:
    """Wait for the end of a demo: every block was what it must be."""
    output, _ = demo.communicate(timeout=DEMO_DEADLINE_S)
    assert demo.returncode == 0, output[-4000:]
    assert "0 mismatches" in output, output[-4000:]
    return output


@pytest.fixture
def release(images: dict[str, str], tmp_path: Path) -> Iterator[Release]:
    """The chart as it comes, with small caches, ready."""
    if not Path(tool("helm")).exists():
        pytest.skip("make test-helm installs helm")
    assert images["KVBM_VERSION"] == "test"
    made = Release(tmp_path)
    try:
        made.start()
        yield made
    finally:
        made.remove()


def test_the_demo_passes_on_the_pods_of_the_chart_and_over_kills(
    engine: object, release: Release
) -> None:
    """Goal: what the chart describes works together, and comes back.

    1. Every pod passes its probes. 2. The demo compares every block. 3. One container of each kind
    is killed under a second demo, which passes; every pod is ready again.
    """
    passed(release.demo(150))
    before = release.lookups()
    demo = release.demo(DEMO_REQUESTS)
    wait_until(lambda: release.lookups() > before + 20, "the engines ask for blocks")
    for name in sorted(release.pods, reverse=True):  # The node's pod while traffic is sure.
        one = release.pods[name]
        for container in one.containers if name.endswith("-0") else ():
            one.kill(container["name"])
            one.wait_ready()
    assert demo.poll() is None, "the demo has ended before the last container was killed"
    passed(demo)
    release.wait_ready()
