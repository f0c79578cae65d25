"""The lower tiers of this host, over NATS: events, what they hold, fills, and departed blocks."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable

import msgspec
from kvbm_common.errors import (
    BusUnavailable,
    DeadlineExceeded,
    KvbmError,
    NoResponder,
    RequestFailed,
)
from kvbm_common.nats.snapshots import ask_pages
from kvbm_common.runtime.logs import OncePerKind
from kvbm_common.runtime.loop import monotonic_ms
from kvbm_common.runtime.metrics import Counter
from kvbm_common.service.context import ServiceContext
from kvbm_common.wire.codec import JsonCodec, WireError
from kvbm_common.wire.epochs import require_epoch
from kvbm_common.wire.events import SUBJECT_PREFIX, Tier
from kvbm_common.wire.explain import fates_reply
from kvbm_common.wire.packed_events import events_on
from kvbm_common.wire.verbs import (
    FillReply,
    SnapshotRequest,
    verb_subject,
)

from kvbm_host_tier.core.lower_snapshot import LowerSnapshot
from kvbm_host_tier.core.lower_tiers import tier_of
from kvbm_host_tier.core.messages import (
    AskDepartures,
    AskFill,
    DeparturesTold,
    FillDone,
    FillFailed,
    LowerEventsLost,
    LowerTierEvent,
    LowerTierSnapshot,
)

FILL_MARGIN_S = 0.5
"""The time after a fill's deadline in which its answer may still arrive, in seconds."""
SNAPSHOT_DEADLINE_S = 5.0
FATES_DEADLINE_S = 1.0
"""The lower tier answers from memory; the core stops waiting a little later."""

log = logging.getLogger(__name__)
_fill_reply: JsonCodec[FillReply] = JsonCodec(FillReply)


class LowerTierClient:
    """Asks the disk and object tiers of one host, and hears them."""

    def __init__(self, context: ServiceContext, dropped: Counter) -> None:
        self._context = context
        self._dropped = dropped
        self._limiter = OncePerKind(log)

    async def follow(
        self, take: Callable[[LowerTierEvent], bool], lost: Callable[[LowerEventsLost], None]
    ) -> None:
        """Give every event of a lower tier of this host to `take`, until cancelled.

        Only new events come: snapshots have those of before. `take` returns False when it has no
        room. `lost` is called when the stream may have lost events.
        """
        subscription = self._context.bus.event_subscription(
            start="new",
            subject=f"{SUBJECT_PREFIX}.{self._context.host}.*.*",
            spec=self._context.events,
            on_stream_lost=lambda: lost(LowerEventsLost()),
        )
        async with subscription as events:
            async for batch in events:
                for message in batch:
                    self._events(message.subject, message.payload, take)

    def _events(self, subject: str, payload: bytes, take: Callable[[LowerTierEvent], bool]) -> None:
        source = subject.split(".")[-2]
        found = tier_of(source)
        if found is None:
            return
        tier, instance = found
        try:
            events = events_on(subject, payload)
            require_epoch(max((one.epoch for one in events), default=0), time.time())
        except WireError as error:
            self._dropped.labels(reason=error.kind).inc()
            self._limiter.warning(error.kind, f"an event on {subject} was dropped: {error}")
            return
        for event in events:
            if not take(LowerTierEvent(instance, event, tier)):
                self._dropped.labels(reason="inbox_full").inc()

    async def fill(self, effect: AskFill) -> FillDone | FillFailed:
        """Have a lower tier read blocks into lent slots."""
        if not self._context.bus.connected:
            # It was never sent: the slots are not lent, and an outage does not use up the arena.
            return FillFailed(effect.fill, BusUnavailable.code, settled=True)
        subject = self._verb(effect.tier, effect.instance, "fill")
        left_s = (effect.request.until_ms - monotonic_ms()) / 1000 + FILL_MARGIN_S
        try:
            payload = await self._context.bus.request(
                subject, msgspec.json.encode(effect.request), deadline_s=max(left_s, 0.01)
            )
            return FillDone(effect.fill, _fill_reply.decode(payload))
        except (NoResponder, RequestFailed, WireError) as error:
            return FillFailed(effect.fill, error.code or error.label, settled=True)
        except (DeadlineExceeded, BusUnavailable) as error:
            # The request may have left before the connection broke.
            return FillFailed(effect.fill, error.code, settled=False)

    async def snapshot(self, instance: str, tier: Tier) -> LowerTierSnapshot:
        """Ask an instance what it holds, and read it page by page; without an answer it is None."""
        ask = functools.partial(
            self._context.bus.request,
            self._verb(tier, instance, "snapshot"),
            deadline_s=SNAPSHOT_DEADLINE_S,
        )
        try:
            snapshot: LowerSnapshot | None = None
            async for page in ask_pages(ask, SnapshotRequest(source=f"{tier}-tier-{instance}")):
                snapshot = LowerSnapshot.of(page, before=snapshot)
            return LowerTierSnapshot(instance, snapshot, tier)
        except KvbmError as error:
            log.warning("no snapshot of %s tier %s: %s", tier, instance, error)
            return LowerTierSnapshot(instance, None, tier)

    def _verb(self, tier: Tier, instance: str, verb: str) -> str:
        return verb_subject(f"{tier}-tier", verb, host=self._context.host, instance=instance)

    async def fates(self, effect: AskDepartures) -> DeparturesTold:
        """Ask what became of blocks. Without an answer a miss is explained by what is known."""
        subject = self._verb(effect.tier, effect.instance, "fates")
        try:
            payload = await self._context.bus.request(
                subject, msgspec.json.encode(effect.request), deadline_s=FATES_DEADLINE_S
            )
            reply = fates_reply.decode(payload)
        except KvbmError as error:
            self._limiter.warning(error.label, f"{subject}: {error}")
            reply = None
        return DeparturesTold(effect.question, effect.instance, reply, effect.tier)
