"""The life of a service process: settings, logging, bus, registry, signals, and an orderly end.

A service is a function `async main(context)` that says `context.ready(…)` when it serves, and
returns soon after `context.stopping` is set. `run` does the rest.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from kvbm_common.access.etcd_access import etcd_access
from kvbm_common.access.http_access import service_access
from kvbm_common.access.nats_access import NatsAccess, nats_access
from kvbm_common.access.secret_files import make_private_directory
from kvbm_common.config.settings import Settings
from kvbm_common.errors import BusUnavailable, ConfigError, KvbmError, RegistryUnavailable
from kvbm_common.extras import needed_for
from kvbm_common.nats.bus import Bus
from kvbm_common.registry.event_form import EventForm
from kvbm_common.registry.nats_kv import NatsRegistry
from kvbm_common.registry.records import PARTITIONS_INFO, Info
from kvbm_common.registry.services import Registry, ServiceRegistration
from kvbm_common.runtime import logs
from kvbm_common.runtime.metrics import Metrics, metrics_of_counts
from kvbm_common.service import admin_verbs
from kvbm_common.service.context import ServiceContext
from kvbm_common.service.garbage import Garbage
from kvbm_common.service.http_port import http_port
from kvbm_common.tier.name_history import FACTORS_BYTES, set_factors
from kvbm_common.wire.operator_verbs import SERVICES

CONNECT_DEADLINE_S = 1.0
"""One try to reach NATS at start; tries go on until they succeed or the service is stopped."""
STOP_DEADLINE_S = 2.5
"""The time that `main` has after `stopping` to finish or abandon its work; then it is cancelled."""
LEAVE_DEADLINE_S = 1.0
"""The time that the registry has to delete this service's entry, in seconds."""
CANCEL_DEADLINE_S = 0.5
"""The time that a cancelled `main` has to clean up, in seconds."""
EXIT_DEADLINE_S = 4.0
"""After this a process that was told to stop ends at once, whatever still runs."""

BAD_SETTINGS = 2
"""The exit code of a service whose settings are wrong: another try would end the same."""

_log = logging.getLogger(__name__)


Main = Callable[[ServiceContext], Awaitable[None]]


def run(
    kind: str, main: Main, *, check: Callable[[Settings], None] = lambda settings: None
) -> None:
    """Run a service process to its end; exits with 0 when stopped, 2 for bad settings.

    `check` raises a KvbmError when this process must not even enter itself in the registry.
    """
    try:
        settings = Settings.load()
        make_runtime_dir(settings)
        refuse_open_doors(kind, settings)
        check(settings)
    except KvbmError as error:
        print(f"kvbm: {error}", file=sys.stderr)
        sys.exit(BAD_SETTINGS if isinstance(error, ConfigError) else 1)
    set_factors(os.urandom(FACTORS_BYTES))
    logs.set_up(f"{kind}-{settings.instance}", settings.log_level, settings.log_format)
    for warning in settings.warnings:
        _log.warning("%s", warning)
    sys.exit(asyncio.run(_run_until_signal(kind, main, settings)))


def refuse_open_doors(kind: str, settings: Settings) -> None:
    """Raise ConfigError for what a service would talk to, or open, without credentials."""
    nats_access(settings, kind)
    etcd_access(settings)
    if settings.service_port:
        service_access(settings)


async def _run_until_signal(kind: str, main: Main, settings: Settings) -> int:
    stopping = asyncio.Event()
    fuse = threading.Timer(EXIT_DEADLINE_S, os._exit, args=(70,))
    fuse.daemon = True

    def stop() -> None:
        if not stopping.is_set():
            stopping.set()
            fuse.start()

    loop = asyncio.get_running_loop()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signal_number, stop)
    place = SERVICES.index(kind) if kind in SERVICES else len(SERVICES)
    garbage = Garbage(name=settings.instance, place=place)
    garbage.start()
    walking = asyncio.create_task(garbage.run(), name="garbage")
    try:
        return await serve(kind, main, settings, stopping, garbage.settle)
    finally:
        walking.cancel()


async def serve(
    kind: str,
    main: Main,
    settings: Settings,
    stopping: asyncio.Event,
    settle: Callable[[], None] = lambda: None,
) -> int:
    """Run one life of a service in this event loop; return the exit code.

    `settle` is called when the service is ready.
    """
    life = asyncio.create_task(_live(kind, main, settings, stopping, settle), name=kind)
    stop = asyncio.create_task(stopping.wait(), name="stopping")
    await asyncio.wait({life, stop}, return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()
    await asyncio.wait({life}, timeout=STOP_DEADLINE_S)
    if not life.done():
        _log.warning("not stopped within %s s: cancelled", STOP_DEADLINE_S)
        life.cancel()
        await asyncio.wait({life}, timeout=CANCEL_DEADLINE_S)
    if not life.done() or life.cancelled():
        return 1
    return life.result()


@dataclass(slots=True)
class _Standing:
    """The readiness of a process: the answer of `/readyz`."""

    waits_for: str = "NATS"
    context: ServiceContext | None = None

    def unready_reasons(self) -> list[str]:
        """Return why the service does not serve; empty when it does."""
        if self.context is None:
            return [f"waiting for {self.waits_for}"]
        return self.context.unready_reasons()


async def _live(
    kind: str,
    main: Main,
    settings: Settings,
    stopping: asyncio.Event,
    settle: Callable[[], None],
) -> int:
    counters = Metrics()
    standing = _Standing()
    try:
        async with http_port(settings, counters.collect, standing.unready_reasons):
            return await _live_on_bus(kind, main, settings, stopping, counters, standing, settle)
    except ConfigError as error:
        _log.error("%s: %s", kind, error)
        return BAD_SETTINGS


async def _live_on_bus(
    kind: str,
    main: Main,
    settings: Settings,
    stopping: asyncio.Event,
    counters: Metrics,
    standing: _Standing,
    settle: Callable[[], None],
) -> int:
    name = f"kvbm-{kind}-{settings.host}-{settings.instance}"
    bus = await _connect(nats_access(settings, kind), name, counters, stopping)
    if bus is None:
        return 0
    standing.waits_for = "the registry"
    registry = make_registry(settings, bus)
    try:
        registration = await _register(kind, registry, settings, stopping)
        if registration is None:
            return 0
        context = ServiceContext(
            settings=settings,
            kind=kind,
            bus=bus,
            registry=registry,
            registration=registration,
            counters=counters,
            stopping=stopping,
            settle=settle,
        )
        counters.include(context.footprint.collect)
        counters.include(context.bounds.collect)
        counters.include(lambda: metrics_of_counts(registry.counts))
        context.bounds.declare(context.footprint.usages)
        standing.context = context
        form = EventForm(packed=settings.events_form == "packed")
        bus.packs_events = form.packs
        forget = registry.watch(form.take)
        try:
            return await _run_main(main, context)
        finally:
            forget()
            await _leave(registration)
    finally:
        await registry.close()
        await bus.close()


async def _connect(
    access: NatsAccess, name: str, counters: Metrics, stopping: asyncio.Event
) -> Bus | None:
    limiter = logs.OncePerKind(_log)
    while not stopping.is_set():
        try:
            return await Bus.connect(access, name, counters=counters, deadline_s=CONNECT_DEADLINE_S)
        except BusUnavailable as error:
            limiter.warning("connect", f"{error}; trying again")
    return None


def make_registry(settings: Settings, bus: Bus) -> Registry:
    """Make the registry that the settings name. It connects when it is used.

    Raises ConfigError for an etcd that would be talked to in the open, or whose extra is missing.
    """
    if not settings.etcd_servers:
        return NatsRegistry(bus, ttl_s=settings.registry_ttl_s)
    with needed_for("KVBM_REGISTRY_URL", "etcd"):
        from kvbm_common.registry.etcd import EtcdRegistry  # Brings grpc: only where it is wanted.

    return EtcdRegistry(
        settings.etcd_servers, ttl_s=settings.registry_ttl_s, access=etcd_access(settings)
    )


async def _register(
    kind: str, registry: Registry, settings: Settings, stopping: asyncio.Event
) -> ServiceRegistration | None:
    limiter = logs.OncePerKind(_log)
    while not stopping.is_set():
        try:
            count = settings.index_partitions
            said: Info | None = {PARTITIONS_INFO: count} if count > 1 else None
            return await registry.register(kind, settings.host, settings.instance, said)
        except RegistryUnavailable as error:
            limiter.warning("register", f"{error}; trying again")
            await asyncio.sleep(CONNECT_DEADLINE_S / 4)
    return None


async def _leave(registration: ServiceRegistration) -> None:
    """Leave the registry; a slow one does not hold up our end, because the entry expires."""
    try:
        async with asyncio.timeout(LEAVE_DEADLINE_S):
            await registration.revoke()
    except TimeoutError:
        _log.warning("%s will expire: the registry does not answer", registration.record.key)


async def _run_main(main: Main, context: ServiceContext) -> int:
    """Run `main` until it returns; a lost place in the registry or on the bus stops it too."""
    log_level = context.audit.audited("log_level", admin_verbs.answer_log_level)
    verbs = {
        "stats": context.answer_stats,
        "metrics": context.answer_metrics,
        "log_level": log_level,
    }
    await context.add_verbs(verbs)
    failures: list[str] = []

    async def watch(event: asyncio.Event, text: str) -> None:
        await event.wait()
        failures.append(context.registration.lost_to or text)
        _log.error("%s; stopping", failures[-1])
        context.stopping.set()

    watchers = [
        asyncio.create_task(watch(context.registration.lost, "another process took over")),
        asyncio.create_task(watch(context.registry.unreadable, "the registry is read no more")),
        asyncio.create_task(watch(context.bus.closed_by_server, "NATS refuses this client")),
    ]
    try:
        await main(context)
    except KvbmError as error:
        # A mistake outside of this process, which the text names: a traceback would not help.
        _log.error("%s: %s", context.source, error)
        return 1
    except Exception:
        _log.exception("%s failed", context.source)
        return 1
    finally:
        for watcher in watchers:
            watcher.cancel()
    return 1 if failures else 0


def make_runtime_dir(settings: Settings) -> None:
    """Make the directory of the sockets; raises ConfigError if it belongs to another user."""
    make_private_directory(settings.runtime_dir, "KVBM_RUNTIME_DIR")
