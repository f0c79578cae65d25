"""An entry in the registry's NATS KV bucket, as the process that has made it keeps it: see
`nats_kv.py`.

    own heartbeats     the entry is written again every third of its time to live, together with
                       the others of its host
    held               the heartbeats of another entry of the process speak for it
    lost               a newer process has written it: it is left alone

When its holder has left or is lost, a held entry has heartbeats of its own again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

import msgspec

from kvbm_common.errors import KvbmError, NoResponder, RegistryUnavailable
from kvbm_common.nats.jetstream import (
    JetStreamError,
    Link,
    ensure_stream,
    publish_acknowledged,
)
from kvbm_common.nats.streams import REGISTRY, REGISTRY_BUCKET
from kvbm_common.registry.records import Info, ServiceRecord
from kvbm_common.registry.services import HeldEntry
from kvbm_common.runtime.logs import OncePerKind
from kvbm_common.runtime.pauses import pause_s
from kvbm_common.wire.codec import UNREADABLE

PREFIX = f"$KV.{REGISTRY_BUCKET}."
DELETE = {"KV-Operation": "DEL"}
EXPECTED = "Nats-Expected-Last-Subject-Sequence"
HELD_TTLS = 12
"""Times to live between two heartbeats of a held entry: they only mend a loss. Readers that know no
`held_by` take it for dead after three of them."""
MISSED_BEATS = 3
"""A service that has missed so many heartbeats is taken for dead."""
WRONG_REVISION = frozenset((10071, 10164))
"""The server's error codes for a key that another client has written."""

_log = OncePerKind(logging.getLogger("kvbm_common.registry.nats_kv"))


class NatsRegistration(HeldEntry):
    """An entry in the bucket."""

    def __init__(
        self, link: Link, record: ServiceRecord, holder: NatsRegistration | None = None
    ) -> None:
        """Prepare an entry with heartbeats of its own, or one whose `holder` has them."""
        super().__init__(record)
        self._link = link
        self._revision = 0
        self._own_ttl_s = record.ttl_s
        self._every_s = _heartbeat_s(record.ttl_s / MISSED_BEATS)
        self._woken = asyncio.Event()
        """An event that is set when the entry may have to be written again."""
        self._held: set[NatsRegistration] = set()
        self._undeleted: set[NatsRegistration] = set()
        """Entries that have left while the registry was away, or were written and not acknowledged:
        no silence says so, since the heartbeats of this one speak for them."""
        self._holder = holder
        if holder is not None:
            self._every_s = _heartbeat_s(record.ttl_s * HELD_TTLS)
            self._record = msgspec.structs.replace(
                record, ttl_s=MISSED_BEATS * self._every_s, held_by=holder.record.key,
                held_epoch=holder.epoch,
            )  # fmt: skip
            holder._held.add(self)
        self._forget_reconnect = link.on_reconnect(self._woken.set)
        self.has_left = False
        """True if its heartbeats have ended, though its process may live on."""

    async def stop(self) -> None:
        """End the heartbeats without leaving."""
        self._forget_reconnect()
        if self._holder is not None:
            self._holder._held.discard(self)
        await super().stop()

    def give_up(self) -> None:
        """End an entry that may be written and has no heartbeats yet: it was not acknowledged."""
        assert self._task is None, f"{self._record.key} is given up, and its heartbeats go on"
        self._forget_reconnect()
        self.has_left = True
        if self._holder is not None:
            self._holder._held.discard(self)
            self._holder._undeleted.add(self)

    def _wake_held(self) -> None:
        """Have each entry that this one holds renewed by itself."""
        for held in self._held:
            held._woken.set()

    async def update(self, info: Info) -> None:
        """Say something else from now on; raises RegistryUnavailable."""
        self._record = msgspec.structs.replace(self._record, info=info)
        try:
            await self._renew()
        except KvbmError as error:
            self._woken.set()  # The next heartbeat of a held entry may be minutes away.
            raise RegistryUnavailable(f"cannot update: {error}") from error

    async def revoke(self) -> None:
        """Leave. Does what it can when the registry is away; readers see the silence."""
        await self.stop()
        self.has_left = True
        self._wake_held()
        if self._lost.is_set():
            return
        try:
            await self._delete()
        except KvbmError as error:
            _log.warning("revoke", f"{self._record.key} will expire: {error}")
            if self._holder is not None:
                self._holder._undeleted.add(self)

    async def _delete(self) -> None:
        """Delete the entry, unless another process has written it since.

        Raises JetStreamError, BusUnavailable, DeadlineExceeded.
        """
        try:
            await self._delete_at(self._revision)
        except JetStreamError as error:
            if error.server_code not in WRONG_REVISION:
                raise
            other, revision = await self._read_entry()
            # Ours: it was written, and the acknowledgement was lost. None: the bucket is another
            # one, and readers of the one before would hear of no end.
            if other is None or other.epoch == self.epoch:
                await self._delete_unread(revision)

    async def _delete_unread(self, revision: int) -> None:
        """Delete the entry, if it is still as it was read."""
        await remove_entry(self._link, self._record.key, revision)

    async def _delete_at(self, revision: int) -> None:
        await _delete_entry(self._link, self._record.key, revision)

    async def put(self, *, take_over: bool) -> None:
        """Write the record; unless `take_over`, only over our own last revision.

        Raises JetStreamError, BusUnavailable, DeadlineExceeded.
        """
        headers = None
        if not take_over:
            headers = {EXPECTED: str(self._revision)}
        payload = msgspec.json.encode(self._record)
        acknowledged = await publish_acknowledged(
            self._link, REGISTRY, self._subject, payload, headers=headers
        )
        self._revision = acknowledged.seq

    @property
    def _next_beat_in_s(self) -> float:
        """Return how long to wait: all entries of a host are written at the same time, so that
        every reader wakes once for all of them."""
        return pause_s(self._every_s, of=self._record.host)

    @property
    def _subject(self) -> str:
        return f"{PREFIX}services.{self._record.key}"

    async def _beat(self) -> None:
        next_s = self._next_beat_in_s
        while not self._lost.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(next_s):
                    await self._woken.wait()
            self._woken.clear()
            if self._holder is not None and self._holder.has_left:
                self._holder = None
                self._every_s = _heartbeat_s(self._own_ttl_s / MISSED_BEATS)
                self._record = msgspec.structs.replace(
                    self._record, ttl_s=self._own_ttl_s, held_by="", held_epoch=0
                )
            next_s = self._next_beat_in_s
            try:
                await self._renew()
                for gone in list(self._undeleted):
                    await gone._delete()
                    self._undeleted.discard(gone)
            except KvbmError as error:
                next_s = min(next_s, self._own_ttl_s / MISSED_BEATS)
                _log.warning("heartbeat", f"{self._record.key}: {error}")

    async def _renew(self) -> None:
        try:
            await self.put(take_over=False)
        except NoResponder:
            # The bucket is gone, with all entries; no service can be ahead of us.
            await ensure_stream(self._link, REGISTRY)
            await self.put(take_over=True)
            self._wake_held()
        except JetStreamError as error:
            if error.server_code not in WRONG_REVISION:
                raise
            await self._settle()

    async def _settle(self) -> None:
        """Write the entry again if it is gone with the bucket, or yield to a newer process."""
        other, _ = await self._read_entry()
        if other is None or other.epoch <= self.epoch:
            await self.put(take_over=True)
        else:
            self._lose(other)
            self.has_left = True
        self._wake_held()

    async def _read_entry(self) -> tuple[ServiceRecord | None, int]:
        """Return what the registry has under this key, and its revision; None: nothing."""
        # The key is in the subject, so that a role may read its own keys in this way and no other.
        subject = f"$JS.API.DIRECT.GET.{REGISTRY.name}.{self._subject}"
        reply = await self._link.request_raw(subject, b"", deadline_s=1.0)
        if self._link.guarded and not REGISTRY.is_marked(reply.block):
            return None, 0
        try:
            record = msgspec.json.decode(reply.payload, type=ServiceRecord)
        except UNREADABLE:
            return None, 0  # Not there (an empty reply with a status), or without an owner.
        return record, int(reply.headers.get("Nats-Sequence", 0))


async def remove_entry(link: Link, key: str, revision: int) -> None:
    """Delete an entry, if it is still as it was read.

    Raises JetStreamError, BusUnavailable, DeadlineExceeded.
    """
    assert revision >= 0, f"{key} was read at {revision}"
    try:
        await _delete_entry(link, key, revision)
    except JetStreamError as error:
        if error.server_code not in WRONG_REVISION:
            raise


async def _delete_entry(link: Link, key: str, revision: int) -> None:
    headers = DELETE | {EXPECTED: str(revision)}
    subject = f"{PREFIX}services.{key}"
    await publish_acknowledged(link, REGISTRY, subject, b"", headers=headers)


def _heartbeat_s(wanted_s: float) -> float:
    """Return how often an entry is written: so often that the bucket does not forget it."""
    return min(wanted_s, REGISTRY.age_max_s / MISSED_BEATS)
