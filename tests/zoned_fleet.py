"""A fleet's nats-server and those of its zones, joined by leaf links that can be cut."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kvbm_cli.creds.commands import plan_of
from kvbm_cli.creds.nats_config import CredentialPlan
from kvbm_cli.creds.zone_config import ZONES, denied, take_leaf
from kvbm_common.access.nats_access import nats_access, stream_limits
from kvbm_common.access.roles import ADMIN
from kvbm_common.config.settings import Settings
from kvbm_common.errors import KvbmError
from kvbm_common.nats.bus import Bus
from kvbm_common.nats.embedded_server import NatsServer
from kvbm_common.nats.jetstream import raise_for_error
from kvbm_common.nats.stream_setup import set_up_streams
from kvbm_common.nats.streams import REGISTRY
from kvbm_common.nats.zone_sources import HangingSources
from kvbm_common.runtime.processes import free_port

from tests.security.guarded_nats import LOCAL, GuardedNats
from tests.waiting import ask_until
from tests.wire import Wire

CONTROL = "ctl"
"""Where the fleet's own services run."""


@dataclass(slots=True)
class Site:
    """One server, and how a process connects to it."""

    server: NatsServer
    more: dict[str, Any]
    """Settings of all processes here."""
    guarded: GuardedNats | None = None

    def settings(self, role: str, *, host: str = CONTROL, **given: Any) -> Settings:
        """Return the settings of a process of this role."""
        given = self.more | given
        if self.guarded is not None:
            return self.guarded.settings(role, host=host, **given)
        return Settings.load({}, {"nats_url": self.server.url, "host": host} | given)

    @asynccontextmanager
    async def bus(self, role: str = ADMIN, *, host: str = CONTROL) -> AsyncIterator[Bus]:
        """Connect as a role, while the block runs."""
        bus = await Bus.connect(nats_access(self.settings(role, host=host), role), f"test-{role}")
        try:
            yield bus
        finally:
            await bus.close()

    async def make_streams(self) -> None:
        """Make the streams, as an operator does."""
        async with self.bus() as admin:
            await set_up_streams(admin)


class ZonedFleet:
    """Everything: `fleet` is one site, and `zones` has one for each zone, by name."""

    def __init__(self, fleet: Site, zones: dict[str, Site], wires: dict[str, Wire]) -> None:
        self.fleet, self.zones, self._wires = fleet, zones, wires

    async def is_linked(self, zone: str) -> bool:
        """Tell whether the fleet reaches the JetStream of a zone, and its streams are there."""
        async with self.fleet.bus() as admin:
            subject = f"$JS.{zone}.API.STREAM.INFO.{REGISTRY.name}"
            try:
                reply = await admin.request_raw(subject, b"", deadline_s=1.0)
                raise_for_error(reply.payload)
            except KvbmError:
                return False
            return True

    @asynccontextmanager
    async def followed(self) -> AsyncIterator[None]:
        """Do for the fleet's streams what `kvbm nats-streams --follow` does, more often."""
        async with self.fleet.bus() as admin:
            sources = HangingSources(admin)

            async def wake() -> bool:
                await sources.wake()
                return False

            endless = ask_until(wake, deadline_s=600.0, poll_s=0.1, despite=KvbmError)
            task = asyncio.create_task(endless)
            try:
                yield
            finally:
                task.cancel()

    def cut(self, zone: str) -> None:
        """Drop all that goes between the fleet and a zone."""
        self._wires[zone].cut()

    def heal(self, zone: str) -> None:
        """Let them reach each other again."""
        self._wires[zone].heal()


@asynccontextmanager
async def zoned_fleet(
    directory: Path,
    zones: Mapping[str, Sequence[str]],
    *,
    guarded: bool = False,
    partitions: int = 1,
) -> AsyncIterator[ZonedFleet]:
    """Run a fleet with these zones, each with its hosts; all streams are there."""
    port, more = free_port(), {"index_partitions": partitions} if partitions > 1 else {}
    fleet = _site(directory / "fleet", more | {"zones": ",".join(zones)})
    if guarded:
        _guard(fleet, directory / "fleet", [CONTROL], leaf_listen=f"127.0.0.1:{port}")
    else:
        fleet.server.more["leafnodes"] = {"listen": f"127.0.0.1:{port}"}
    async with AsyncExitStack() as stack:
        sites, wires = {}, {}
        for name, hosts in zones.items():
            wires[name] = await stack.enter_async_context(Wire())
            wires[name].lead_to(port)
            sites[name] = site = _site(directory / name, dict(more))
            if guarded:
                take_leaf(directory / name / "creds", directory / "fleet/creds" / ZONES / name)
                url = f"tls://localhost:{wires[name].port}"
                _guard(site, directory / name, hosts, zone=name, fleet=(url,))
            else:
                url = f"nats://127.0.0.1:{wires[name].port}"
                site.server.more["leafnodes"] = {"remotes": [{"urls": [url], **denied()}]}
            site.server.more["jetstream"] = {
                "store_dir": str(site.server.directory), "max_file_store": 4 << 30, "domain": name,
            }  # fmt: skip
        for site in (fleet, *sites.values()):
            stack.push_async_callback(site.server.stop)
            await site.server.start()
        zoned = ZonedFleet(fleet, sites, wires)
        for name, site in sites.items():
            await site.make_streams()
            await ask_until(partial(zoned.is_linked, name))
        # Not before the zones answer: NATS asks again half a minute later.
        await fleet.make_streams()
        yield zoned


def _site(directory: Path, more: dict[str, Any]) -> Site:
    return Site(NatsServer(directory / "nats"), more)


def _guard(site: Site, directory: Path, hosts: Sequence[str], **given: Any) -> None:
    """Give a site what `kvbm nats-config` writes: keys, roles, TLS."""
    settings = Settings.load({}, dict(site.more))
    nats = GuardedNats(site.server, directory / "creds", CredentialPlan(hosts=()))
    given |= {"hosts": tuple(hosts), "names": LOCAL, "streams": stream_limits(settings)}
    nats.plan = plan_of(nats.directory, given)
    nats.write(**given)
    site.guarded = nats
