"""The files of Secrets that a container of the chart sees, made by `kvbm kube-secrets`."""

from __future__ import annotations

import base64
import functools
import tempfile
from collections.abc import Mapping
from pathlib import Path

import msgspec
from kvbm_cli.container import NODE_NAME
from kvbm_cli.creds.kubernetes import write_secrets
from kvbm_common.access.roles import ADMIN
from kvbm_common.access.secret_files import write_secret

from tests.helm.chart import NAMESPACE, RELEASE, Document, Pod

NODE = "ip-10-0-0-1.internal"
"""The node of every pod; its name is no host's name as it stands."""
MOUNTS = "/etc/kvbm"
ETCD_CLIENT = "etcd-client"
"""The Secret of a user's own etcd in the values."""


@functools.cache
def secrets() -> dict[str, dict[str, str]]:
    """Return keys and texts of every Secret that the command makes, and of the operator's set."""
    with tempfile.TemporaryDirectory() as directory:
        path = write_secrets(
            Path(directory), nodes=(NODE, "b"), prefix=RELEASE, namespace=NAMESPACE
        )
        items = msgspec.json.decode(path.read_bytes())["items"]
        admin = {one.name: one.read_text() for one in Path(directory).glob("sets/shared/admin/*")}
    found = {
        item["metadata"]["name"]: {
            key: base64.b64decode(text).decode() for key, text in item["data"].items()
        }
        for item in items
    }
    index = found[f"{RELEASE}-index-creds"]
    etcd = {key: index[key] for key in ("ca.pem", "etcd.pem", "etcd.key")}
    return found | {ETCD_CLIENT: etcd, ADMIN: admin}


def role_of(secret: str) -> str:
    """Return the role that a Secret is for, in any set of values.

    >>> role_of("kvbm-index-creds"), role_of("own-host-tier")
    ('index', 'host-tier')
    """
    for before in ("own-", "cache-", f"{RELEASE}-"):
        secret = secret.removeprefix(before)
    return secret.removesuffix("-creds")


def mounted_files(one: Pod, container: Document) -> dict[str, str]:
    """Return path and text of each file of a Secret that a container sees."""
    found: dict[str, str] = {}
    for mount in container["volumeMounts"]:
        volume = one.volume(mount["name"]).get("secret")
        if volume is None:
            continue
        name = volume["secretName"]
        texts = secrets()[name if name == ETCD_CLIENT else f"{RELEASE}-{role_of(name)}-creds"]
        items = {item["path"]: item["key"] for item in volume.get("items", ())}
        files = {path: texts[key] for path, key in items.items()} if items else texts
        if "subPathExpr" in mount:
            key = mount["subPathExpr"].replace(f"$({NODE_NAME})", NODE)
            found[mount["mountPath"]] = files[key]
        else:
            found |= {f"{mount['mountPath']}/{path}": text for path, text in files.items()}
    return found


def write_mounted(directory: Path, files: Mapping[str, str]) -> str:
    """Write the files below a directory, which stands for /etc/kvbm; returns its path."""
    for path, text in files.items():
        write_secret(directory / Path(path).relative_to(MOUNTS), text)
    return str(directory)
