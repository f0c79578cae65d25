"""Fixtures: a host tier on the test's own NATS, and an engine that is attached to it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from kvbm_common.config.settings import Settings
from kvbm_common.nats.bus import Bus
from kvbm_common.nats.embedded_server import NatsServer

from tests.services.host_tier.engine import RealEngine
from tests.services.host_tier.running import ARENA_GB, TTL_S, living, wait_ready


@pytest.fixture
def settings(nats_server: NatsServer, tmp_path: Path) -> Settings:
    """Sockets and the arena in directories of the test."""
    shm = tmp_path / "shm"
    shm.mkdir()
    return Settings.load(
        {},
        {
            "nats_url": nats_server.url,
            "host": "h",
            "registry_ttl_s": TTL_S,
            "runtime_dir": str(tmp_path),
            "shm_dir": str(shm),
            "cpu_cache_gb": ARENA_GB,
        },
    )


@pytest.fixture
async def host(settings: Settings, bus: Bus) -> AsyncIterator[None]:
    """A running host tier."""
    async with living(settings):
        await wait_ready(bus)
        yield


@pytest.fixture
async def engine(settings: Settings, host: None) -> AsyncIterator[RealEngine]:
    """An engine that is attached to it."""
    async with RealEngine.living(settings) as engine:
        yield engine
