"""Faults that are planted in a copy of the chart: the checks must name each of them."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helm.chart import CHART, render
from tests.helm.checks import complaints

VALUES = str(Path(__file__).parent / "values/tls-nkeys.yaml")


@dataclass(frozen=True, slots=True)
class Plant:
    """A text of a template, what takes its place, and a part of the complaint that must come."""

    file: str
    text: str
    planted: str
    complaint: str


PLANTS = {
    "two services of a pod have one port": Plant(
        "templates/node.yaml", "containerPort: {{ int .values.port }}", "containerPort: 6882",
        "6882 is there twice",
    ),
    "a port that the table has not": Plant(
        "values.yaml", "port: 6884\n", "port: 6890\n", "6890 is not in the table",
    ),
    "a container port that no setting opens": Plant(
        "templates/control.yaml", "kvbm, containerPort: 6881", "kvbm, containerPort: 6882",
        "index opens [6881]",
    ),
    "a variable that nothing reads": Plant(
        "templates/_pod.tpl", "KVBM_SCRAPE_TOKEN_FILE", "KVBM_SCRAPE_FILE",
        "nothing reads KVBM_SCRAPE_FILE",
    ),
    "no key for NATS": Plant(
        "templates/node.yaml", "- name: KVBM_NATS_CREDS_FILE", "- name: KVBM_ETCD_USER",
        "credentials (KVBM_NATS_CREDS_FILE, or",
    ),
    "a Secret in the container of another role": Plant(
        "templates/node.yaml", "{name: {{ $kind }}-creds, mountPath: /etc/kvbm/creds,",
        "{name: host-tier-creds, mountPath: /etc/kvbm/creds,",
        "disk-tier: has the Secret own-host-tier",
    ),
    "the keys of all nodes in a container": Plant(
        "templates/node.yaml",
        "mountPath: /etc/kvbm/node.creds, subPathExpr: $(NODE_NAME).creds, readOnly: true",
        "mountPath: /etc/kvbm/nodes, readOnly: true", "sees the keys of several nodes",
    ),
    "a file that is not mounted": Plant(
        "templates/node.yaml", "- {key: etcd.key, path: etcd.key}", "- {key: etcd.key, path: key}",
        "KVBM_ETCD_KEY_FILE",
    ),
    "a probe is missing": Plant(
        "templates/_pod.tpl", "livenessProbe:\n  httpGet", "startupProbe:\n  httpGet",
        "livenessProbe does not ask 6881/healthz",
    ),
    "a probe asks the other port": Plant(
        "templates/_pod.tpl", "{path: /readyz, port: {{ .port }}}", "{path: /readyz, port: api}",
        "readinessProbe does not ask 6881/readyz",
    ),
    "a command that no image has": Plant(
        "templates/control.yaml", "args: [nats-streams, --follow]", "args: [nats-streams, --stay]",
        "no command nats-streams --stay",
    ),
    "an image that serves something else": Plant(
        "templates/control.yaml",
        '(dict "root" $root "name" $kind) | quote }}\n          imagePullPolicy',
        '(dict "root" $root "name" "metrics") | quote }}\n          imagePullPolicy',
        "index: the image does not serve index",
    ),
    "the user of engines": Plant(
        "templates/control.yaml", '"user" 10002', '"user" 10001', "has the user 10002 in compose",
    ),
    "less memory than the arena": Plant(
        "templates/node.yaml", "mulf $gigabytes 1000.0", "mulf $gigabytes 500.0",
        "DYN_KVBM_CPU_CACHE_GB",
    ),
    "a root that can be written to": Plant(
        "templates/_pod.tpl", "readOnlyRootFilesystem: true", "readOnlyRootFilesystem: false",
        "may write to its root",
    ),
    "one /tmp for all containers of a pod": Plant(
        "templates/node.yaml", "{name: {{ $kind }}-tmp, mountPath: /tmp}",
        "{name: disk-tier-tmp, mountPath: /tmp}", "containers share /tmp",
    ),
    "variables of services": Plant(
        "templates/_pod.tpl", "enableServiceLinks: false", "enableServiceLinks: true",
        "variables of services",
    ),
    "a policy for a port that no pod has": Plant(
        "templates/networkpolicy.yaml", "{protocol: TCP, port: routes}",
        "{protocol: TCP, port: route}", "no pod has a port route",
    ),
    "a policy of no pod": Plant(
        "templates/networkpolicy.yaml",
        "operator: In, values: [index, metrics, streams]", "operator: In, values: [indexes]",
        "cache-control: selects no pod",
    ),
}  # fmt: skip


def copy(directory: Path) -> Path:
    """Return a copy of the chart, with the files that its links lead to."""
    return Path(shutil.copytree(CHART, directory / "kvbm"))


def test_a_copy_is_as_good_as_the_chart(tmp_path: Path) -> None:
    """Goal: what the plants are measured against has no complaint."""
    assert complaints(render("--values", VALUES, chart=copy(tmp_path))) == []


@pytest.mark.parametrize("plant", PLANTS.values(), ids=PLANTS)
def test_planted_fault_is_found(plant: Plant, tmp_path: Path) -> None:
    """Goal: no check of checks.py says yes to everything."""
    chart = copy(tmp_path)
    file = chart / plant.file
    text = file.read_text()
    assert plant.text in text
    file.write_text(text.replace(plant.text, plant.planted))
    more = ["--set", "bucket.enabled=true,bucket.name=kv"]
    assert plant.complaint in "\n".join(complaints(render("--values", VALUES, *more, chart=chart)))
