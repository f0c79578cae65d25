"""The files of compose/, without an engine: they agree with each other and with the product."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from kvbm_cli.stack import SERVICES
from kvbm_common.nats.embedded_server import PAYLOAD_BYTES_MAX, STORE_BYTES_MAX

from tests.compose.project import COMPOSE_FILE
from tests.test_documents import documented_metrics

ROOT = Path(__file__).parent.parent.parent
DOCKERFILE = (ROOT / "compose/Dockerfile").read_text()
TARGETS = re.findall(r"^FROM \S+ AS (\S+)$", DOCKERFILE, re.MULTILINE)
DASHBOARDS = sorted(ROOT.glob("compose/grafana/dashboards/*.json"))
ADDED = {"service", "host", "instance", "le"}


def services_of(name: str) -> dict[str, Any]:
    """The services of a compose file."""
    services: dict[str, Any] = yaml.safe_load((ROOT / name).read_text())["services"]
    return services


def pins(name: str) -> set[str]:
    """What a lock file pins."""
    return set(re.findall(r"^(\S+==\S+)", (ROOT / "requirements" / name).read_text(), re.MULTILINE))


def test_every_service_has_a_target_and_a_health_check() -> None:
    """Goal: nothing that `kvbm serve` knows is missing from the images."""
    for kind in SERVICES:
        stage = DOCKERFILE.split(f" AS {kind}\n")[1].split("\nFROM ")[0]
        assert "HEALTHCHECK" in stage, kind
        assert f'CMD ["serve", "{kind}"]' in stage
    for name, service in services_of(COMPOSE_FILE).items():
        assert service["build"]["target"] in TARGETS, name


def test_a_service_port_needs_an_address_of_its_own() -> None:
    """Goal: each container answers probes; in the host's network two host tiers do not collide."""
    assert "KVBM_SERVICE_PORT=6881 KVBM_SERVICE_BIND=0.0.0.0" in DOCKERFILE
    for name, service in services_of("compose/docker-host-network.yml").items():
        if name in SERVICES:
            assert service["environment"]["KVBM_SERVICE_PORT"].endswith(":-0}"), name


def test_no_image_runs_as_root() -> None:
    """Goal: the last word of every stage that becomes an image is a user."""
    users = DOCKERFILE.count("\nUSER kvbm\n")
    assert users == len(re.findall(r"^FROM \$\{BASE\} AS (?!build)", DOCKERFILE, re.MULTILINE))


def test_images_install_what_was_tested() -> None:
    """Goal: the images' lock is a part of the lock that everything else uses."""
    assert pins("image.txt") <= pins("lock.txt"), "make lock renews both"


def test_nats_has_the_limits_of_the_embedded_one() -> None:
    """Goal: no message that `kvbm up` takes is too large for the containers."""
    text = (ROOT / "compose/nats.conf").read_text()
    assert f"max_payload: {PAYLOAD_BYTES_MAX}" in text
    assert f"max_file_store: {STORE_BYTES_MAX}" in text


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_dashboards_ask_for_figures_that_exist(path: Path) -> None:
    """Goal: no empty panel because of a name: each is in docs/operating.md."""
    names = documented_metrics()
    panels = json.loads(path.read_text())["panels"]
    assert panels
    for panel in panels:
        for target in panel.get("targets", []):
            for name in re.findall(r"\bkvbm_\w+", target["expr"]):
                family = re.sub(r"_(bucket|sum|count)$", "", name)
                assert {family, name, f"{family}_total"} & names, f"{name} of {panel['title']}"
