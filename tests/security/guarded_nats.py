"""A real nats-server with the configuration that `kvbm nats-config` writes: NKeys, roles, TLS."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from kvbm_cli.creds.commands import plan_of, write_all
from kvbm_cli.creds.nats_config import SHARED, CredentialPlan
from kvbm_common.access.nats_access import NatsAccess, nats_access
from kvbm_common.access.roles import ADMIN, BY_NAME
from kvbm_common.config.settings import Settings
from kvbm_common.nats.bus import Bus
from kvbm_common.nats.embedded_server import NatsServer
from kvbm_common.nats.stream_setup import set_up_streams
from kvbm_common.runtime.processes import free_port

LOCAL = ("localhost", "127.0.0.1")
PARTS = ("accounts", "system_account", "tls", "max_payload", "leafnodes", "ping_interval")
"""What the server under test takes from the configuration that is written."""


@dataclass(slots=True)
class GuardedNats:
    """The server, and where its credentials are."""

    server: NatsServer
    directory: Path
    plan: CredentialPlan

    def creds_of(self, role: str, *, host: str = "a", tenant: str = "kvbm") -> Path:
        """Return the file of a credential."""
        folder = host if BY_NAME[role].per_host else SHARED
        return self.directory / tenant / folder / f"{role}.creds"

    def settings(
        self, role: str, *, host: str = "a", tenant: str = "kvbm", **more: object
    ) -> Settings:
        """Return the settings of a process of this role."""
        own: dict[str, object] = {
            "nats_url": self.url,
            "host": host,
            "nats_creds_file": self.creds_of(role, host=host, tenant=tenant),
        }
        if self.plan.names:
            own["nats_ca_file"] = self.directory / "server" / "ca.pem"
        return Settings.load({}, own | more)

    @property
    def url(self) -> str:
        """Where it listens."""
        scheme = "tls" if self.plan.names else "nats"
        return f"{scheme}://localhost:{self.server.port}"

    def access(self, role: str, *, host: str = "a", tenant: str = "kvbm") -> NatsAccess:
        """Return how a process of this role connects."""
        return nats_access(self.settings(role, host=host, tenant=tenant), role)

    @asynccontextmanager
    async def bus(self, role: str, *, host: str = "a", tenant: str = "kvbm") -> AsyncIterator[Bus]:
        """Connect as a role, while the block runs."""
        bus = await Bus.connect(self.access(role, host=host, tenant=tenant), f"test-{role}")
        try:
            yield bus
        finally:
            await bus.close()

    def write(self, *, rotate: bool = False, drop_old: bool = False, **given: object) -> None:
        """Run `kvbm nats-config` again; the server takes it at its next start or reload."""
        self.plan = plan_of(self.directory, given)
        written = write_all(self.directory, self.plan, rotate=rotate, drop_old=drop_old)
        configuration = json.loads(written.read_text())
        self.server.more = {name: configuration[name] for name in PARTS if name in configuration}

    def merged(self, *, host: str = "a", tenant: str = "kvbm") -> Path:
        """Return a directory with all credentials that one machine needs for everything."""
        target = self.directory / f"merged-{tenant}-{host}"
        for folder in (host, SHARED):
            shutil.copytree(self.directory / tenant / folder, target, dirs_exist_ok=True)
        target.chmod(0o700)
        return target


@asynccontextmanager
async def guarded_nats(
    directory: Path,
    *,
    hosts: Sequence[str] = ("a", "b"),
    tenants: Sequence[str] = ("kvbm",),
    tls: bool = False,
) -> AsyncIterator[GuardedNats]:
    """Run a server with credentials for these hosts and tenants, and with its streams."""
    server = NatsServer(directory / "nats", port=free_port())
    plan = CredentialPlan(hosts=tuple(hosts), tenants=tuple(tenants), names=LOCAL if tls else ())
    nats = GuardedNats(server, directory / "creds", plan)
    nats.write(hosts=tuple(hosts), tenants=tuple(tenants), names=LOCAL if tls else ())
    async with server:
        for tenant in tenants:
            async with nats.bus(ADMIN, tenant=tenant) as admin:
                await set_up_streams(admin)
        yield nats
