"""Prometheus beside the stack: it scrapes, its alerts are well, and every panel's question works.

Prometheus is Debian's, in an image made here; Grafana cannot be had without pulling its image, so
its files are checked as files, and its dashboard's questions are asked of the real Prometheus.
"""

from __future__ import annotations

import json
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from kvbm_common.runtime.processes import free_port

from tests.compose.engine import docker
from tests.compose.project import (
    BUILD_DEADLINE_S,
    COMPOSE_FILE,
    ROOT,
    SERVICES,
    Demo,
    Project,
    wait_until,
)

OBSERVABILITY_FILE = "compose/docker-observability.yml"
IMAGE = "kvbm/prometheus:test"
DASHBOARD = json.loads((ROOT / "compose/grafana/dashboards/kvbm.json").read_text())
QUESTIONS = [
    (panel["title"], target["expr"].replace("$host", ".*"))
    for panel in DASHBOARD["panels"]
    for target in panel["targets"]
]
SILENT = {"Disks", "Work given up", "Evictions", "Index: time of a match, 95 %"}
"""Panels that may show nothing after a little traffic without trouble."""


def build_prometheus(base: str) -> None:
    """Make the image."""
    lines = (
        f"FROM {base}\n"
        "RUN apt-get update -qq && DEBIAN_FRONTEND=noninteractive "
        "apt-get install -y -qq --no-install-recommends prometheus\n"
        "RUN install -d -o nobody /prometheus\n"
        'USER nobody\nENTRYPOINT ["prometheus"]\n'
    )
    subprocess.run(
        ["docker", "build", "--network", "host", "-t", IMAGE, "-"],
        input=lines.encode(), check=True, capture_output=True, timeout=BUILD_DEADLINE_S,
    )  # fmt: skip


class Prometheus:
    """Asks a Prometheus."""

    def __init__(self, port: int) -> None:
        self.port = port

    def get(self, path: str, **parameters: str) -> Any:
        """The data of an answer; None where there is none yet."""
        url = f"http://127.0.0.1:{self.port}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                return json.loads(answer.read())["data"]
        except OSError:
            return None

    def ask(self, question: str) -> list[Any]:
        """The series that a question finds now."""
        answer = self.get("query", query=question)
        assert answer is not None, question
        series: list[Any] = answer["result"]
        return series


@pytest.fixture(scope="module")
def prometheus(images: dict[str, str]) -> Iterator[tuple[Project, Prometheus]]:
    """The stack with Prometheus beside it, after some traffic."""
    build_prometheus(images["KVBM_BASE_IMAGE"])
    port = free_port()
    variables = {
        **images,
        "KVBM_PROMETHEUS_IMAGE": IMAGE,
        "KVBM_PROMETHEUS_PUBLISH": f"127.0.0.1:{port}",
    }
    files = (COMPOSE_FILE, OBSERVABILITY_FILE)
    project = Project("kvbm-observed", variables, files=files)
    try:
        project.compose("up", "-d", *SERVICES, "streams", "prometheus")
        project.wait_ready()
        Demo(project, requests=200).wait_passed()
        yield project, Prometheus(port)
    finally:
        project.down()


def test_scrapes_every_service(engine: object, prometheus: tuple[Project, Prometheus]) -> None:
    """Goal: the figures of every kind of service are there."""
    _, asked = prometheus
    ready = "sum by (kind) (kvbm_ready)"
    wait_until(lambda: len(asked.ask(ready)) >= 5, "five kinds are scraped")
    wait_until(lambda: bool(asked.ask("kvbm_lookups_total > 0")), "the traffic is seen")


def test_alerts_are_well_and_silent(engine: object, prometheus: tuple[Project, Prometheus]) -> None:
    """Goal: every rule is evaluated without error, and a healthy stack raises none."""
    _, asked = prometheus

    def evaluated() -> bool:
        data = asked.get("rules")
        rules = [rule for group in data["groups"] for rule in group["rules"]] if data else []
        return bool(rules) and all(rule["health"] == "ok" for rule in rules)

    wait_until(evaluated, "all rules are evaluated")
    assert asked.ask('ALERTS{alertstate="firing"}') == []


@pytest.mark.parametrize(("title", "question"), QUESTIONS)
def test_panels_show_something(
    engine: object, prometheus: tuple[Project, Prometheus], title: str, question: str
) -> None:
    """Goal: each question is PromQL, and finds series after traffic."""
    _, asked = prometheus
    if title in SILENT:
        asked.ask(question)
    else:
        wait_until(lambda: bool(asked.ask(question)), question, deadline_s=30)


def test_a_dead_stack_is_noticed(engine: object, prometheus: tuple[Project, Prometheus]) -> None:
    """Goal: `up` says so when the metrics service is gone. Last: it ends the service."""
    project, asked = prometheus
    [container] = project.containers("metrics")
    docker("kill", container)
    wait_until(lambda: bool(asked.ask('up{job="kvbm"} == 0')), "Prometheus notices")


def test_grafana_finds_what_is_mounted() -> None:
    """Goal: the provisioning names the data source and the directory that compose mounts."""
    compose = yaml.safe_load((ROOT / OBSERVABILITY_FILE).read_text())["services"]["grafana"]
    mounts = dict(volume.split(":")[:2] for volume in compose["volumes"])
    base = ROOT / "compose/grafana"
    provider = yaml.safe_load((base / "provisioning/dashboards/kvbm.yml").read_text())
    path = provider["providers"][0]["options"]["path"]
    assert mounts["./grafana/dashboards"] == path
    home = compose["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert (base / "dashboards" / home.removeprefix(f"{path}/")).exists()
    source = yaml.safe_load((base / "provisioning/datasources/prometheus.yml").read_text())
    used = {panel["datasource"]["uid"] for panel in DASHBOARD["panels"]}
    assert used == {found["uid"] for found in source["datasources"]}
