"""The context of a service: what its process gives to it, and what both answer about it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec

from kvbm_common.config.settings import Settings
from kvbm_common.errors import NotReady
from kvbm_common.nats.bus import Bus, VerbHandler
from kvbm_common.nats.streams import StreamSpec
from kvbm_common.registry.services import Registry, ServiceRegistration
from kvbm_common.runtime.metrics import Metrics
from kvbm_common.service.audit import Audit
from kvbm_common.service.bounds import Bounds
from kvbm_common.service.footprint import Footprint
from kvbm_common.wire.metrics import MetricsSnapshot
from kvbm_common.wire.verbs import StatsReply

_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class ServiceContext:
    """The things that a process gives to its service."""

    settings: Settings
    kind: str
    bus: Bus
    registry: Registry
    registration: ServiceRegistration
    counters: Metrics
    stopping: asyncio.Event
    """Set on SIGTERM and SIGINT, and when another process took this service's place."""
    settle: Callable[[], None] = field(default=lambda: None, repr=False)
    """Called when the service is ready: what it has made by then stays."""
    footprint: Footprint = field(default_factory=Footprint)
    """The memory of this process, and what its settings allow it."""
    bounds: Bounds = field(default_factory=Bounds)
    """Queues, tables and histories of this process, and how full each is."""
    _stats: Callable[[], msgspec.Struct] | None = field(default=None, repr=False)
    _announced: bool = field(default=False, repr=False)

    @property
    def host(self) -> str:
        """This machine, as a subject token."""
        return self.settings.host

    @property
    def instance(self) -> str:
        """The name that tells services of one kind on this host apart."""
        return self.settings.instance

    @property
    def source(self) -> str:
        """The name of this service as a source of events: `<kind>-<instance>`."""
        return f"{self.kind}-{self.instance}"

    @property
    def events(self) -> StreamSpec:
        """The stream of this host's events."""
        return self.bus.limits.events_of(self.host)

    @property
    def epoch(self) -> int:
        """This life of the service; grows with every one."""
        return self.registration.epoch

    @property
    def audit(self) -> Audit:
        """Writes what operators change here."""
        return Audit(
            self.bus, kind=self.kind, host=self.host, instance=self.instance, counters=self.counters
        )

    async def add_verbs(self, verbs: Mapping[str, VerbHandler], *, shared: bool = False) -> None:
        """Serve verbs as this instance; with `shared` also as any replica of this kind."""
        await self.bus.add_verbs(self.kind, self.instance, self.host, verbs, shared=shared)

    def set_stats(self, stats: Callable[[], msgspec.Struct]) -> None:
        """Say what the verb `stats` answers (a wire.StatsReply)."""
        self._stats = stats

    def ready(self, description: str) -> None:
        """Tell the starter of the process that it serves now, and where."""
        self._announced = True
        self.settle()
        self.footprint.log()
        line = f"ready {self.kind} {description}"
        _log.info("%s", line)
        try:
            print(line, flush=True)
        except OSError:
            _log.debug("standard output is closed")

    def unready_reasons(self) -> list[str]:
        """Return why the service does not serve; empty when it does."""
        if self.stopping.is_set():
            return ["stopping"]
        if not self._announced:
            return ["starting"]
        said = self._stats() if self._stats is not None else None
        if isinstance(said, StatsReply) and not said.ready:
            return said.reasons or ["not ready"]
        return []

    async def answer_stats(self, _payload: bytes) -> bytes:
        """Answer the verb `stats`."""
        if self._stats is None:
            raise NotReady(f"{self.source} is starting")
        said = self._stats()
        if isinstance(said, StatsReply):
            figures = said.figures | self.footprint.figures()
            said = msgspec.structs.replace(said, figures=figures)
        return msgspec.json.encode(said)

    async def answer_metrics(self, _payload: bytes) -> bytes:
        """Answer the verb `metrics` with a MetricsSnapshot."""
        snapshot = MetricsSnapshot(
            kind=self.kind,
            host=self.host,
            instance=self.instance,
            epoch=self.epoch,
            families=self.counters.families(),
        )
        return msgspec.json.encode(snapshot)
