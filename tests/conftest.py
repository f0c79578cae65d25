"""Fixtures for tests on the real NATS. A server of its own for each test: it starts in 30 ms."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from kvbm_common.bus import Bus
from kvbm_common.nats_server import NatsServer


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """The developer's own KVBM variables do not reach a test."""
    for name in list(os.environ):
        if name.startswith(("DYN_KVBM_", "KVBM_")):
            monkeypatch.delenv(name)


@pytest.fixture
async def nats_server(tmp_path: Path) -> AsyncIterator[NatsServer]:
    """A running nats-server with JetStream and an empty store; tests may kill and start it."""
    async with NatsServer(tmp_path / "nats") as server:
        yield server


@pytest.fixture
async def nats_url(nats_server: NatsServer) -> str:
    """Where the test's own NATS is."""
    return nats_server.url


@pytest.fixture
async def bus(nats_url: str) -> AsyncIterator[Bus]:
    """A connection to the test's own NATS."""
    connection = await Bus.connect(nats_url, "test")
    yield connection
    await connection.close()
