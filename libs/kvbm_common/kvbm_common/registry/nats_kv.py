"""The registry: which services live, and the epoch of each life. On a NATS KV bucket.

A service owns the key `services.<kind>.<host>.<instance>` and puts it again every third of its time
to live. Readers watch all keys and judge by their own clock: who is silent for `ttl_s` has left.
While the watch itself is broken, or nothing at all is heard, not even that the stream is idle, no
service is declared dead; afterwards each gets a full `ttl_s`,
and as much again as others may need to find NATS once it is back. Time in which the reader itself
did not run counts as no one's silence.

Every reader gets every heartbeat, so a process has one: its first entry speaks for the others,
which name it in `held_by`. Most entries are engines, which are held by their consolidator's.

An epoch names one life of a service. It is `created + revision`, where `created` is when the bucket
was made (µs since 1970) and `revision` is that of a key put at birth; so it grows with every life,
even if NATS loses its store and the revisions start again (they grow by far less than one per µs).
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Iterable

import msgspec

from kvbm_common.errors import KvbmError, RegistryUnavailable
from kvbm_common.nats.consumers import HEARTBEAT_S, HEARTBEAT_S_MIN
from kvbm_common.nats.event_message import EventMessage
from kvbm_common.nats.event_subscription import BATCH_MAX, EventSubscription
from kvbm_common.nats.jetstream import (
    BACKOFF_S,
    Link,
    ensure_stream,
    publish_acknowledged,
)
from kvbm_common.nats.streams import REGISTRY
from kvbm_common.registry.nats_entry import PREFIX, NatsRegistration, remove_entry
from kvbm_common.registry.records import (
    Changed,
    Info,
    Joined,
    Left,
    ServiceRecord,
)
from kvbm_common.registry.services import (
    LIST_DEADLINE_S,
    HeldEntry,
    WatchedRegistry,
    record_of_life,
)
from kvbm_common.runtime.logs import OncePerKind
from kvbm_common.wire.codec import UNREADABLE

GATHER_S, CROWDED, CROWDED_S = 0.1, 8, 1.0
"""A reader that has taken `CROWDED` batches of heartbeats alone within `CROWDED_S` waits `GATHER_S`
after each, so that the next batch has several."""
SWEEPS_PER_TTL = 2.5
SWEEP_S_MAX = 2.0
"""A reader looks so often for the silent, and however long its own time to live is: so seldom that
it is a heartbeat that wakes it. It looks at the very moment when an entry's time may be over."""
SWEEP_S_MIN = 0.01
"""The shortest pause between two looks."""
IDLE_PER_TTL = 0.34
"""The pause between two messages of an idle stream, as a part of the time to live. Its messages
come a little less often than heartbeats."""
LATE_PER_TTL, LATE_S_MAX = 0.1, 0.5
"""The delay of a look, or of an idle stream's message, from which on no one's silence counts."""
_log = OncePerKind(logging.getLogger(__name__))


class NatsRegistry(WatchedRegistry):
    """A registry on NATS KV. Use it in one event loop."""

    def __init__(self, link: Link, *, ttl_s: float) -> None:
        assert ttl_s > 0
        super().__init__()
        self._link = link
        self._ttl_s = ttl_s
        self._records: dict[str, ServiceRecord] = {}
        self._payloads: dict[str, bytes] = {}
        """The entries as they were read: most heartbeats repeat them."""
        self._seen_s: dict[str, float] = {}
        """Key → the time when its entry was heard last, by this reader's clock."""
        self._alone_ttl_s: dict[str, float] = {}
        """The time to live of held entries whose holder is not there: what the holder's was."""
        self._swept_s = time.monotonic()
        self._look_in_s = self._sweep_every_s
        """The time from `_swept_s` to the next look, at the latest."""
        self._sweep_timer: asyncio.TimerHandle | None = None
        self._lapsed: dict[str, tuple[ServiceRecord, float]] = {}
        """Held entries that expired, and when: they come back with their holder, and are forgotten
        when they would have come back by themselves."""
        self._holder: NatsRegistration | None = None
        """The first entry of this process that lives."""
        self._subscription: EventSubscription | None = None
        self._revisions: dict[str, int] = {}
        """The revision of each entry as it was last read."""
        self._removals: set[asyncio.Task[None]] = set()

    async def register(
        self, kind: str, host: str, instance: str, info: Info | None = None
    ) -> NatsRegistration:
        """Enter, and stay entered by heartbeats; raises RegistryUnavailable."""
        try:
            bucket = await ensure_stream(self._link, REGISTRY)
            life = await publish_acknowledged(
                self._link, REGISTRY, f"{PREFIX}lives.{kind}.{host}.{instance}", b""
            )
            epoch = int(bucket.created.timestamp() * 1e6) + life.seq
            record = record_of_life(kind, host, instance, epoch, self._ttl_s, info)
            holder = self._holder
            if holder is not None and holder.has_left:  # Another process has taken it over.
                self._holder = holder = None
            registration = NatsRegistration(self._link, record, holder)
            try:
                await registration.put(take_over=True)
            except BaseException:
                registration.give_up()
                raise
        except KvbmError as error:
            raise RegistryUnavailable(f"cannot register: {error}") from error
        if self._holder is None:
            self._holder = registration
        self._keep(registration)
        return registration

    def _ended(self, registration: HeldEntry) -> None:
        super()._ended(registration)
        if registration is self._holder:
            self._holder = None

    async def list(self, kind: str | None = None) -> list[ServiceRecord]:
        """Return the live services (of one kind); raises RegistryUnavailable."""
        subscription = self._start_watching()
        try:
            await subscription.wait_caught_up(deadline_s=LIST_DEADLINE_S)
        except KvbmError as error:
            raise RegistryUnavailable(f"cannot read the registry: {error}") from error
        self._sweep()
        return [record for record in self._records.values() if kind in (None, record.kind)]

    async def close(self) -> None:
        """End the watch and all heartbeats, without leaving."""
        await super().close()
        if self._sweep_timer is not None:
            self._sweep_timer.cancel()
        for removal in self._removals:
            removal.cancel()
        if self._subscription is not None:
            await self._subscription.close()

    def _begin_watching(self) -> None:
        self._start_watching()

    def _present(self) -> Iterable[ServiceRecord]:
        return list(self._records.values())

    def _start_watching(self) -> EventSubscription:
        if self._subscription is None:
            self._subscription = EventSubscription(
                self._link, REGISTRY, subject=f"{PREFIX}services.>", start="last_per_subject",
                heartbeat_s=self._idle_beat_s,
            )  # fmt: skip
            self._read_by(self._read(self._subscription), "registry watch")
            self._sweep_and_rearm()
        return self._subscription

    async def _read(self, subscription: EventSubscription) -> None:
        heard_s = deque[float](maxlen=CROWDED)
        async for batch in subscription:
            taken = [self._take(message) for message in batch]
            now_s = time.monotonic()
            # Here the process is awake anyway; and a new entry's time may be over soon.
            if any(taken) or now_s - self._swept_s > self._sweep_every_s / 2:
                self._sweep_and_rearm()
            if any(taken):
                continue
            heard_s.append(now_s)
            is_crowded = len(heard_s) == CROWDED and now_s - heard_s[0] < CROWDED_S
            if is_crowded and len(batch) < BATCH_MAX:  # Else more have come already.
                await asyncio.sleep(GATHER_S)

    def _take(self, message: EventMessage) -> bool:
        """Take an entry as it was written; False: a heartbeat, which says nothing new."""
        key = message.subject.removeprefix(f"{PREFIX}services.")
        before = self._records.get(key)
        self._revisions[key] = message.sequence
        self._lapsed.pop(key, None)
        if not message.payload:  # A delete marker.
            self._leave(key, "deleted")
            return True
        if message.payload == self._payloads.get(key):
            self._seen_s[key] = time.monotonic()
            return False
        try:
            record = msgspec.json.decode(message.payload, type=ServiceRecord)
        except UNREADABLE as error:
            _log.warning("bad_record", f"{key}: {error}")
            return True
        if record.key != key:
            _log.warning("bad_record", f"{key} names another service: {record.key}")
            return True
        self._records[key], self._payloads[key] = record, message.payload
        self._seen_s[key] = time.monotonic()
        if before is not None and before.epoch != record.epoch:
            self._count_holders_heartbeat(before)
        if before is None:
            self._tell(Joined(record))
            self._rejoin(record)
        elif before != record:
            self._tell(Changed(before, record))
        return True

    def _rejoin(self, holder: ServiceRecord) -> None:
        """Take back what an entry holds, whose heartbeats were missed."""
        for key, (record, _) in list(self._lapsed.items()):
            if record.held_by == holder.key:
                del self._lapsed[key]
                if record.held_epoch == holder.epoch:
                    self._records[key], self._seen_s[key] = record, time.monotonic()
                    self._tell(Joined(record))

    def _sweep_and_rearm(self) -> None:
        """Look for the silent now, and after a while: by a heartbeat or, without one, a timer."""
        if self._sweep_timer is not None:
            self._sweep_timer.cancel()
        left_s = 0.0
        try:
            left_s = self._sweep()
        finally:
            self._look_in_s = min(self._sweep_every_s, max(SWEEP_S_MIN, left_s))
            loop = asyncio.get_running_loop()
            self._sweep_timer = loop.call_later(self._look_in_s, self._sweep_and_rearm)

    @property
    def _sweep_every_s(self) -> float:
        return min(self._ttl_s / SWEEPS_PER_TTL, SWEEP_S_MAX)

    def _sweep(self) -> float:
        """Declare the silent ones gone, unless it is us who cannot hear; return the seconds until
        the next may have been silent for too long."""
        now_s, left_s = time.monotonic(), math.inf
        subscription, is_heard = self._subscription, False
        if subscription is not None and subscription.live and self._link.connected:
            is_heard = now_s - subscription.heard_s < self._idle_beat_s + self._late_s
        if not is_heard:
            self._seen_s = dict.fromkeys(self._seen_s, now_s + BACKOFF_S[-1])
            self._swept_s = now_s
            return left_s
        self._forgive(now_s)
        for key, record in list(self._records.items()):
            seen_s, ttl_s = self._seen_s[key], record.ttl_s
            if record.held_by:
                ttl_s = self._alone_ttl_s.get(key, self._ttl_s)
                holder = self._records.get(record.held_by)
                if holder is not None and holder.epoch == record.held_epoch:
                    seen_s, ttl_s = max(seen_s, self._seen_s[record.held_by]), holder.ttl_s
            if now_s - seen_s > ttl_s:
                self._leave(key, "expired")
            else:
                left_s = min(left_s, ttl_s - (now_s - seen_s))
        for key, (record, since_s) in list(self._lapsed.items()):
            if now_s - since_s > record.ttl_s:
                del self._lapsed[key]
        return left_s

    @property
    def _idle_beat_s(self) -> float:
        """Return how often an idle stream says so: less often than heartbeats come."""
        return min(HEARTBEAT_S, max(HEARTBEAT_S_MIN, IDLE_PER_TTL * self._ttl_s))

    @property
    def _late_s(self) -> float:
        return min(LATE_PER_TTL * self._ttl_s, LATE_S_MAX)

    def _forgive(self, now_s: float) -> None:
        """Count no time as silence in which this process did not run: it has heard nothing."""
        expected_s = self._look_in_s + self._late_s
        away_s = max(0.0, now_s - self._swept_s - expected_s)
        self._swept_s = now_s
        if away_s:
            for key, seen_s in self._seen_s.items():
                self._seen_s[key] = max(seen_s, min(now_s, seen_s + away_s))

    def _leave(self, key: str, reason: str) -> None:
        record = self._records.pop(key, None)
        revision = self._revisions.pop(key, 0)
        self._payloads.pop(key, None)
        self._alone_ttl_s.pop(key, None)
        if record is not None:
            if record.held_by and reason == "expired":
                self._lapsed[key] = record, time.monotonic()
            elif reason == "expired" and self._is_sibling(record):
                removal = asyncio.create_task(self._remove(key, revision), name=f"remove {key}")
                self._removals.add(removal)
                removal.add_done_callback(self._removals.discard)
            self._count_holders_heartbeat(record)
            del self._seen_s[key]
            self._tell(Left(record, reason))

    def _is_sibling(self, record: ServiceRecord) -> bool:
        """Tell whether an entry is another instance of a service that this process is on its host.

        A role may write such entries, and no others.
        """
        own = {(one.record.kind, one.record.host): one.record.key for one in self._registrations}
        return own.get((record.kind, record.host), record.key) != record.key

    async def _remove(self, key: str, revision: int) -> None:
        """Delete the entry of a dead sibling, unless it has been written since it was read.

        Every later reader would take it for alive until its time is over. One that lives after all
        enters again with its next heartbeat.
        """
        try:
            await remove_entry(self._link, key, revision)
        except KvbmError as error:
            _log.warning("removal", f"the entry of {key} stays for an hour: {error}")

    def _count_holders_heartbeat(self, holder: ServiceRecord) -> None:
        """Count an entry's last heartbeat for what it held, too: a consolidator that starts again
        enters its engines within its time to live."""
        for key, record in self._records.items():
            if record.held_by == holder.key:
                self._seen_s[key] = max(self._seen_s[key], self._seen_s[holder.key])
                self._alone_ttl_s[key] = holder.ttl_s
