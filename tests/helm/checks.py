"""What the rendered chart must agree with, as functions that return every complaint.

The other side is never the chart: settings and their checks at start, the Dockerfile, the table of
ports in docs/security.md, the files of `kvbm kube-secrets`.
"""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import entry_points
from pathlib import Path

import yaml
from kvbm_cli.container import NODE_NAME, check_memory, environ_of_host
from kvbm_common.access.http_access import refuse_open_api
from kvbm_common.config.declarations import all_settings
from kvbm_common.config.settings import Settings
from kvbm_common.errors import ConfigError
from kvbm_common.nixl.library import NET_DEVICES
from kvbm_common.service.process import refuse_open_doors

from tests.document_commands import wrong_with
from tests.helm.chart import (
    ROOT,
    Document,
    Pod,
    environ_of,
    of_kind,
    pods,
    services,
)
from tests.helm.mounts import ETCD_CLIENT, MOUNTS, NODE, mounted_files, role_of, write_mounted

DOCKERFILE = (ROOT / "compose/Dockerfile").read_text()
COMPOSE = yaml.safe_load((ROOT / "compose/docker-compose.yml").read_text())["services"]
USERS = {"kvbm": 10001, "control": 10002}
OTHER_VARIABLES = {NET_DEVICES, NODE_NAME, "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES"}
"""What services read besides settings, and what the runtime of GPUs does."""
SERVICE_KINDS = {entry.name for entry in entry_points(group="kvbm.services")}

Check = Callable[[list[Document]], Iterator[str]]


def stage_of(image: str) -> str:
    """Return the stage of the Dockerfile that an image is built from."""
    target = re.split("[:@]", image.rpartition("/")[2])[0]
    assert f" AS {target}\n" in DOCKERFILE, f"{image}: no target {target}"
    return DOCKERFILE.split(f" AS {target}\n")[1].split("\nFROM ")[0]


def image_environ(image: str) -> dict[str, str]:
    """Return the variables of an image: those of its stage, after those of the common one."""
    runtime = DOCKERFILE.split(" AS runtime\n")[1].split("\nFROM ")[0]
    found: dict[str, str] = {}
    for stage in (runtime, stage_of(image)):
        for line in re.findall(r"^ENV ((?:.*\\\n)*.*)$", stage, re.MULTILINE):
            found |= dict(re.findall(r"(\w+)=(\S+)", line))
    return found


def settings_of(one: Pod, container: Document) -> Settings:
    """Return the settings that a container starts with, with its files; raises ConfigError."""
    with started(one, container) as environ:
        return Settings.load(environ)


@contextlib.contextmanager
def started(one: Pod, container: Document) -> Iterator[dict[str, str]]:
    """Yield the variables of a container whose files are in a directory of this machine."""
    own = environ_of(container, spec_nodeName=NODE, metadata_name="kvbm-index-5d5b7f9c4-abcde")
    environ = environ_of_host(image_environ(container["image"]) | own)
    with tempfile.TemporaryDirectory() as directory:
        place = write_mounted(Path(directory), mounted_files(one, container))
        yield {name: text.replace(MOUNTS, place) for name, text in environ.items()}


def wrong_settings(documents: list[Document]) -> Iterator[str]:
    """Yield what a service would warn about or refuse at its start."""
    known = {setting.variable for setting in all_settings()}
    for one in pods(documents):
        for container in one.containers:
            names = [variable["name"] for variable in container.get("env", ())]
            allowed = known | OTHER_VARIABLES | ({"POD_NAME"} if one.name == "nats" else set())
            for name in names:
                if name not in allowed and not name.startswith(("UCX_", "OTEL_")):
                    yield f"{container['name']}: nothing reads {name}"
                if names.count(name) > 1:
                    yield f"{container['name']}: {name} is there twice"
    for one, container in services(documents):
        kind = container["name"]
        with started(one, container) as environ:
            yield from (f"{kind}: {text}" for text in refusals(kind, environ, container))


def refusals(kind: str, environ: Mapping[str, str], container: Document) -> list[str]:
    """Return what a service says of its settings, before it does anything else."""
    try:
        settings = Settings.load(environ)
        refuse_open_doors(kind, settings)
        if kind == "metrics":
            refuse_open_api(settings)
        if kind == "host-tier":
            check_memory(settings, bytes_of(container["resources"]["limits"]["memory"]))
    except ConfigError as error:
        return [str(error)]
    return list(settings.warnings)


def bytes_of(quantity: str) -> int:
    """Return the bytes of a quantity of Kubernetes.

    >>> bytes_of("2Gi"), bytes_of("2500M")
    (2147483648, 2500000000)
    """
    units = {"M": 1000**2, "G": 1000**3, "Mi": 1024**2, "Gi": 1024**3}
    number, unit = re.fullmatch(r"(\d+)(\w+)", quantity).groups()  # type: ignore[union-attr]
    return int(number) * units[unit]


def wrong_commands(documents: list[Document]) -> Iterator[str]:
    """Yield containers that their image could not start, or that have another user than there."""
    for one in pods(documents):
        for container in one.containers:
            name, arguments = container["name"], container.get("args", [])
            stage = stage_of(container["image"])
            match arguments:
                case ["serve", kind]:
                    if kind not in SERVICE_KINDS or f'CMD ["serve", "{kind}"]' not in stage:
                        yield f"{name}: the image does not serve {kind}"
                case [_, *_]:
                    if 'ENTRYPOINT ["kvbm"]' not in stage or wrong_with(arguments):
                        yield f"{name}: no command {' '.join(arguments)}"
                case _:
                    if "ENTRYPOINT" not in stage:
                        yield f"{name}: the image has no command"
            if "command" in container:
                yield f"{name}: the entry point of the image is not used"
            if one.spec["securityContext"]["runAsUser"] != user_of(name, stage):
                yield f"{name}: has the user {user_of(name, stage)} in compose"


def user_of(name: str, stage: str) -> int:
    """Return the user of a container of this name in compose: its own one, or the image's."""
    if "user" in COMPOSE.get(name, {}):
        return int(COMPOSE[name]["user"].split(":")[0])
    named = re.findall(r"^USER (\w+)$", stage, re.MULTILINE)
    return USERS[named[-1] if named else "kvbm"]


def listed_ports() -> set[int]:
    """Return the ports in the table of docs/security.md, `A to B` as all of them."""
    section = (ROOT / "docs/security.md").read_text().split("<!-- ports -->")[1]
    found: set[int] = set()
    for column in re.findall(r"^\| (.*?) \|", section.split("<!-- end -->")[0], re.MULTILINE):
        found |= {int(port) for port in re.findall(r"\d{4,5}", column)}
        for first, last in re.findall(r"(\d{4}) to (\d{4})", column):
            found |= set(range(int(first), int(last)))
    return found


def wrong_ports(documents: list[Document]) -> Iterator[str]:
    """Yield ports that no setting opens, that are not in the table, or that collide in a pod."""
    for one in pods(documents):
        numbers = [port for container in one.containers for port in ports_of(container)]
        for number in set(numbers):
            if number not in listed_ports():
                yield f"{one.name}: {number} is not in the table of ports"
            if numbers.count(number) > 1:
                yield f"{one.name}: {number} is there twice"
    for one, container in services(documents):
        settings = settings_of(one, container)
        opened = {settings.service_port}
        if container["name"] == "metrics":
            opened.add(settings.metrics_port)
        if set(ports_of(container)) != opened:
            yield f"{one.name}: {container['name']} opens {sorted(opened)}"
    for service in of_kind(documents, "Service"):
        for target in selected(documents, service["spec"]["selector"]):
            for port in service["spec"]["ports"]:
                if target.ports.get(port["targetPort"]) != port["port"]:
                    yield f"{service['metadata']['name']}: no pod has port {port['port']}"


def ports_of(container: Document) -> list[int]:
    """Return the ports of a container."""
    return [port["containerPort"] for port in container.get("ports", ())]


def selected(documents: list[Document], labels: Document) -> list[Pod]:
    """Return the pods that have these labels."""
    return [one for one in pods(documents) if labels.items() <= one.labels.items()]


def wrong_secrets(documents: list[Document]) -> Iterator[str]:
    """Yield Secrets in a container of another role, and files that no Secret has."""
    for one in pods(documents):
        for container in one.containers:
            role = container["name"]
            for mount in container["volumeMounts"]:
                secret = one.secrets.get(mount["name"])
                if secret is None or secret == ETCD_CLIENT:
                    continue
                if role_of(secret) != role:
                    yield f"{role}: has the Secret {secret}"
                if not mount.get("readOnly"):
                    yield f"{role}: may write to {secret}"
            seen = mounted_files(one, container)
            for name, text in environ_of(container, spec_nodeName=NODE, metadata_name="a").items():
                if text.startswith("/etc/kvbm/") and name.endswith("_FILE") and text not in seen:
                    yield f"{role}: {name} is {text}, which is not mounted"
            if role != "nats" and not any(path.endswith(".creds") for path in seen):
                yield f"{role}: has no key for NATS"
            if sum(path.endswith(".creds") for path in seen) > 1:
                yield f"{role}: sees the keys of several nodes"


def missing_probes(documents: list[Document]) -> Iterator[str]:
    """Yield services without a probe at their own port, where the documented paths answer."""
    for one, container in services(documents):
        port = settings_of(one, container).service_port
        names = {one["name"]: one["containerPort"] for one in container["ports"]}
        for probe, path in (("livenessProbe", "/healthz"), ("readinessProbe", "/readyz")):
            asks = container.get(probe, {}).get("httpGet", {})
            if asks.get("path") != path or names.get(asks.get("port")) != port:
                yield f"{container['name']}: {probe} does not ask {port}{path}"
    for one in pods(documents):
        for container in one.containers:
            if one.name == "nats" and not {"livenessProbe", "readinessProbe"} <= container.keys():
                yield "nats: has no probes"


def open_containers(documents: list[Document]) -> Iterator[str]:
    """Yield containers with more rights than compose gives them."""
    for one in pods(documents):
        context = one.spec["securityContext"]
        if not context["runAsNonRoot"] or context["seccompProfile"]["type"] != "RuntimeDefault":
            yield f"{one.name}: root, or no seccomp profile"
        if one.spec["automountServiceAccountToken"] or one.spec["enableServiceLinks"]:
            yield f"{one.name}: has a token of Kubernetes, or variables of services"
        if one.name != "node" and any(one.spec.get(name) for name in ("hostIPC", "hostPID")):
            yield f"{one.name}: shares a namespace of the node"
        for container in one.containers:
            closed = container["securityContext"]
            added = closed["capabilities"].get("add", [])
            may = ["SYS_PTRACE"] if container["name"] == "host-tier" else []
            if closed["capabilities"]["drop"] != ["ALL"] or (added and added != may):
                yield f"{container['name']}: has capabilities"
            if not closed["readOnlyRootFilesystem"] or closed["allowPrivilegeEscalation"]:
                yield f"{container['name']}: may write to its root, or get rights"
            if "memory" not in container["resources"].get("limits", {}):
                yield f"{container['name']}: has no limit of memory"
            if "/tmp" not in {mount["mountPath"] for mount in container["volumeMounts"]}:
                yield f"{container['name']}: has no /tmp"
        temporary = [
            mount["name"] for container in one.containers
            for mount in container["volumeMounts"] if mount["mountPath"] == "/tmp"
        ]  # fmt: skip
        if len(set(temporary)) < len(temporary):
            yield f"{one.name}: containers share /tmp, where each says which instance it is"


def wrong_policies(documents: list[Document]) -> Iterator[str]:
    """Yield policies of no pod, ports that their pods have not, and ports that none lets in."""
    let_in: set[tuple[str, str]] = set()
    policies = of_kind(documents, "NetworkPolicy")
    for policy in policies:
        name, spec = policy["metadata"]["name"], policy["spec"]
        targets = [
            one for one in selected(documents, spec["podSelector"].get("matchLabels", {}))
            if all(
                one.labels.get(rule["key"]) in rule["values"]
                for rule in spec["podSelector"].get("matchExpressions", ())
            )
        ]  # fmt: skip
        if not targets:
            yield f"{name}: selects no pod"
        for rule in spec["ingress"]:
            for port in rule["ports"]:
                having = [one for one in targets if port["port"] in one.ports]
                let_in |= {(one.name, str(port["port"])) for one in having}
                if not having and "endPort" not in port:
                    yield f"{name}: no pod has a port {port['port']}"
    if not policies:
        return
    for one in pods(documents):
        for name in one.ports:
            monitored = name not in ("nats", "routes")
            if (one.name, name) not in let_in and not monitored:
                yield f"{one.name}: no policy lets anything reach {name}"


CHECKS: tuple[Check, ...] = (
    wrong_settings, wrong_commands, wrong_ports, wrong_secrets, missing_probes, open_containers,
    wrong_policies,
)  # fmt: skip


def complaints(documents: list[Document]) -> list[str]:
    """Return what all checks complain of."""
    return [text for check in CHECKS for text in check(documents)]
