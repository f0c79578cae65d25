"""A NATS with credentials for two hosts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.security.guarded_nats import GuardedNats, guarded_nats


@pytest.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[GuardedNats]:
    """A server with credentials for two hosts."""
    async with guarded_nats(tmp_path) as running:
        yield running
