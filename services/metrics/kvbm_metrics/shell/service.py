"""The metrics service as a process: the fleet, the HTTP server, an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from importlib.metadata import version

import uvicorn
from kvbm_common.access.http_access import api_access, refuse_open_api
from kvbm_common.config.settings import Settings
from kvbm_common.service import process as service
from kvbm_common.service.http_port import open_listener
from kvbm_common.service.process import ServiceContext
from kvbm_common.wire.verbs import StatsReply

from kvbm_metrics.core import history
from kvbm_metrics.shell.api import create_app
from kvbm_metrics.shell.audit_log import AuditLog
from kvbm_metrics.shell.fleet import Fleet
from kvbm_metrics.shell.jobs import Jobs
from kvbm_metrics.shell.state import Api

KIND = "metrics"
ANSWERS_BYTES = 160 << 20
"""Jobs, audit, rates, and pages while they are put together for the connections that there are."""
CONNECTIONS_MAX = 256
"""Connections served at the same time; uvicorn answers 503 to more."""
BACKLOG = 128
TICK_S = 1.0
STOP_DEADLINE_S = 1
"""How long answers on their way may take after the signal to stop."""


class HttpServer(uvicorn.Server):
    """uvicorn in a process that owns its signals, with a door bell."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_up = asyncio.Event()
        self._ended = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals alone: uvicorn would take them over and raise them again at its end."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and say so."""
        await super().startup(sockets)
        self.is_up.set()

    async def main_loop(self) -> None:
        """Do once a second what uvicorn does ten times: it looks for the end, and `end` is heard at
        once."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), TICK_S)

    def end(self) -> None:
        """Have `serve` finish what is on its way, and return."""
        self.should_exit = True
        self._ended.set()


def main() -> None:
    """Run until stopped; the entry point of `kvbm serve metrics`."""
    service.run(KIND, serve, check=refuse_open_api)


async def serve(context: ServiceContext) -> None:
    """Serve HTTP until `context.stopping`; raises ConfigError when the port cannot be opened."""
    settings = context.settings
    with open_socket(settings) as listener:
        fleet = Fleet(context.bus, context.registry, context.counters)
        jobs, audit = Jobs(), AuditLog()
        api = Api(
            fleet=fleet,
            expected=expected_kinds(settings),
            version=version("kvbm-metrics"),
            expose_metrics=settings.metrics,
            access=api_access(settings),
            jobs=jobs,
            audit=audit,
        )
        server = HttpServer(_http_config(create_app(api, context.counters)))
        context.set_stats(lambda: _stats(context, server))
        context.footprint.declare(lambda: {"answers": ANSWERS_BYTES, "history": history.BYTES_MAX})
        context.bounds.declare(lambda: fleet.fills() | {"jobs": jobs.fill()})
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(server.serve(sockets=[listener]), name="http")
            following = [
                tasks.create_task(audit.run(context.bus), name="audit"),
                tasks.create_task(fleet.follow(), name="rates"),
            ]
            serving.add_done_callback(lambda _: context.stopping.set())
            await server.is_up.wait()
            context.ready(f"http://{_shown(settings.metrics_bind)}:{settings.metrics_port}")
            await context.stopping.wait()
            await jobs.close()
            for task in following:
                task.cancel()
            server.end()


def open_socket(settings: Settings) -> socket.socket:
    """Listen where the settings say; raises ConfigError that names the setting at fault."""
    return open_listener(
        settings.metrics_bind,
        settings.metrics_port,
        address_variable="KVBM_METRICS_BIND",
        port_variable="DYN_KVBM_METRICS_PORT",
        backlog=BACKLOG,
    )


def expected_kinds(settings: Settings) -> tuple[str, ...]:
    """Return the services without which the system is not ready."""
    kinds = ["index", "host-tier", "disk-tier", KIND]
    if settings.object_enabled:
        kinds.append("object-tier")
    if settings.consolidator_enabled:
        kinds.append("consolidator")
    return tuple(kinds)


def _http_config(app: object) -> uvicorn.Config:
    return uvicorn.Config(
        app,  # type: ignore[arg-type]  # uvicorn's own Protocols are narrower than ASGI.
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        limit_concurrency=CONNECTIONS_MAX,
        timeout_graceful_shutdown=STOP_DEADLINE_S,
    )


def _stats(context: ServiceContext, server: HttpServer) -> StatsReply:
    ready = server.is_up.is_set()
    return StatsReply(
        kind=KIND,
        host=context.host,
        instance=context.instance,
        epoch=context.epoch,
        ready=ready,
        reasons=[] if ready else ["the HTTP server is starting"],
    )


def _shown(address: str) -> str:
    return f"[{address}]" if ":" in address else address
