"""The chart with five sets of values: helm takes it, Kubernetes would, and it agrees."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from tests.helm.chart import CHART, ROOT, TOOLS, VALUES, Document, of_kind, pod, render, run_tool
from tests.helm.checks import complaints
from tests.helm.tools import SCHEMAS

MINORS = ("1.31.0", "1.34.0", "1.37.0")
OWN_SCHEMAS = Path(__file__).parent / "schemas"
values = pytest.mark.parametrize("path", VALUES, ids=lambda path: path.stem)


@functools.cache
def definitions(minor: str) -> jsonschema_rs.Registry:
    """Return what the schemas of a minor share."""
    text = (ROOT / TOOLS / SCHEMAS / f"v{minor}-local-strict/_definitions.json").read_text()
    shared = json.loads(text)
    return jsonschema_rs.Registry([(shared["$id"], shared)])


@functools.cache
def validator(minor: str, kind: str, version: str) -> Any:
    """Return what validates documents of a kind: strictly, an unknown field is an error."""
    group, _, number = version.rpartition("/")
    name = "-".join(part for part in (kind.lower(), group.split(".")[0], number) if part)
    own = OWN_SCHEMAS / f"{name}.json"
    if own.exists():
        return jsonschema_rs.validator_for(json.loads(own.read_text()))
    schema = json.loads((ROOT / TOOLS / SCHEMAS / f"v{minor}-local-strict/{name}.json").read_text())
    return jsonschema_rs.validator_for(schema, registry=definitions(minor))


def wrong_fields(documents: list[Document], minor: str) -> list[str]:
    """Return what the API of Kubernetes would refuse."""
    found: list[str] = []
    for document in documents:
        name = f"{document['kind']} {document['metadata']['name']}"
        errors = validator(minor, document["kind"], document["apiVersion"]).iter_errors(document)
        found += [f"{name} at {error.instance_path}: {error.message}" for error in errors]
    return found


@values
def test_lint_finds_nothing(path: Path) -> None:
    """Goal: helm's own rules hold, warnings included."""
    done = run_tool("helm", "lint", "--strict", str(CHART), "--values", str(path))
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("minor", MINORS)
@values
def test_kubernetes_would_take_it(path: Path, minor: str) -> None:
    """Goal: no field that a version of Kubernetes does not know, or wants differently."""
    documents = render("--values", str(path), kubernetes=minor)
    assert wrong_fields(documents, minor) == []


def test_an_unknown_field_is_noticed() -> None:
    """Goal: the schemas are strict, those of the repository, too."""
    documents = render("--values", str(VALUES[-1]), "--set", "prometheus.podMonitor=true")
    for document in documents:
        document["spec" if "spec" in document else "metadata"]["unknown"] = 1
    refused = {text.split(" at ")[0] for text in wrong_fields(documents, MINORS[-1])}
    assert len(refused) == len(documents)


@values
def test_it_agrees_with_services_images_ports_and_secrets(path: Path) -> None:
    """Goal: nothing that is written here and elsewhere differs (checks.py)."""
    assert complaints(render("--values", str(path))) == []


@values
def test_every_object_is_of_the_release(path: Path) -> None:
    """Goal: names do not collide, labels say whose an object is, none names another namespace."""
    documents = render("--values", str(path))
    names = [(document["kind"], document["metadata"]["name"]) for document in documents]
    assert len(set(names)) == len(names)
    for document in documents:
        assert document["metadata"]["labels"]["app.kubernetes.io/instance"] == "kvbm"
        assert "namespace" not in document["metadata"]


@pytest.mark.parametrize("release", ["123", "1e3", "true"])
def test_a_name_of_the_release_stays_a_string(release: str) -> None:
    """Goal: a release may be called what YAML reads as a number."""
    documents = render(release=release)
    assert wrong_fields(documents, MINORS[-1]) == []
    labels = [document["metadata"]["labels"] for document in documents]
    assert {label["app.kubernetes.io/instance"] for label in labels} == {release}
    renamed = render("--set-string", "fullnameOverride=true")
    assert wrong_fields(renamed, MINORS[-1]) == []


def test_another_nats_may_keep_streams_on_more_servers() -> None:
    """Goal: `nats.replicas` counts the chart's own servers only."""
    given = "nats.enabled=false,nats.url=tls://a:4222,nats.replicas=1,nats.streamReplicas=3"
    [streams] = pod(render("--set", given), "streams").containers
    assert {"name": "KVBM_STREAM_REPLICAS", "value": "3"} in streams["env"]


def test_partitions_have_replicas_of_their_own() -> None:
    """Goal: with three partitions each has a workload, told apart by selector, name and setting."""
    documents = render("--set", "index.partitions=3")
    found = [one for one in of_kind(documents, "Deployment") if "-index" in one["metadata"]["name"]]
    assert [one["metadata"]["name"][-8:] for one in found] == ["-index-0", "-index-1", "-index-2"]
    for number, one in enumerate(found):
        assert one["spec"]["selector"]["matchLabels"]["kvbm/partition"] == str(number)
        assert one["spec"]["template"]["metadata"]["labels"]["kvbm/partition"] == str(number)
        [container] = one["spec"]["template"]["spec"]["containers"]
        assert {"name": "KVBM_INDEX_PARTITION", "value": str(number)} in container["env"]
    counted = {"name": "KVBM_INDEX_PARTITIONS", "value": "3"}
    for name in ("node", "metrics", "streams"):
        assert all(counted in one["env"] for one in pod(documents, name).containers), name
    assert "PARTITION" not in str(render()), "one partition has no such setting"


def test_a_second_index_and_servers_of_nats_survive_the_loss_of_a_node() -> None:
    """Goal: replicas are apart, one at a time may be away, and three servers keep a stream."""
    documents = render()
    for name in ("index", "nats"):
        [term] = pod(documents, name).spec["affinity"]["podAntiAffinity"][
            "preferredDuringSchedulingIgnoredDuringExecution"
        ]
        chosen = term["podAffinityTerm"]["labelSelector"]["matchLabels"]
        assert chosen.items() <= pod(documents, name).labels.items()
    budgets = of_kind(documents, "PodDisruptionBudget")
    assert [budget["spec"]["maxUnavailable"] for budget in budgets] == [1, 1]
    [streams] = pod(documents, "streams").containers
    assert {"name": "KVBM_STREAM_REPLICAS", "value": "3"} in streams["env"]


def test_names_of_hosts_fit_where_pods_are_hosts() -> None:
    """Goal: KVBM_HOST takes 64 characters; a Deployment's pod has 17 more than the Deployment."""
    documents = render("--set", f"fullnameOverride={'a' * 39}")
    for document in of_kind(documents, "Deployment"):
        assert len(document["metadata"]["name"]) + 17 <= 64


def test_a_single_server_has_no_routes_and_keeps_streams_once() -> None:
    """Goal: one node takes no more than it needs: no budget, no cluster, no disk, one replica."""
    documents = render("--values", str(VALUES[[path.stem for path in VALUES].index("single-host")]))
    assert of_kind(documents, "PodDisruptionBudget") == []
    assert pod(documents, "nats").ports == {"nats": 4222}
    [streams] = pod(documents, "streams").containers
    assert {"name": "KVBM_STREAM_REPLICAS", "value": "1"} in streams["env"]
    volumes = {volume["name"] for volume in pod(documents, "node").spec["volumes"]}
    assert "run" in volumes
    assert "disk" not in volumes
