"""TLS files of a plan: the servers' certificates, and a client's in each host's directory."""

from __future__ import annotations

from pathlib import Path

from kvbm_common.access.secret_files import write_secret

from kvbm_cli.creds.certificates import Authority
from kvbm_cli.creds.nats_config import SHARED, CredentialPlan

AUTHORITY = "authority"
ETCD = "etcd"


def write_certificates(directory: Path, plan: CredentialPlan) -> None:
    """Write what TLS needs; nothing where no server has a name. Raises OSError."""
    if not (plan.names or plan.etcd_names):
        return
    authority = Authority(directory / AUTHORITY)
    folders = (*plan.hosts, SHARED)
    clients = [directory / tenant / folder for tenant in plan.tenants for folder in folders]
    for client in clients:
        write_secret(client / "ca.pem", authority.text)
        if plan.etcd_names:
            authority.give(client, ETCD, f"{client.parent.name}.{client.name}")
    for folder, names in (("server", plan.names), (ETCD, plan.etcd_names)):
        if names:
            write_secret(directory / folder / "ca.pem", authority.text)
            authority.give(directory / folder, "server", f"kvbm {folder}", names)
