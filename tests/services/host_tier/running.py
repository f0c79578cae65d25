"""A host tier in this event loop, and what it says of itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from kvbm_common.config.settings import Settings
from kvbm_common.errors import KvbmError
from kvbm_common.nats.bus import Bus
from kvbm_common.service.process import serve
from kvbm_common.wire.verbs import (
    SnapshotReply,
    StatsReply,
    verb_subject,
)
from kvbm_host_tier.shell import service

from tests.services.host_tier.engine import DEADLINE_S
from tests.waiting import ask_until

ARENA_GB = 0.001
"""A hundred slots."""
TTL_S = 1.0
replace = msgspec.structs.replace


@asynccontextmanager
async def living(settings: Settings) -> AsyncIterator[None]:
    """A host tier in this event loop."""
    stopping = asyncio.Event()
    life = asyncio.create_task(serve("host-tier", service.serve, settings, stopping))
    try:
        yield
    finally:
        stopping.set()
        assert await life == 0


ANY_SIZE = b'{"any_size":true}'
"""What this release asks for arena and door with; other verbs ignore it."""


async def ask(bus: Bus, verb: str, request: object = ANY_SIZE, *, host: str = "h") -> bytes:
    """A verb of the host tier."""
    payload = request if isinstance(request, bytes) else msgspec.json.encode(request)
    subject = verb_subject("host-tier", verb, host=host, instance="0")
    return await bus.request(subject, payload, deadline_s=5.0)


async def wait_ready(bus: Bus, *, host: str = "h") -> None:
    """Until it serves."""
    await ask_until(lambda: stats_of(bus, host=host), deadline_s=DEADLINE_S, despite=KvbmError)


async def stats_of(bus: Bus, *, host: str = "h") -> StatsReply:
    return msgspec.json.decode(await ask(bus, "stats", host=host), type=StatsReply)


async def held(bus: Bus, *, host: str = "h") -> set[int]:
    """What it holds by its own account."""
    payload = await ask(bus, "snapshot", {"source": "host-tier-0"}, host=host)
    snapshot = msgspec.json.decode(payload, type=SnapshotReply)
    return {int(h, 16) for part in snapshot.parts for run in part.runs for h in run.hashes}


async def wait_stats(bus: Bus, condition: Any, *, host: str = "h") -> StatsReply:
    """Until the figures are as they should be."""

    async def right() -> StatsReply | None:
        stats = await stats_of(bus, host=host)
        return stats if condition(stats) else None

    return await ask_until(right, deadline_s=DEADLINE_S)


async def counted(bus: Bus, family: str, label: str = "reason") -> dict[str, float]:
    """One family of counters, by label."""
    families = msgspec.json.decode(await ask(bus, "metrics"))["families"]
    samples = next(f["samples"] for f in families if f["name"] == family)
    return {s["labels"][label]: s["value"] for s in samples}
