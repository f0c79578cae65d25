"""Attached demo: sim engines that join a stack that runs already."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Self, TypeVar

from kvbm_common.access.nats_access import NatsAccess, nats_access
from kvbm_common.access.roles import ADMIN
from kvbm_common.config.schema import redacted
from kvbm_common.config.settings import Settings
from kvbm_common.errors import BusUnavailable, DeadlineExceeded
from kvbm_common.nats.bus import Bus
from kvbm_common.registry.records import ServiceRecord
from kvbm_common.registry.services import Registry
from kvbm_common.runtime.metrics import Metrics
from kvbm_common.service.process import make_registry

from kvbm_cli.demo.check import Tiers, wait_until

Result = TypeVar("Result")

CONNECT_DEADLINE_S = 30.0
"""The time to reach NATS: of containers that start together it may be the last."""
SOON_S = 1.0
"""The time after which a demo names what it waits for."""
READY_DEADLINE_S = 60.0
NEEDED = ("consolidator", "host-tier")
"""Without these on this host, and an index on any, there is nothing to show."""
TIERS = ("host-tier", "disk-tier", "object-tier")


class AttachedStack:
    """The services of this host, as the registry knows them. Use it in `async with`."""

    log_dir: Path | None = None
    """Engines write to our standard error."""

    def __init__(self, *, say: Callable[[str], None] = lambda text: None) -> None:
        self.settings = Settings.load()
        self._say = say
        self.name = f"sim-{secrets.token_hex(3)}"
        """The prefix of the engines' names: several demos may run at once."""
        self._bus: Bus | None = None
        self._registry: Registry | None = None

    @property
    def nats_url(self) -> str:
        """Return the address of NATS, for people."""
        return redacted(self.settings.nats_url)

    @property
    def admin(self) -> NatsAccess:
        """Return the access of the role admin to NATS; raises ConfigError."""
        return nats_access(self.settings, ADMIN)

    async def __aenter__(self) -> Self:
        self._bus = await self._patiently(self._connect, CONNECT_DEADLINE_S)
        self._registry = make_registry(self.settings, self._bus)
        await self._patiently(self._wait_there, READY_DEADLINE_S)
        return self

    async def _patiently(
        self, attempt: Callable[[float], Awaitable[Result]], deadline_s: float
    ) -> Result:
        """Try for a moment, then say what is missing, and try until the deadline."""
        try:
            return await attempt(SOON_S)
        except (BusUnavailable, DeadlineExceeded) as error:
            left_s = deadline_s - SOON_S
            self._say(f"{error}; waiting {left_s:g} s more for a stack (`kvbm up` starts one)")
        return await attempt(deadline_s - SOON_S)

    async def _connect(self, deadline_s: float) -> Bus:
        return await Bus.connect(self.admin, "kvbm-demo", counters=Metrics(), deadline_s=deadline_s)

    async def _wait_there(self, deadline_s: float) -> None:
        missing = f"no {' or no '.join(NEEDED)} on host {self.settings.host}, or no index"
        await wait_until(self._is_there, missing, deadline_s=deadline_s)

    async def __aexit__(self, *_: object) -> None:
        if self._registry is not None:
            await self._registry.close()
        if self._bus is not None:
            await self._bus.close()

    async def tiers(self) -> Tiers:
        """Return kind and instance of every tier of this host, in order."""
        found = [(r.kind, r.instance) for r in await self._services() if r.kind in TIERS]
        return sorted(found)

    async def _is_there(self) -> bool:
        here = {record.kind for record in await self._services()}
        assert self._registry is not None
        return set(NEEDED) <= here and bool(await self._registry.list("index"))

    async def _services(self) -> list[ServiceRecord]:
        """Return the registered services of this host."""
        assert self._registry is not None
        return [r for r in await self._registry.list() if r.host == self.settings.host]
