"""The metrics service as a process: the fleet, the HTTP server, an orderly end."""

from __future__ import annotations

import asyncio
import functools
import socket
from importlib.metadata import version

import msgspec
from kvbm_common.access.http_access import api_access, refuse_open_api
from kvbm_common.config.settings import Settings
from kvbm_common.service import process as service
from kvbm_common.service.context import ServiceContext
from kvbm_common.service.http_port import open_listener
from kvbm_common.wire.admin import ForgetReply, ForgetRequest
from kvbm_common.wire.codec import JsonCodec
from kvbm_common.wire.verbs import StatsReply

from kvbm_metrics.core import history
from kvbm_metrics.shell.api import create_app
from kvbm_metrics.shell.audit_log import AuditLog
from kvbm_metrics.shell.fleet import Fleet
from kvbm_metrics.shell.http_server import HttpServer
from kvbm_metrics.shell.jobs import Jobs
from kvbm_metrics.shell.state import Api

KIND = "metrics"
ANSWERS_BYTES = 160 << 20
"""Jobs, audit, rates, and pages while they are put together for the connections that there are."""
BACKLOG = 128

_forget_request: JsonCodec[ForgetRequest] = JsonCodec(ForgetRequest)


def main() -> None:
    """Run until stopped; the entry point of `kvbm serve metrics`."""
    service.run(KIND, serve, check=refuse_open_api)


async def serve(context: ServiceContext) -> None:
    """Serve HTTP until `context.stopping`; raises ConfigError when the port cannot be opened."""
    settings = context.settings
    with open_socket(settings) as listener:
        fleet = Fleet(context.bus, context.registry, context.counters, since_epoch=context.epoch)
        jobs, audit = Jobs(), AuditLog(context.counters)
        api = Api(
            fleet=fleet,
            expected=expected_kinds(settings),
            version=version("kvbm-metrics"),
            expose_metrics=settings.metrics,
            access=api_access(settings),
            jobs=jobs,
            audit=audit,
        )
        server = HttpServer(create_app(api, context.counters), context.counters)
        context.set_stats(lambda: _stats(context, server))
        context.footprint.declare(lambda: {"answers": ANSWERS_BYTES, "history": history.BYTES_MAX})
        context.bounds.declare(lambda: fleet.usages() | {"jobs": jobs.usage()})
        forget = functools.partial(_forget, fleet)
        await context.add_verbs({"forget": context.audit.audited("forget", forget)})
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


async def _forget(fleet: Fleet, payload: bytes) -> bytes:
    """Answer the verb `forget`; raises as `Fleet.forget`, and WireError."""
    forgotten = await fleet.forget(_forget_request.decode(payload).lost_host)
    return msgspec.json.encode(ForgetReply(forgotten=forgotten))


def _shown(address: str) -> str:
    return f"[{address}]" if ":" in address else address
