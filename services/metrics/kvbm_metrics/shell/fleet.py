"""Fleet: asks every registered instance for its statistics, and the index for matches, on NATS."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

import msgspec
from kvbm_common.errors import (
    KvbmError,
    NoResponder,
    RegistryUnavailable,
    RequestFailed,
)
from kvbm_common.nats.bus import Bus
from kvbm_common.nats.replicas import ask_any
from kvbm_common.registry.records import ENGINE, RegistryEvent, ServiceRecord
from kvbm_common.runtime.metrics import Metrics
from kvbm_common.wire.bounds import Usage
from kvbm_common.wire.codec import JsonCodec
from kvbm_common.wire.metrics import MetricsSnapshot
from kvbm_common.wire.verbs import (
    StatsReply,
    StatsRequest,
    verb_subject,
)

from kvbm_metrics.core.fleet_view import FleetView, Instance
from kvbm_metrics.core.gone import GoneServices, gone_views
from kvbm_metrics.core.history import History, lookups_by_host
from kvbm_metrics.core.kvbm_totals import Totals
from kvbm_metrics.core.rates import Rates
from kvbm_metrics.core.recent_models import GoneView, HistoryPoint
from kvbm_metrics.core.tenant_names import with_names

ASK_DEADLINE_S = 0.5
"""An instance that takes longer to answer `stats` counts as down. Usually it takes 1 ms."""
MATCH_DEADLINE_S = 2.0
"""The largest question has a million tokens, which the index hashes first."""
ANY_DEADLINE_S = 0.5
"""NATS gives a question to one replica of the index, which may hang. After this time all replicas
are asked by name."""
OPERATOR_DEADLINE_S = 10.0
"""Longer than a service lets its core take for a verb, so that its own error arrives."""
CACHE_S = 0.25
"""The time for which one answer of the fleet serves all requests: many HTTP requests do not become
many questions on NATS."""
FOLLOW_S = 5.0
"""The interval at which the fleet is asked without a request: half of the window of a rate."""
CONCURRENT_MAX = 64
"""Instances asked at the same time."""

Reply = TypeVar("Reply")


class StillThere(KvbmError):
    """A lost service that is to be forgotten answers, or may still be there."""

    code = "still_there"


class _Answer(NamedTuple, Generic[Reply]):
    """The answer of an instance, or the error instead of it."""

    message: Reply | None
    error: KvbmError | None


class LiveServices(Protocol):
    """The part of the registry that the fleet needs."""

    async def list(self, kind: str | None = None) -> list[ServiceRecord]:
        """Return the live services; raises RegistryUnavailable."""

    def watch(self, callback: Callable[[RegistryEvent], None]) -> Callable[[], None]:
        """Call back for each service that is there, then for every change, until ended."""


class Fleet:
    """All services that are registered. One per process, in one event loop."""

    def __init__(
        self,
        bus: Bus,
        registry: LiveServices,
        counters: Metrics,
        *,
        cache_s: float = CACHE_S,
        deadline_s: float = ASK_DEADLINE_S,
        clock_s: Callable[[], float] = time.monotonic,
        since_epoch: int = 0,
    ) -> None:
        self.totals = Totals(since_epoch=since_epoch)
        self.rates = Rates()
        self._history = History()
        self._gone = GoneServices()
        self._bus = bus
        self._registry = registry
        self._cache_s = cache_s
        self._deadline_s = deadline_s
        self._clock_s = clock_s
        self._records: Sequence[ServiceRecord] = ()
        self._cached: FleetView | None = None
        self._taken_s = 0.0
        self._collecting = asyncio.Lock()
        self._room = asyncio.Semaphore(CONCURRENT_MAX)
        self._stats_codec: JsonCodec[StatsReply] = JsonCodec(StatsReply)
        self._metrics_codec: JsonCodec[MetricsSnapshot] = JsonCodec(MetricsSnapshot)
        self._failures = counters.counter(
            "kvbm_fleet_failures",
            "Questions to an instance that ended without figures.",
            labels=("service", "verb", "code"),
        )

    @property
    def bus(self) -> Bus:
        """The connection over which all services are asked."""
        return self._bus

    async def view(self) -> FleetView:
        """Return all instances as of now, or of at most `cache_s` ago.

        A silent service raises no error.
        """
        async with self._collecting:
            # A caller that has waited for the lock takes what was collected meanwhile.
            if self._cached is None or self._clock_s() - self._taken_s > self._cache_s:
                self._cached = await self._collect()
                self._taken_s = self._clock_s()
                self.totals.take(
                    one.snapshot for one in self._cached.instances if one.snapshot is not None
                )
                said = (one.stats for one in self._cached.instances if one.stats is not None)
                self.rates.take(said, self._taken_s)
                if self._history.is_due(self._taken_s):
                    lookups = lookups_by_host(self._cached, self.rates)
                    self._history.take(lookups, self._taken_s)
            return self._cached

    async def follow(self) -> None:
        """Ask the fleet regularly, so that the first request finds rates.

        Also remember services that leave the registry.
        """
        forget = self._registry.watch(lambda event: self._gone.take(event, self._clock_s()))
        try:
            while True:
                await self.view()
                await asyncio.sleep(FOLLOW_S)
        finally:
            forget()

    def gone(self) -> list[GoneView]:
        """Return the services that have gone since this one started."""
        now_s = self._clock_s()
        return gone_views(self._gone.of(now_s), now_s)

    def usages(self) -> dict[str, Usage]:
        """Return how full the table of services that have gone is."""
        return {"gone_services": self._gone.usage()}

    def history(self, host: str) -> list[HistoryPoint]:
        """Return the points of the last hour of a host, or of all; oldest first."""
        return self._history.of(host, self._clock_s())

    async def ask_index(self, verb: str, request: msgspec.Struct, codec: JsonCodec[Reply]) -> Reply:
        """Ask any index.

        Raises RequestFailed (the index's refusal), BusUnavailable, DeadlineExceeded, WireError.
        """
        return codec.decode(await self.ask_index_raw(verb, msgspec.json.encode(request)))

    async def ask_index_raw(self, verb: str, payload: bytes) -> bytes:
        """Ask any index; return its answer undecoded. Raises as `ask_index`, but no WireError."""
        return await ask_any(
            self._bus,
            verb_subject("index", verb),
            payload,
            by_name=functools.partial(self._indexes, verb),
            patience_s=ANY_DEADLINE_S,
            deadline_s=MATCH_DEADLINE_S,
        )

    async def _indexes(self, verb: str) -> list[str]:
        """Return the subjects of a verb of every replica of the index."""
        return [
            verb_subject("index", verb, host=record.host, instance=record.instance)
            for record in await self.records()
            if record.kind == "index"
        ]

    async def records(self) -> Sequence[ServiceRecord]:
        """Return all registered instances; raises RegistryUnavailable when nothing is known."""
        error = await self._refresh_records()
        if error and not self._records:
            raise RegistryUnavailable(error)
        return self._records

    async def records_and_lost(self) -> tuple[Sequence[ServiceRecord], list[ServiceRecord]]:
        """Return all registered instances, and those that went silent; raises as `records`."""
        lost_before = self._gone.lost(self._clock_s())
        records = await self.records()
        return records, self._lost(lost_before, asked_now=records)

    async def to_ask(self, kinds: Container[str]) -> tuple[list[ServiceRecord], list[str]]:
        """Return the registered instances of some kinds, and the keys of those that went silent,
        each with `lost`; raises as `records`."""
        records, lost = await self.records_and_lost()
        silent = [f"{one.key}: lost" for one in lost if one.kind in kinds]
        return [one for one in records if one.kind in kinds], silent

    def restarting(self) -> list[ServiceRecord]:
        """Return the tiers that left just now, and may come back with what they held."""
        return self._gone.restarting(self._clock_s())

    async def forget(self, host: str) -> int:
        """Forget the lost services of a host; return how many.

        Raises StillThere unless NATS says of each of them that nothing answers for it;
        RegistryUnavailable.
        """
        if error := await self._refresh_records():
            raise RegistryUnavailable(error)
        found = self._lost((), asked_now=self._records)
        lost = [record for record in found if record.host == host]
        answers = await asyncio.gather(
            *(self._ask_verb(record, "stats", self._stats_codec) for record in lost)
        )
        for record, answer in zip(lost, answers, strict=True):
            # One that hangs, or says what cannot be read, may come back with all its blocks.
            if not isinstance(answer.error, NoResponder):
                raise StillThere(f"{record.key} may be there: {answer.error or 'it answers'}")
        self._cached = None
        return self._gone.forget(lost)

    async def ask_instance(
        self, record: ServiceRecord, verb: str, request: msgspec.Struct, codec: JsonCodec[Reply]
    ) -> Reply:
        """Ask one instance a verb for an operator; raises as `ask_index`."""
        subject = verb_subject(record.kind, verb, host=record.host, instance=record.instance)
        payload = await self._bus.request(
            subject, msgspec.json.encode(request), deadline_s=OPERATOR_DEADLINE_S
        )
        return codec.decode(payload)

    async def _collect(self) -> FleetView:
        # A service may come back, or be lost, while the registry is read: it must not be missing.
        lost_before = self._gone.lost(self._clock_s())
        registry_error = await self._refresh_records()
        records = self._records  # Other questions may read the registry again meanwhile.
        async with asyncio.TaskGroup() as tasks:
            asked = [
                tasks.create_task(self._ask(record), name=f"ask {record.key}") for record in records
            ]
        return FleetView(
            instances=with_names([task.result() for task in asked]),
            connected=self._bus.connected,
            registry_error=registry_error,
            lost=self._lost(lost_before, asked_now=records),
        )

    def _lost(
        self, before: Iterable[ServiceRecord], asked_now: Iterable[ServiceRecord]
    ) -> list[ServiceRecord]:
        """Return the services that fell silent, without those that were just asked."""
        lost = {one.key: one for one in (*before, *self._gone.lost(self._clock_s()))}
        for record in asked_now:
            lost.pop(record.key, None)
        return list(lost.values())

    async def _refresh_records(self) -> str:
        """Read the registry; if that fails keep the last entries, and return why."""
        try:
            if not self._bus.connected:
                raise RegistryUnavailable("not reachable without NATS")
            async with asyncio.timeout(self._deadline_s):
                records = await self._registry.list()
        except RegistryUnavailable as error:
            return str(error)
        except TimeoutError:
            return f"no answer within {self._deadline_s} s"
        services = (record for record in records if record.kind != ENGINE)
        self._records = sorted(services, key=lambda one: (one.kind, one.host, one.instance))
        return ""

    async def _ask(self, record: ServiceRecord) -> Instance:
        async with self._room, asyncio.TaskGroup() as tasks:
            stats = tasks.create_task(self._ask_verb(record, "stats", self._stats_codec))
            snapshot = tasks.create_task(self._ask_verb(record, "metrics", self._metrics_codec))
        said, error = stats.result()
        counted = snapshot.result().message
        return Instance(
            record=record,
            stats=said,
            snapshot=_named(record, counted) if counted is not None else None,
            # A refusal is an answer too: the instance is up, though not ready.
            up=said is not None or isinstance(error, RequestFailed),
            failure=str(error or ""),
        )

    async def _ask_verb(
        self, record: ServiceRecord, verb: str, codec: JsonCodec[Reply]
    ) -> _Answer[Reply]:
        subject = verb_subject(record.kind, verb, host=record.host, instance=record.instance)
        question = msgspec.json.encode(StatsRequest())
        try:
            payload = await self._bus.request(subject, question, deadline_s=self._deadline_s)
            return _Answer(codec.decode(payload), None)
        except KvbmError as error:
            self._failures.labels(service=record.kind, verb=verb, code=error.label).inc()
            return _Answer(None, error)


def _named(record: ServiceRecord, snapshot: MetricsSnapshot) -> MetricsSnapshot:
    """Rename a snapshot as the registry knows its service, whatever it calls itself."""
    return msgspec.structs.replace(
        snapshot, kind=record.kind, host=record.host, instance=record.instance
    )
