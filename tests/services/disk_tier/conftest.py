"""What the tests of buckets share."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from kvbm_common.runtime.processes import free_port

from tests.services.disk_tier.s3_server import Proxy, S3Server
from tests.services.disk_tier.swift_server import SwiftServer, is_installed


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """One server for all tests that do not kill it."""
    server = S3Server(free_port(), tmp_path_factory.mktemp("moto") / "log")
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="session")
def swift(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SwiftServer]:
    """Another server, of another kind, which takes a while to start."""
    if not is_installed():
        pytest.skip("needs swift-proxy, swift-account, swift-container, swift-object, memcached")
    server = SwiftServer(tmp_path_factory.mktemp("swift"))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def mortal_s3(tmp_path: Path) -> Iterator[S3Server]:
    """A server that a test may kill; not started."""
    server = S3Server(free_port(), tmp_path / "log")
    yield server
    server.kill()


@pytest.fixture
def bucket_name(s3: S3Server) -> str:
    """An empty bucket."""
    return s3.make_bucket()


@pytest.fixture
async def proxy(s3: S3Server) -> AsyncIterator[Proxy]:
    """In front of the shared server."""
    proxy = Proxy(s3.port)
    server = await proxy.serve()
    yield proxy
    server.close()
    proxy.drop()
