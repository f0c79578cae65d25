"""The chart, rendered: documents, pods, containers, and the values that tests give it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy/helm/kvbm"
TOOLS = Path(os.environ.get("KVBM_TEST_HELM", "") or ".venv-helm")
VALUES = sorted((Path(__file__).parent / "values").glob("*.yaml"))
RELEASE = "kvbm"
NAMESPACE = "cache"
DEADLINE_S = 60.0
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

Document = dict[str, Any]


class Refused(Exception):
    """helm has refused the values; the text is what it printed."""


def tool(name: str) -> str:
    """Return the path of a program that `make test-helm` has unpacked."""
    return str((ROOT / TOOLS / "bin" / name).absolute())


def run_tool(name: str, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run helm or kubectl, with what it prints."""
    environ = os.environ | {"HELM_NO_PLUGINS": "1", "KUBECONFIG": os.devnull}
    return subprocess.run(
        [tool(name), *arguments], input=stdin, env=environ, timeout=DEADLINE_S,
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def render(
    *arguments: str, chart: Path = CHART, kubernetes: str = "1.37.0", release: str = RELEASE
) -> list[Document]:
    """Return the documents that helm makes of the chart; raises Refused."""
    done = run_tool(
        "helm", "template", release, str(chart), "--namespace", NAMESPACE,
        "--kube-version", kubernetes, *arguments,
    )  # fmt: skip
    if done.returncode:
        raise Refused(done.stderr)
    return [document for document in yaml.load_all(done.stdout, LOADER) if document]


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod template, and the component that it is."""

    name: str
    labels: Mapping[str, str]
    spec: Document
    claims: tuple[str, ...] = ()
    """Volumes that each replica has of its own."""

    @property
    def containers(self) -> list[Document]:
        """Its containers that stay; not the init containers."""
        found: list[Document] = self.spec["containers"]
        return found

    @property
    def secrets(self) -> dict[str, str]:
        """The Secret of each volume that has one."""
        return {
            volume["name"]: volume["secret"]["secretName"]
            for volume in self.spec["volumes"]
            if "secret" in volume
        }

    def volume(self, name: str) -> Document:
        """Return the volume of this name; of a claim only the name."""
        claims = [{"name": claim} for claim in self.claims]
        [found] = [volume for volume in self.spec["volumes"] + claims if volume["name"] == name]
        return dict(found)

    @property
    def ports(self) -> dict[str, int]:
        """Its ports by name."""
        return {
            port["name"]: port["containerPort"]
            for container in self.containers
            for port in container.get("ports", ())
        }


def pods(documents: list[Document]) -> Iterator[Pod]:
    """Yield the pod template of every workload."""
    for document in documents:
        if document["kind"] in ("DaemonSet", "Deployment", "StatefulSet"):
            template = document["spec"]["template"]
            labels = template["metadata"]["labels"]
            claims = document["spec"].get("volumeClaimTemplates", ())
            names = tuple(claim["metadata"]["name"] for claim in claims)
            yield Pod(labels["app.kubernetes.io/component"], labels, template["spec"], names)


def pod(documents: list[Document], name: str) -> Pod:
    """Return the pod template of a component."""
    [found] = [one for one in pods(documents) if one.name == name]
    return found


def services(documents: list[Document]) -> Iterator[tuple[Pod, Document]]:
    """Yield each container of a service of KVBM, with its pod: not NATS, not what makes streams."""
    for one in pods(documents):
        for container in one.containers:
            if container.get("args", [""])[0] == "serve":
                yield one, container


def environ_of(container: Document, **of_pod: str) -> dict[str, str]:
    """Return the variables of a container, with the fields of its pod where these are named."""
    found: dict[str, str] = {}
    for variable in container.get("env", ()):
        source = variable.get("valueFrom", {})
        if "fieldRef" in source:
            found[variable["name"]] = of_pod[source["fieldRef"]["fieldPath"].replace(".", "_")]
        elif "secretKeyRef" in source:
            found[variable["name"]] = "from-a-secret"
        else:
            found[variable["name"]] = variable["value"]
    return found


def of_kind(documents: list[Document], kind: str) -> list[Document]:
    """Return the documents of a kind."""
    return [document for document in documents if document["kind"] == kind]
