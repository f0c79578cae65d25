"""Registries: their interface, and how an entry is held by heartbeats."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import platform
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Protocol

from kvbm_common.registry.records import (
    Info,
    Joined,
    RegistryEvent,
    ServiceRecord,
    require_believable,
)
from kvbm_common.runtime.logs import OncePerKind

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""All containers of a machine read the same here; each boot makes another one."""
NAME_MAX = 64
"""Characters of a machine's name: longer ones are cut."""
LIST_DEADLINE_S = 3.0
"""The deadline of the first reading of a registry, in seconds."""
FAILURES = "registry_callback_failures_total"
"""Events that a callback could not take."""

_log = OncePerKind(logging.getLogger(__name__))


class ServiceRegistration(Protocol):
    """The entry of one living service."""

    @property
    def record(self) -> ServiceRecord:
        """Return what is registered now."""

    @property
    def epoch(self) -> int:
        """Return this life's number; see `nats_kv.py`."""

    @property
    def lost(self) -> asyncio.Event:
        """Set when another life of the same service has taken the entry over."""

    @property
    def lost_to(self) -> str:
        """Return who has taken the entry over, for the log; empty before that."""

    async def update(self, info: Info) -> None:
        """Say something else from now on; raises RegistryUnavailable."""

    async def revoke(self) -> None:
        """Leave. Does what it can when the registry is away; readers see the silence."""


class Registry(Protocol):
    """The services that are alive, as every registry tells them."""

    @property
    def counts(self) -> Mapping[str, int]:
        """Return what this reader counts; see `runtime/metrics.py`."""

    @property
    def unreadable(self) -> asyncio.Event:
        """Set when a task that reads the registry has ended: nothing is heard any more."""

    async def register(
        self, kind: str, host: str, instance: str, info: Info | None = None
    ) -> ServiceRegistration:
        """Enter, and stay entered by heartbeats; raises RegistryUnavailable."""

    async def list(self, kind: str | None = None) -> list[ServiceRecord]:
        """Return the live services (of one kind); raises RegistryUnavailable."""

    def watch(self, callback: Callable[[RegistryEvent], None]) -> Callable[[], None]:
        """Call back for each service that is there (Joined), then for every change.

        Returns the function that ends it.
        """

    async def close(self) -> None:
        """End the watch and all heartbeats, without leaving."""


def record_of_life(
    kind: str, host: str, instance: str, epoch: int, ttl_s: float, info: Info | None
) -> ServiceRecord:
    """Return the entry of a life of this process; raises RegistryUnavailable for a wild epoch."""
    now_s = time.time()
    require_believable(epoch, now_s)
    return ServiceRecord(
        kind=kind,
        host=host,
        instance=instance,
        epoch=epoch,
        pid=os.getpid(),
        started_ms=int(now_s * 1000),
        ttl_s=ttl_s,
        info=info or {},
        reads_packed=True,
        machine=machine_digest(),
        machine_name=platform.node()[:NAME_MAX],
    )


@functools.cache
def machine_digest() -> str:
    """Return a digest of what tells this running kernel from others; empty if it is not known."""
    try:
        return blake2b(BOOT_ID.read_bytes().strip(), digest_size=8).hexdigest()
    except OSError:
        return ""


def superseded_text(own: ServiceRecord, other: ServiceRecord) -> str:
    """Return a line for the log: who has taken an entry over, and why if it is another machine."""
    text = f"{own.key}: process {other.pid} took over"
    if not own.machine or not other.machine or own.machine == other.machine:
        return f"{text}; if it is no restart, two stacks have KVBM_HOST={own.host}"
    return (
        f"{text} on another machine, {other.machine_name or 'without a name'}: this one, "
        f"{own.machine_name or 'without a name'}, has the same KVBM_HOST={own.host}; give each "
        "its own, or they end each other without end"
    )


class HeldEntry:
    """The entry of one living service, renewed by a task of its own: what is alike everywhere."""

    def __init__(self, record: ServiceRecord) -> None:
        self._record = record
        self._lost = asyncio.Event()
        self._lost_to = ""
        self._task: asyncio.Task[None] | None = None
        self._forget: Callable[[HeldEntry], None] | None = None

    @property
    def record(self) -> ServiceRecord:
        """Return what is registered now."""
        return self._record

    @property
    def epoch(self) -> int:
        """Return this life's number; see `nats_kv.py`."""
        return self._record.epoch

    @property
    def lost(self) -> asyncio.Event:
        """Set when another life of the same service has taken the entry over."""
        return self._lost

    @property
    def lost_to(self) -> str:
        """Return who has taken the entry over, for the log; empty before that."""
        return self._lost_to

    def _lose(self, other: ServiceRecord) -> None:
        """Yield to a newer life of the same service."""
        assert other.epoch > self.epoch, f"{self._record.key}: {other.epoch} is no newer life"
        self._lost_to = superseded_text(self._record, other)
        _log.warning("superseded", self._lost_to)
        self._lost.set()

    def start(self, forget: Callable[[HeldEntry], None]) -> None:
        """Begin to send the heartbeats; `forget` is called when they end."""
        self._forget = forget
        self._task = asyncio.create_task(self._beat(), name=f"heartbeat {self._record.key}")

    async def stop(self) -> None:
        """End the heartbeats without leaving."""
        task, self._task = self._task, None  # Its error refers to this entry: a cycle.
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        if self._forget is not None:
            self._forget(self)

    async def _beat(self) -> None:
        """Renew the entry until it is lost."""
        raise NotImplementedError


class WatchedRegistry:
    """The callbacks and the heartbeats of one reader: what is alike in every registry."""

    def __init__(self) -> None:
        self._callbacks: list[Callable[[RegistryEvent], None]] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._unreadable = asyncio.Event()
        self._counts: Counter[str] = Counter({FAILURES: 0})
        self._registrations: set[HeldEntry] = set()
        """The registrations whose heartbeats have not ended."""

    @property
    def counts(self) -> Mapping[str, int]:
        """Return what this reader counts; see `runtime/metrics.py`."""
        return self._counts

    @property
    def unreadable(self) -> asyncio.Event:
        """Set when a task that reads the registry has ended: nothing is heard any more."""
        return self._unreadable

    def watch(self, callback: Callable[[RegistryEvent], None]) -> Callable[[], None]:
        """Call back for each service that is there (Joined), then for every change."""
        self._begin_watching()
        self._callbacks.append(callback)
        for record in self._present():
            self._call(callback, Joined(record))

        def forget() -> None:
            if callback in self._callbacks:
                self._callbacks.remove(callback)

        return forget

    def _keep(self, registration: HeldEntry) -> None:
        """Start the heartbeats of an entry, and know it until they end."""
        self._registrations.add(registration)
        registration.start(self._ended)

    def _ended(self, registration: HeldEntry) -> None:
        """Forget an entry whose heartbeats have ended."""
        self._registrations.discard(registration)

    async def close(self) -> None:
        """End the watch and all heartbeats, without leaving."""
        for registration in list(self._registrations):
            await registration.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _tell(self, event: RegistryEvent) -> None:
        for callback in list(self._callbacks):
            self._call(callback, event)

    def _call(self, callback: Callable[[RegistryEvent], None], event: RegistryEvent) -> None:
        """Call back; what it raises ends neither the reading nor the other callbacks."""
        try:
            callback(event)
        except Exception as error:  # Whatever it is: the others are told.
            self._counts[FAILURES] += 1
            _log.warning(f"callback_{type(error).__name__}", f"{event.record.key}: {error}")

    def _read_by(self, work: Coroutine[None, None, None], name: str) -> None:
        """Start a task that reads the registry; its end is seen."""
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(self._reader_ended)
        self._tasks.append(task)

    def _reader_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            _log.warning(f"{task.get_name()} ended", f"by {task.exception()!r}")
            self._unreadable.set()

    def _begin_watching(self) -> None:
        """Start the tasks that read the registry, once."""
        raise NotImplementedError

    def _present(self) -> Iterable[ServiceRecord]:
        """Return the services that are there."""
        raise NotImplementedError
