"""The registry: which services live, and the epoch of each life. On a NATS KV bucket.

A service owns the key `services.<kind>.<host>.<instance>` and puts it again every third of its time
to live. Readers watch all keys and judge by their own clock: who is silent for `ttl_s` has left.
While the watch itself is broken no service is declared dead; afterwards each gets a full `ttl_s`,
and as much again as others may need to find NATS once it is back.

An epoch names one life of a service. It is `created + revision`, where `created` is when the bucket
was made (µs since 1970) and `revision` is that of a key put at birth; so it grows with every life,
even if NATS loses its store and the revisions start again (they grow by far less than one per µs).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Iterable

import msgspec

from kvbm_common.errors import KvbmError, NoResponder, RegistryUnavailable
from kvbm_common.nats.event_message import EventMessage
from kvbm_common.nats.event_subscription import EventSubscription
from kvbm_common.nats.jetstream import (
    BACKOFF_S,
    JetStreamError,
    Link,
    ensure_stream,
    publish_acknowledged,
)
from kvbm_common.nats.streams import REGISTRY, REGISTRY_BUCKET
from kvbm_common.registry.records import (
    ENGINE,
    Changed,
    Info,
    Joined,
    Left,
    RegistryEvent,
    ServiceRecord,
)
from kvbm_common.registry.services import (
    LIST_DEADLINE_S,
    SWEEPS_PER_TTL,
    HeldEntry,
    Registry,
    ServiceRegistration,
    WatchedRegistry,
)
from kvbm_common.runtime.logs import OncePerKind
from kvbm_common.wire.codec import UNREADABLE

__all__ = [
    "ENGINE",
    "Changed",
    "Info",
    "Joined",
    "Left",
    "NatsRegistration",
    "NatsRegistry",
    "Registry",
    "RegistryEvent",
    "ServiceRecord",
    "ServiceRegistration",
]

PREFIX = f"$KV.{REGISTRY_BUCKET}."
DELETE = {"KV-Operation": "DEL"}
WRONG_REVISION = frozenset((10071, 10164))
"""The server's error codes for a key that another client has written."""

_log = OncePerKind(logging.getLogger(__name__))


class NatsRegistry(WatchedRegistry):
    """A registry on NATS KV. Use it in one event loop."""

    def __init__(self, link: Link, *, ttl_s: float) -> None:
        assert ttl_s > 0
        super().__init__()
        self._link = link
        self._ttl_s = ttl_s
        self._records: dict[str, ServiceRecord] = {}
        self._seen_s: dict[str, float] = {}
        self._subscription: EventSubscription | None = None

    async def register(
        self, kind: str, host: str, instance: str, info: Info | None = None
    ) -> NatsRegistration:
        """Enter, and stay entered by heartbeats; raises RegistryUnavailable."""
        try:
            bucket = await ensure_stream(self._link, REGISTRY)
            life = await publish_acknowledged(
                self._link, REGISTRY, f"{PREFIX}lives.{kind}.{host}.{instance}", b""
            )
            record = ServiceRecord(
                kind=kind,
                host=host,
                instance=instance,
                epoch=int(bucket.created.timestamp() * 1e6) + life.seq,
                pid=os.getpid(),
                started_ms=int(time.time() * 1000),
                ttl_s=self._ttl_s,
                info=info or {},
            )
            registration = NatsRegistration(self._link, record)
            await registration.put(take_over=True)
        except KvbmError as error:
            raise RegistryUnavailable(f"cannot register: {error}") from error
        self._keep(registration)
        return registration

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
        if self._subscription is not None:
            await self._subscription.close()

    def _begin_watching(self) -> None:
        self._start_watching()

    def _present(self) -> Iterable[ServiceRecord]:
        return list(self._records.values())

    def _start_watching(self) -> EventSubscription:
        if self._subscription is None:
            self._subscription = EventSubscription(
                self._link, REGISTRY, subject=f"{PREFIX}services.>", start="last_per_subject"
            )
            self._tasks = [
                asyncio.create_task(self._read(self._subscription), name="registry watch"),
                asyncio.create_task(self._sweep_often(), name="registry sweep"),
            ]
        return self._subscription

    async def _read(self, subscription: EventSubscription) -> None:
        async for batch in subscription:
            for message in batch:
                self._take(message)

    def _take(self, message: EventMessage) -> None:
        key = message.subject.removeprefix(f"{PREFIX}services.")
        before = self._records.get(key)
        if not message.payload:  # A delete marker.
            self._leave(key, "deleted")
            return
        try:
            record = msgspec.json.decode(message.payload, type=ServiceRecord)
        except UNREADABLE as error:
            _log.warning("bad_record", f"{key}: {error}")
            return
        if record.key != key:
            _log.warning("bad_record", f"{key} names another service: {record.key}")
            return
        self._records[key] = record
        self._seen_s[key] = time.monotonic()
        if before is None:
            self._tell(Joined(record))
        elif before != record:
            self._tell(Changed(before, record))

    async def _sweep_often(self) -> None:
        while True:
            await asyncio.sleep(self._ttl_s / SWEEPS_PER_TTL)
            self._sweep()

    def _sweep(self) -> None:
        """Declare the silent ones gone, unless it is us who cannot hear."""
        now_s = time.monotonic()
        if self._subscription is None or not self._subscription.live or not self._link.connected:
            self._seen_s = dict.fromkeys(self._seen_s, now_s + BACKOFF_S[-1])
            return
        for key, record in list(self._records.items()):
            if now_s - self._seen_s[key] > record.ttl_s:
                self._leave(key, "expired")

    def _leave(self, key: str, reason: str) -> None:
        record = self._records.pop(key, None)
        self._seen_s.pop(key, None)
        if record is not None:
            self._tell(Left(record, reason))


class NatsRegistration(HeldEntry):
    """An entry in the bucket."""

    def __init__(self, link: Link, record: ServiceRecord) -> None:
        super().__init__(record)
        self._link = link
        self._revision = 0
        self._reconnected = asyncio.Event()
        self._forget_reconnect = link.on_reconnect(self._reconnected.set)

    async def stop(self) -> None:
        """End the heartbeats without leaving."""
        self._forget_reconnect()
        await super().stop()

    async def update(self, info: Info) -> None:
        """Say something else from now on; raises RegistryUnavailable."""
        self._record = msgspec.structs.replace(self._record, info=info)
        try:
            await self._renew()
        except KvbmError as error:
            raise RegistryUnavailable(f"cannot update: {error}") from error

    async def revoke(self) -> None:
        """Leave. Does what it can when the registry is away; readers see the silence."""
        await self.stop()
        if self._lost.is_set():
            return
        try:
            await publish_acknowledged(self._link, REGISTRY, self._subject, b"", headers=DELETE)
        except KvbmError as error:
            _log.warning("revoke", f"{self._record.key} will expire: {error}")

    async def put(self, *, take_over: bool) -> None:
        """Write the record; unless `take_over`, only over our own last revision.

        Raises JetStreamError, BusUnavailable, DeadlineExceeded.
        """
        headers = None
        if not take_over:
            headers = {"Nats-Expected-Last-Subject-Sequence": str(self._revision)}
        payload = msgspec.json.encode(self._record)
        acknowledged = await publish_acknowledged(
            self._link, REGISTRY, self._subject, payload, headers=headers
        )
        self._revision = acknowledged.seq

    @property
    def _subject(self) -> str:
        return f"{PREFIX}services.{self._record.key}"

    async def _beat(self) -> None:
        while not self._lost.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._reconnected.wait(), self._record.ttl_s / 3)
            self._reconnected.clear()
            try:
                await self._renew()
            except KvbmError as error:
                _log.warning("heartbeat", f"{self._record.key}: {error}")

    async def _renew(self) -> None:
        try:
            await self.put(take_over=False)
        except NoResponder:
            # The bucket is gone, with all entries; no service can be ahead of us.
            await ensure_stream(self._link, REGISTRY)
            await self.put(take_over=True)
        except JetStreamError as error:
            if error.server_code not in WRONG_REVISION:
                raise
            await self._settle()

    async def _settle(self) -> None:
        """Write the entry again if it is gone with the bucket, or yield to a newer process."""
        other = await self._read_entry()
        if other is None or other.epoch <= self.epoch:
            await self.put(take_over=True)
        else:
            _log.warning("superseded", f"{self._record.key}: process {other.pid} took over")
            self._lost.set()

    async def _read_entry(self) -> ServiceRecord | None:
        # The key is in the subject, so that a role may read its own keys in this way and no other.
        subject = f"$JS.API.DIRECT.GET.{REGISTRY.name}.{self._subject}"
        reply = await self._link.request_raw(subject, b"", deadline_s=1.0)
        if self._link.guarded and not REGISTRY.is_marked(reply.block):
            return None
        try:
            return msgspec.json.decode(reply.payload, type=ServiceRecord)
        except UNREADABLE:
            return None  # Not there (an empty reply with a status), or without an owner.
