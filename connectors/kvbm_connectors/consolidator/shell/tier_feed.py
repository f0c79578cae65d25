"""The tier feed: what the tiers of this host say on NATS, and their snapshots when asked for."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator

from kvbm_common.errors import KvbmError, NoResponder
from kvbm_common.nats.event_message import EventMessage
from kvbm_common.nats.snapshots import ask_snapshot
from kvbm_common.registry.records import Left, RegistryEvent
from kvbm_common.runtime.logs import OncePerKind
from kvbm_common.service.context import ServiceContext
from kvbm_common.wire.codec import WireError
from kvbm_common.wire.epochs import require_epoch
from kvbm_common.wire.events import SUBJECT_PREFIX, Event, Removed, Stored, Tier
from kvbm_common.wire.packed_events import events_on
from kvbm_common.wire.verbs import SnapshotRequest, verb_subject

from kvbm_connectors.consolidator.core.messages import (
    GoOn,
    Input,
    TierEvents,
    TierJoined,
    TierLeft,
    TierSnapshot,
    TierSnapshotFailed,
    TierStreamLost,
)

TIERS: dict[str, Tier] = {"host-tier": "host", "disk-tier": "disk", "object-tier": "object"}
"""The kinds of services that are tiers."""
STEP_BLOCKS = 2_048
"""Blocks of events for which the core takes a step, up to 4 µs each; one event may have more."""
SNAPSHOT_DEADLINE_S = 5.0
"""A million blocks take about a second to say."""

Take = Callable[[Input], Awaitable[None]]


class TierFeed:
    """One subscription per tier of this host; the registry says which there are."""

    def __init__(
        self,
        context: ServiceContext,
        *,
        tasks: asyncio.TaskGroup,
        take: Take,
        complete: Callable[[Input], None],
    ) -> None:
        self._context = context
        self._tasks = tasks
        self._take = take
        self._complete = complete
        self._followed: dict[str, asyncio.Task[None]] = {}
        self._forget: Callable[[], None] = lambda: None
        self._log = OncePerKind(logging.getLogger(__name__))
        self._dropped = context.counters.counter(
            "kvbm_consolidator_messages_dropped_total",
            "Messages of tiers that could not be read.",
            labels=("reason",),
        )

    def start(self) -> None:
        """Follow the tiers that are there, and those that come."""
        self._forget = self._context.registry.watch(self._changed)

    def close(self) -> None:
        """Stop following the tiers."""
        self._forget()
        for task in self._followed.values():
            task.cancel()

    async def ask(self, source: str) -> Input:
        """Ask a tier what it holds."""
        kind = next(kind for kind in TIERS if source.startswith(f"{kind}-"))
        instance = source.removeprefix(f"{kind}-")
        subject = verb_subject(kind, "snapshot", host=self._context.host, instance=instance)
        ask = functools.partial(self._context.bus.request, subject, deadline_s=SNAPSHOT_DEADLINE_S)
        try:
            reply = await ask_snapshot(ask, SnapshotRequest(source=source))
        except KvbmError as error:
            # A tier is in the registry before it serves, and is asked again.
            log = self._log.info if isinstance(error, NoResponder) else self._log.warning
            log(f"snapshot_{error.label}", f"{source}: {error}")
            return TierSnapshotFailed(source)
        if (reply.host, reply.source) != (self._context.host, source):
            return TierSnapshotFailed(source)
        return TierSnapshot(reply)

    async def go_on(self) -> None:
        """Have the core read and say more of the tiers, after the inputs that wait now."""
        await self._take(GoOn())

    def _changed(self, event: RegistryEvent) -> None:
        record = event.record
        if record.host != self._context.host or record.kind not in TIERS:
            return
        source = f"{record.kind}-{record.instance}"
        if isinstance(event, Left):
            if source in self._followed:
                self._followed.pop(source).cancel()
            self._complete(TierLeft(source, record.epoch))
            return
        if source not in self._followed:
            self._followed[source] = self._tasks.create_task(
                self._follow(source), name=f"events of {source}"
            )
        self._complete(TierJoined(source, TIERS[record.kind], record.epoch))

    async def _follow(self, source: str) -> None:
        """Follow a source from its last events on: what they lack, the snapshot has."""
        subscription = self._context.bus.event_subscription(
            start="last_per_subject",
            subject=f"{SUBJECT_PREFIX}.{self._context.host}.{source}.*",
            spec=self._context.events,
            on_stream_lost=lambda: self._complete(TierStreamLost(source)),
        )
        async with subscription:
            async for batch in subscription:
                events = (event for message in batch for event in self.events_of(message))
                for some in in_steps(events):
                    await self._take(TierEvents(some))

    def events_of(self, message: EventMessage) -> list[Event]:
        """Return the events of a message; none of one that cannot be believed, which is counted."""
        try:
            events = events_on(message.subject, message.payload)
            require_epoch(max((one.epoch for one in events), default=0), time.time())
        except WireError as error:
            self._dropped.labels(reason=error.kind).inc()
            self._log.warning(error.kind, f"{message.subject}: {error}")
            return []
        return events


def in_steps(events: Iterable[Event]) -> Iterator[tuple[Event, ...]]:
    """Yield events in parts, each for one step of the core; a part ends with STEP_BLOCKS blocks."""
    some: list[Event] = []
    blocks = 0
    for event in events:
        some.append(event)
        match event:
            case Stored(runs=runs):
                blocks += sum(len(run.hashes) for run in runs)
            case Removed(hashes=hashes):
                blocks += len(hashes)
        if blocks >= STEP_BLOCKS:
            yield tuple(some)
            some, blocks = [], 0
    if some:
        yield tuple(some)
