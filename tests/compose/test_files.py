"""The files of compose/, without an engine: they agree with each other and with the product."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from kvbm_cli.creds.containers import HOME, MOUNTED_AT, VOLUMES, fill, plan_from
from kvbm_cli.creds.nats_config import CONFIGURATION
from kvbm_cli.stack import SERVICES
from kvbm_common.access.nats_access import of_url
from kvbm_common.access.roles import ADMIN
from kvbm_common.config.secret_variables import SECRETS
from kvbm_common.config.settings import Settings
from kvbm_common.nixl.library import NET_DEVICES, network_devices
from kvbm_host_tier.shell.peer_reader import peer_devices

from tests.compose.project import COMPOSE_FILE
from tests.test_documents import documented_metrics

ROOT = Path(__file__).parent.parent.parent
DOCKERFILE = (ROOT / "compose/Dockerfile").read_text()
TARGETS = re.findall(r"^FROM \S+ AS (\S+)$", DOCKERFILE, re.MULTILINE)
COMPOSE_FILES = sorted(f"compose/{path.name}" for path in ROOT.glob("compose/docker-*.yml"))
CLOSING = {"read_only", "cap_drop", "cap_add", "security_opt", "privileged", "user"}
DASHBOARDS = sorted(ROOT.glob("compose/grafana/dashboards/*.json"))
ADDED = {"service", "host", "instance", "le"}


def default_of(text: str) -> str:
    """What compose makes of a value while the shell has no variable."""
    return re.sub(r"\$\{\w+:?-([^}]*)\}", r"\1", text)


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


def test_in_the_network_of_the_host_only_the_door_leaves_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Goal: the arena's mover listens on loopback there; peers are read over all devices.

    Of the latter kvbm.env may name some: that is the image's word, and no compose file's.
    """
    stage = DOCKERFILE.split(" AS host-tier\n")[1].split("\nFROM ")[0]
    of_image = dict(re.findall(r"^ENV (\w+)=(\w+)$", stage, re.MULTILINE))
    common = services_of(COMPOSE_FILE)
    elsewhere = of_url("tls://10.0.0.1:4222")
    in_network = services_of("compose/docker-host-network.yml")
    assert set(in_network) == {"host-tier", "demo"}
    for name, service in in_network.items():
        environ = common[name]["environment"] | service.get("environment", {})
        monkeypatch.setenv(NET_DEVICES, default_of(environ[NET_DEVICES]))
        with network_devices("UCX"):
            assert os.environ[NET_DEVICES] == "lo", name
        assert "KVBM_PEER_DEVICES" not in environ, name
        if name == "host-tier":
            assert peer_devices(Settings.load(of_image), elsewhere) == "all"


def test_no_image_runs_as_root() -> None:
    """Goal: every stage that begins with the base has a user, and no stage goes back to root."""
    stages = re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)[1:]
    for stage in stages:
        if stage.startswith("${BASE} AS ") and not stage.startswith("${BASE} AS build"):
            assert re.search(r"^USER \w+$", stage, re.MULTILINE), stage.splitlines()[0]
    assert set(re.findall(r"^USER (\S+)$", DOCKERFILE, re.MULTILINE)) == {"kvbm", "control"}


def test_who_has_the_user_of_engines() -> None:
    """Goal: those that docs/security.md names, whose credentials an engine could read."""
    theirs = set()
    for name, service in services_of(COMPOSE_FILE).items():
        stage = DOCKERFILE.split(f" AS {service['build']['target']}\n")[1].split("\nFROM ")[0]
        if "USER control" not in stage and "user" not in service:
            theirs.add(name)
    assert theirs == {"host-tier", "disk-tier", "consolidator", "demo"}
    said = (ROOT / "docs/security.md").read_text()
    assert "engines, host tier, disk tier, consolidator and demo are one user (10001)" in said


def test_images_install_what_was_tested() -> None:
    """Goal: the images' lock is a part of the lock that everything else uses."""
    assert pins("image.txt") <= pins("lock.txt"), "make lock renews both"


def test_nats_has_what_was_written_for_it_and_a_closed_monitor() -> None:
    """Goal: accounts and keys come from the volume; the monitor is for the health check alone."""
    lines = (ROOT / "compose/nats.conf").read_text().splitlines()
    assert [line for line in lines if not line.startswith("#")] == [
        f'include "{MOUNTED_AT.removeprefix("/etc/")}/{CONFIGURATION}"',
        'http: "127.0.0.1:8222"',
    ]


def test_etcd_serves_clients_with_a_certificate() -> None:
    """Goal: only TLS on other addresses than loopback, and no client without a certificate."""
    said = yaml.safe_load((ROOT / "compose/etcd.yml").read_text())
    assert said["client-transport-security"]["client-cert-auth"] is True
    for name, urls in said.items():
        if name.endswith("-urls"):
            assert urls.startswith(("https://", "http://127.0.0.1:")), name


@pytest.mark.parametrize("file", COMPOSE_FILES)
def test_every_container_is_closed(file: str) -> None:
    """Goal: a read-only root, limits, no capability but those that docs/deploy.md explains."""
    explained = (ROOT / "docs/deploy.md").read_text()
    for name, service in services_of(file).items():
        if "image" not in service:  # A change of a service of another file.
            assert not CLOSING & set(service), f"{name} of {file}"
            continue
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["mem_limit"], name
        assert service["pids_limit"] > 0, name
        assert "privileged" not in service
        for capability in service.get("cap_add", ()):
            assert f"`cap_add: {capability}`" in explained, capability


@pytest.mark.parametrize("file", COMPOSE_FILES)
def test_nothing_is_declared_open(file: str) -> None:
    """Goal: no variable opens a bus or a port, and none holds a secret."""
    for name, service in services_of(file).items():
        for variable, text in service.get("environment", {}).items():
            if variable.startswith("KVBM_"):
                assert not variable.endswith("_OPEN"), f"{variable} of {name}"
                assert variable not in SECRETS, f"{variable} of {name}"
                if variable.endswith(("_FILE", "_DIR")):
                    assert MOUNTED_AT in text, f"{variable} of {name}"


@pytest.mark.parametrize("file", COMPOSE_FILES)
def test_a_second_file_recreates_nothing(file: str) -> None:
    """Goal: volumes are in the order of their places, as docker-compose 1.29 joins them."""
    for name, service in services_of(file).items():
        places = [volume.split(":")[1] for volume in service.get("volumes", ())]
        assert places == sorted(places), name


def test_each_container_mounts_its_own_credentials() -> None:
    """Goal: one volume, read-only; all of them, and the authority, only where they are made."""
    services = services_of(COMPOSE_FILE)
    makes = [volume.split(":") for volume in services.pop("creds")["volumes"]]
    assert makes.pop() == ["creds", str(HOME)]
    assert [target for _, target in makes] == [
        str(VOLUMES / name.removeprefix("creds-")) for name, _ in makes
    ]
    for name, service in services.items():
        role = {"demo": ADMIN}.get(name, name)
        mounted = [volume for volume in service["volumes"] if volume.startswith("creds")]
        assert mounted == [f"creds-{role}:{MOUNTED_AT}:ro"], name
        assert role in [name.removeprefix("creds-") for name, _ in makes]
        assert service["depends_on"]["creds"]["condition"] == "service_completed_successfully"


def test_each_container_finds_the_files_that_it_is_told_of(tmp_path: Path) -> None:
    """Goal: no variable names a file that the volume of the service does not have."""
    services = services_of(COMPOSE_FILE)
    for volume in services.pop("creds")["volumes"][:-1]:
        (tmp_path / volume.split(":")[1].removeprefix(f"{VOLUMES}/")).mkdir()
    fill(tmp_path / "home", tmp_path, plan_from({"KVBM_HOST": "a"}, tmp_path / "home"))
    for name, service in services.items():
        role = ADMIN if name == "demo" else name
        for variable, text in service.get("environment", {}).items():
            for file in re.findall(rf"{MOUNTED_AT}/([\w.]+)", text):
                assert (tmp_path / role / file).is_file(), f"{variable} of {name}"


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_dashboards_show_the_hosts_that_are_chosen(path: Path) -> None:
    """Goal: a selector of hosts, all of them at first, which each series of each panel follows."""
    dashboard = json.loads(path.read_text())
    [host] = [one for one in dashboard["templating"]["list"] if one["name"] == "host"]
    assert host["query"]["query"] == "label_values(kvbm_up, host)"
    assert (host["includeAll"], host["allValue"], host["current"]["value"]) == (
        True,
        ".*",
        "$__all",
    )
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            series = re.findall(r"\bkvbm_\w+({[^}]*})?", target["expr"])
            assert series, panel["title"]
            assert all('host=~"$host"' in one for one in series), target["expr"]


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
                # KVBM's own counters have no `_total`; the same of an instance have.
                ours = family.removesuffix("_total")
                assert {family, ours, name, f"{family}_total"} & names, (
                    f"{name} of {panel['title']}"
                )
