"""The command `kvbm kube-secrets`: credentials of the Helm chart, a Secret for each role.

    OUT/                      what `kvbm nats-config` writes, and sets/ROLE as in compose
    OUT/kube-release.json     nodes, prefix and namespace, for the next run
    OUT/kube-secrets.json     the Secrets, for `kubectl apply --server-side -f`

A role of a host has a key for each node in its Secret, NODE.creds; a pod mounts the one of its
node. A run makes what is missing and leaves what is there, as `kvbm nats-config` does.
"""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import typer
from kvbm_common.access.nats_access import SUFFIX
from kvbm_common.access.roles import CONSUMER, ROLES, Role
from kvbm_common.access.secret_files import write_secret
from kvbm_common.config.schema import host_of
from kvbm_common.config.settings import Settings
from kvbm_common.errors import ConfigError

from kvbm_cli.creds.commands import errors_told, plan_of, require_directory, stream_room
from kvbm_cli.creds.containers import MOUNTED_AT, NATS, SCRAPE, SETS, STREAMS, fill
from kvbm_cli.creds.nats_config import CONFIGURATION, SHARED, CredentialPlan, names_of, read_plan
from kvbm_cli.creds.tls_files import ETCD

FILE = "kube-secrets.json"
RELEASE = "kube-release.json"
REPLICAS = "KVBM_STREAM_REPLICAS"
SERVERS = 3
"""Servers of the chart's NATS, unless a value says otherwise, and how many keep each stream."""
INSTANCES = 2
"""Names for the one instance of a tier on a node: an old one may not have ended yet."""
SECRET_BYTES_MAX = 1024 * 1024
"""Bytes of one Secret that Kubernetes accepts, at most."""
SERVERS_MAX = 5
"""Servers with a name in the certificate: as many as may keep a stream."""


NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
"""A name in Kubernetes (RFC 1123); a node's may be several with dots between."""
NAMESPACE_CHARS, NODE_CHARS = 63, 253
PREFIX_CHARS = 39
"""Characters that the chart leaves of a prefix: the longest name after it must fit."""


class Release(msgspec.Struct, frozen=True, kw_only=True):
    """The release that the Secrets are for; a next run takes these values as its defaults."""

    nodes: tuple[str, ...] = ()
    prefix: str = "kvbm"
    namespace: str = "default"

    def check(self) -> Release:
        """Return the release; raises ConfigError for what Kubernetes would not take."""
        accepted = "a name of small letters, digits and dashes, of at most {} characters"
        for option, name, most in (
            ("--prefix", self.prefix, PREFIX_CHARS),
            ("--namespace", self.namespace, NAMESPACE_CHARS),
        ):
            if len(name) > most or not NAME.fullmatch(name):
                raise ConfigError(option, name, accepted.format(most))
        for node in self.nodes:
            if len(node) > NODE_CHARS or not all(map(NAME.fullmatch, node.split("."))):
                raise ConfigError("--nodes", node, f"{accepted.format(NODE_CHARS)}, or dots")
        return self


def kube_secrets(
    out: Path = typer.Option(..., help="Directory of everything that is written, mode 0700."),  # noqa: B008
    nodes: str = typer.Option("", help="Names of nodes, blanks or commas between."),
    prefix: str = typer.Option("", help="What names of the chart begin with; kvbm unless given."),
    namespace: str = typer.Option("", help="Namespace of the release; default unless given."),
    names: str = typer.Option("", help="More names and addresses of NATS in its certificate."),
    etcd_names: str = typer.Option("", help="Names and addresses of etcd in its certificate."),
    rotate: bool = typer.Option(False, help="Replace every credential; old ones are good, too."),
    drop_old: bool = typer.Option(False, help="End what a rotation has left good."),
) -> None:
    """Write the Secrets of the Helm chart, and print the file for kubectl apply.

    What is not given is as in the run before; what is there stays.
    """
    with errors_told():
        print(
            write_secrets(
                out, nodes=names_of(",".join(nodes.split())), prefix=prefix, namespace=namespace,
                names=names_of(names), etcd_names=names_of(etcd_names),
                rotate=rotate, drop_old=drop_old,
            )
        )  # fmt: skip


def write_secrets(
    out: Path, *, nodes: Sequence[str] = (), prefix: str = "", namespace: str = "",
    names: Sequence[str] = (), etcd_names: Sequence[str] = (),
    rotate: bool = False, drop_old: bool = False,
) -> Path:  # fmt: skip
    """Write credentials and the file of Secrets, which is returned; raises ConfigError."""
    require_directory(out)
    earlier = _read_release(out)
    release = Release(
        nodes=tuple(nodes) or earlier.nodes,
        prefix=prefix or earlier.prefix,
        namespace=namespace or earlier.namespace,
    ).check()
    hosts = hosts_of(release.nodes)
    before = read_plan(out) or CredentialPlan(hosts=())
    own_names = (*server_names(release.prefix, release.namespace), *(names or before.names))
    given: dict[str, Any] = {
        "hosts": tuple(hosts), "server_dir": MOUNTED_AT, "instances": INSTANCES,
        "names": tuple(dict.fromkeys(own_names)),
        "etcd_names": tuple(etcd_names) or before.etcd_names or (ETCD,),
    }  # fmt: skip
    settings = Settings.load({REPLICAS: str(SERVERS)} | os.environ)
    plan = plan_of(out, given | stream_room(settings))
    try:
        fill(out, out / "no-volumes", plan, rotate=rotate, drop_old=drop_old)
        manifests = secrets_of(out, hosts, prefix=release.prefix, namespace=release.namespace)
        path = out / FILE
        write_secret(path, msgspec.json.format(msgspec.json.encode(manifests)).decode() + "\n")
        write_secret(out / RELEASE, msgspec.json.encode(release).decode() + "\n")
    except OSError as error:
        raise ConfigError("--out", out, f"a directory of yours ({error})") from error
    return path


def hosts_of(nodes: Sequence[str]) -> dict[str, str]:
    """Return the node of each host (KVBM_HOST); raises ConfigError for two that are one host.

    >>> hosts_of(["a", "ip-10-0-0-1.internal"])
    {'a': 'a', 'ip-10-0-0-1-internal': 'ip-10-0-0-1.internal'}
    """
    if not nodes:
        raise ConfigError("--nodes", "", "names of nodes, blanks or commas between")
    hosts = {host_of(node): node for node in nodes}
    if len(hosts) < len(set(nodes)):
        accepted = "names that differ in letters, digits, '-' or '_' of the first 64 characters"
        raise ConfigError("--nodes", " ".join(nodes), accepted)
    return hosts


def server_names(prefix: str, namespace: str) -> tuple[str, ...]:
    """Return the names by which pods of the namespace, and of others, reach the chart's NATS.

    >>> server_names("kvbm", "x")[:3]
    ('kvbm-nats', 'kvbm-nats.x', 'kvbm-nats.x.svc')
    """
    service = f"{prefix}-nats"
    servers = ("", *(f"{service}-{number}." for number in range(SERVERS_MAX)))
    ends = ("", f".{namespace}", f".{namespace}.svc", f".{namespace}.svc.cluster.local")
    return (*(f"{one}{service}{end}" for one in servers for end in ends), "localhost", "127.0.0.1")


def secrets_of(
    out: Path, hosts: Mapping[str, str], *, prefix: str, namespace: str
) -> dict[str, Any]:
    """Return a list of Secrets with the files of the sets; raises OSError and ConfigError."""
    folders = {role.name: _files_of_role(out, role, hosts) for role in ROLES if _is_used(role)}
    for name in (NATS, SCRAPE, STREAMS):
        folders[name] = _files(out / SETS / SHARED / name)
    folders[NATS][CONFIGURATION] = _without_blanks(folders[NATS][CONFIGURATION])
    for name, files in folders.items():
        _check_room(name, sum(map(len, files.values())), len(hosts))
    secrets = [
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": f"{prefix}-{name}-creds", "namespace": namespace},
            "type": "Opaque",
            "data": {
                key: base64.b64encode(text.encode()).decode() for key, text in sorted(files.items())
            },
        }
        for name, files in sorted(folders.items())
    ]
    return {"apiVersion": "v1", "kind": "List", "items": secrets}


def _without_blanks(text: str) -> str:
    return msgspec.json.format(text, indent=-1)


def _check_room(name: str, used_bytes: int, node_count: int) -> None:
    if used_bytes > SECRET_BYTES_MAX:
        accepted = f"fewer: of {node_count} the Secret for {name} is larger than Kubernetes takes"
        raise ConfigError("--nodes", node_count, accepted)


def _is_used(role: Role) -> bool:
    """Tell whether a pod, or a reader of events, has this role: operators ask metrics."""
    return role.is_service or role.name == CONSUMER


def _files_of_role(out: Path, role: Role, hosts: Mapping[str, str]) -> dict[str, str]:
    """Return the files of a role; of one for each host all keys, and the rest once."""
    if not role.per_host:
        return _files(out / SETS / SHARED / role.name)
    found: dict[str, str] = {}
    for host, node in reversed(list(hosts.items())):
        files = _files(out / SETS / host / role.name)
        found[f"{node}{SUFFIX}"] = files.pop(f"{role.name}{SUFFIX}")
        found |= files
    return found


def _files(folder: Path) -> dict[str, str]:
    """Return the texts of a set; raises OSError, and ConfigError for a file that is no text."""
    found: dict[str, str] = {}
    for path in folder.iterdir():
        try:
            found[path.name] = path.read_text()
        except UnicodeDecodeError as error:
            text = f"a directory without foreign files: {path} is no text"
            raise ConfigError("--out", path, text) from error
    return found


def _read_release(out: Path) -> Release:
    try:
        return msgspec.json.decode((out / RELEASE).read_bytes(), type=Release)
    except FileNotFoundError:
        return Release()
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError("--out", out, f"a directory of yours ({error})") from error
