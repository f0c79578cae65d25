"""The registry on etcd: entries under leases; see registry.py for what a registry promises.

A service writes `kvbm/registry/services/<kind>.<host>.<instance>` under a lease and renews the
lease every third of its time to live. When it leaves it empties the entry before the lease ends, so
a deletion that comes without that means silence. Readers list once and watch from there; every
third of their time to live they ask etcd for something else, because a dead watch looks like a
quiet one. While etcd is away no service is declared dead. Afterwards a missing entry has a full
time to live, and as much again as its owner may need to find etcd, to come back.

An epoch is `created + revision`: `created` is written once per store (µs since 1970), `revision` is
that of a key put at birth if `created` was still the same. After the loss of a store the first
service that finds it empty writes `created` again; a survivor raises it above its own epoch. A
store restored from a backup may repeat epochs: delete `kvbm/registry/` after that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterable

import msgspec

from kvbm_common.access.etcd_access import OPEN, EtcdAccess
from kvbm_common.errors import RegistryUnavailable
from kvbm_common.nats.jetstream import BACKOFF_S
from kvbm_common.registry.etcd_client import (
    CALL_DEADLINE_S,
    Change,
    Compacted,
    EtcdClient,
    EtcdEntry,
    Watch,
)
from kvbm_common.registry.presence import Presence
from kvbm_common.registry.records import (
    Info,
    RegistryEvent,
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

PREFIX = "kvbm/registry/"
SERVICES = f"{PREFIX}services/"
CREATED = f"{PREFIX}created"
BIRTHS = f"{PREFIX}births"
BEATS_PER_TTL = 3
TRIES_MAX = 8
"""Tries of a write that others are faster at: two lives of a service rarely start at once."""
SWEEPS_PER_TTL = 10
REVOKE_DEADLINE_S = 1.0
"""Deadline of both calls that leave: a process that stops has four seconds in all."""

_log = OncePerKind(logging.getLogger(__name__))


class EtcdRegistry(WatchedRegistry):
    """A registry on etcd. Use it in one event loop."""

    def __init__(
        self,
        servers: tuple[str, ...],
        *,
        ttl_s: float,
        deadline_s: float = CALL_DEADLINE_S,
        access: EtcdAccess = OPEN,
    ) -> None:
        assert ttl_s > 0
        super().__init__()
        self._client = EtcdClient(servers, deadline_s=deadline_s, access=access)
        self._ttl_s = ttl_s
        self._presence = Presence(grace_s=BACKOFF_S[-1], warn=_log.warning)
        self._listed = asyncio.Event()
        self._created: bytes | None = None
        """The identity of the store that the position belongs to; None: list before the next
        watch."""
        self._position = 0
        self._tries = 0

    async def register(
        self, kind: str, host: str, instance: str, info: Info | None = None
    ) -> EtcdRegistration:
        """Enter, and stay entered by heartbeats; raises RegistryUnavailable."""
        key = f"{kind}.{host}.{instance}"
        epoch = await _begin_life(self._client, key)
        record = record_of_life(kind, host, instance, epoch, self._ttl_s, info)
        registration = EtcdRegistration(self._client, record, await self._client.grant(self._ttl_s))
        await registration.enter()
        self._keep(registration)
        return registration

    async def list(self, kind: str | None = None) -> list[ServiceRecord]:
        """Return the live services (of one kind); raises RegistryUnavailable."""
        self._begin_watching()
        try:
            async with asyncio.timeout(LIST_DEADLINE_S):
                await self._listed.wait()
        except TimeoutError as error:
            raise RegistryUnavailable("cannot read the registry: etcd is away") from error
        return [record for record in self._presence.records.values() if kind in (None, record.kind)]

    async def close(self) -> None:
        """End the watch and all heartbeats, without leaving."""
        await super().close()
        await self._client.close()

    def _begin_watching(self) -> None:
        if not self._tasks:
            self._read_by(self._follow(), "registry watch")
            self._read_by(self._sweep_often(), "registry sweep")

    def _present(self) -> Iterable[ServiceRecord]:
        return list(self._presence.records.values())

    async def _follow(self) -> None:
        while True:
            try:
                await self._follow_until_broken()
            except Compacted:
                self._created = None
            except RegistryUnavailable as error:
                _log.warning("watch", f"{error}; trying again")
            self._presence.outage()
            pause_s = BACKOFF_S[min(self._tries, len(BACKOFF_S) - 1)]
            self._tries += 1
            await asyncio.sleep(pause_s)

    async def _follow_until_broken(self) -> None:
        """Go on where we were, if it is still the same store; else list all services."""
        created, revision = await _ensure_created(self._client)
        self._presence.contact(time.monotonic())
        if created.value != self._created or revision < self._position:
            await self._list_all()
            self._created = created.value
        watch = await self._client.watch(SERVICES, self._position + 1)
        probe = asyncio.create_task(self._probe(watch), name="registry probe")
        self._tries = 0
        try:
            while True:
                for change in await watch.next():
                    self._take(change)
        finally:
            probe.cancel()
            watch.cancel()

    async def _list_all(self) -> None:
        reading = await self._client.list(SERVICES)
        payloads = {entry.key.removeprefix(SERVICES): entry.value for entry in reading.entries}
        self._tell_all(self._presence.replace(payloads, time.monotonic()))
        self._position = reading.revision
        self._listed.set()

    def _take(self, change: Change) -> None:
        key = change.key.removeprefix(SERVICES)
        if change.value is None:
            self._tell_all(self._presence.remove(key, time.monotonic()))
        else:
            self._tell_all(self._presence.put(key, change.value))
        self._position = change.revision

    async def _probe(self, watch: Watch) -> None:
        """End a watch on a server that does not answer."""
        with contextlib.suppress(RegistryUnavailable):
            while True:
                await asyncio.sleep(self._ttl_s / BEATS_PER_TTL)
                await self._client.get(CREATED)
        watch.cancel()

    async def _sweep_often(self) -> None:
        while True:
            await asyncio.sleep(self._ttl_s / SWEEPS_PER_TTL)
            self._tell_all(self._presence.sweep(time.monotonic()))

    def _tell_all(self, events: Iterable[RegistryEvent]) -> None:
        for event in events:
            self._tell(event)


class EtcdRegistration(HeldEntry):
    """An entry under a lease."""

    def __init__(self, client: EtcdClient, record: ServiceRecord, lease: int) -> None:
        super().__init__(record)
        self._client = client
        self._lease = lease
        self._revision = 0
        """The revision of our last write; 0: the entry is not what we say."""
        self._turn = asyncio.Lock()

    async def update(self, info: Info) -> None:
        """Say something else from now on; raises RegistryUnavailable."""
        self._record = msgspec.structs.replace(self._record, info=info)
        self._revision = 0
        await self._renew()

    async def revoke(self) -> None:
        """Leave. Does what it can when the registry is away; readers see the silence."""
        await self.stop()
        try:
            async with asyncio.timeout(REVOKE_DEADLINE_S):
                if not self._lost.is_set():
                    await self._put(b"", self._revision)
                await self._client.revoke(self._lease)
        except (RegistryUnavailable, TimeoutError) as error:
            _log.warning("revoke", f"{self._record.key} will expire: {error}")

    async def enter(self) -> None:
        """Write the record, unless a later life has written its own; raises RegistryUnavailable."""
        for _ in range(TRIES_MAX):
            entry = (await self._client.get(self._key)).entry
            other = _record_of(entry)
            if other is not None and other.epoch > self.epoch:
                self._lose(other)
                return
            record = self._record
            written = await self._put(msgspec.json.encode(record), entry.revision if entry else 0)
            if written is not None:
                self._revision = written.revision if record is self._record else 0
                return
        raise RegistryUnavailable(f"others keep writing {self._key}")

    @property
    def _key(self) -> str:
        return f"{SERVICES}{self._record.key}"

    async def _put(self, payload: bytes, revision: int) -> EtcdEntry | None:
        return await self._client.put_if(self._key, revision, self._key, payload, lease=self._lease)

    async def _beat(self) -> None:
        pause_s, failures = self._record.ttl_s / BEATS_PER_TTL, 0
        while not self._lost.is_set():
            await asyncio.sleep(pause_s)
            pause_s = self._record.ttl_s / BEATS_PER_TTL
            try:
                await self._renew()
                failures = 0
            except RegistryUnavailable as error:
                _log.warning("heartbeat", f"{self._record.key}: {error}")
                # Two calls that wait for an election, and their pauses, must not outlast the lease.
                pause_s = min(pause_s, BACKOFF_S[min(failures, len(BACKOFF_S) - 1)])
                failures += 1

    async def _renew(self) -> None:
        """Renew the lease; where the lease or the entry is not as we left it, enter again."""
        async with self._turn:
            alive = await self._client.keep_alive(self._lease)
            entry = (await self._client.get(self._key)).entry
            if alive and entry is not None and entry.revision == self._revision:
                return
            if not alive:
                self._lease = await self._client.grant(self._record.ttl_s)
            # The store may be a new one; services that are born in it come after us.
            await _ensure_created(self._client, floor=self.epoch)
            await self.enter()


async def _begin_life(client: EtcdClient, key: str) -> int:
    """Return an epoch above all that came before; raises RegistryUnavailable."""
    for _ in range(TRIES_MAX):
        before = _record_of((await client.get(f"{SERVICES}{key}")).entry)
        floor = before.epoch if before else 0
        created, _revision = await _ensure_created(client, floor=floor)
        birth = await client.put_if(CREATED, created.revision, BIRTHS, key.encode())
        if birth is not None:
            return int(created.value) + birth.revision
    raise RegistryUnavailable("others keep changing when the registry was created")


async def _ensure_created(client: EtcdClient, *, floor: int = 0) -> tuple[EtcdEntry, int]:
    """Return when the store was made, and its revision: together no less than `floor`."""
    for _ in range(TRIES_MAX):
        reading = await client.get(CREATED)
        entry = reading.entry
        created = int(entry.value) if entry and entry.value.isdigit() else None
        if entry and created is not None and created + reading.revision >= floor:
            return entry, reading.revision
        value = str(max(time.time_ns() // 1000, floor)).encode()
        await client.put_if(CREATED, entry.revision if entry else 0, CREATED, value)
    raise RegistryUnavailable("others keep changing when the registry was created")


def _record_of(entry: EtcdEntry | None) -> ServiceRecord | None:
    """Return the service of an entry; None for no entry, one that says goodbye, or rubbish."""
    if entry is None:
        return None
    try:
        return msgspec.json.decode(entry.value, type=ServiceRecord)
    except UNREADABLE:
        return None
