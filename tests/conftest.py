"""Fixtures for tests on the real NATS and etcd: servers of its own for each test."""

from __future__ import annotations

import gc
import logging
import os
import ssl
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import certifi
import hypothesis
import pytest
from kvbm_common.cuda import measure
from kvbm_common.nats.bus import Bus
from kvbm_common.nats.embedded_server import NatsServer

from tests.etcd_server import EtcdServer

# A busy machine makes an example late, which is nobody's mistake.
hypothesis.settings.register_profile("kvbm", deadline=None)
hypothesis.settings.load_profile("kvbm")

LONG = (
    "sim/test_simulation", "security/test_closed_by_default", "examples/test_routing_proxy",
    "integration/test_document_commands", "objects/test_odd_answers",
    "integration/test_modes", "registry/test_nats_kv",
    "examples/test_disagg_proxy", "index/test_zones", "nats/test_zone_sources",
    "examples/test_launch_scripts", "integration/test_sharding", "vllm/test_document",
)  # fmt: skip
"""Modules of `make test` that take 20 s or more. Side by side with others they begin first: one
that begins last is waited for alone."""


def pytest_collection() -> None:
    """Leave all that is collected alone: to look for garbage in it takes half of the time."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Look for garbage again, and only in what the tests themselves make."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests of long modules first, in their order."""
    order = {name: number for number, name in enumerate(LONG)}

    def place(item: pytest.Item) -> int:
        folder, _, name = item.path.with_suffix("").as_posix().rpartition("/")
        return order.get(f"{folder.rpartition('/')[2]}/{name}", len(order))

    items.sort(key=place)


@pytest.fixture(autouse=True, scope="session")
def _own_state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The credentials and stores of a developer's own `kvbm up` do not reach a test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(autouse=True, scope="session")
def _one_authority(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Where this process would trust all public authorities, it trusts one of them: all take 50 ms
    for each client of httpx to read, and a test asks this machine only."""
    end = "-----END CERTIFICATE-----\n"
    first = Path(certifi.where()).read_text().partition(end)[0]
    one = tmp_path_factory.mktemp("authorities") / "one.pem"
    one.write_text(first + end)
    everyone = {certifi.where(), os.environ.get("SSL_CERT_FILE", "")}
    create = ssl.create_default_context

    def created(
        purpose: ssl.Purpose = ssl.Purpose.SERVER_AUTH, *, cafile: str | None = None, **more: Any
    ) -> ssl.SSLContext:
        return create(purpose, cafile=str(one) if cafile in everyone else cafile, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", created)
        yield


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """The developer's own KVBM variables do not reach a test, nor CI's options of pytest a pytest
    that a test runs."""
    for name in list(os.environ):
        if name.startswith(("DYN_KVBM_", "KVBM_", "PYTEST_ADDOPTS")):
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def _log_levels() -> Iterator[None]:
    """A test that sets up a service's logs, or silences ours, leaves the next ones their levels."""
    before = {logger: logger.level for logger in _loggers()}
    yield
    for logger in _loggers():
        if logger.level != (level := before.get(logger, logging.NOTSET)):
            logger.setLevel(level)


def _loggers() -> Iterator[logging.Logger]:
    yield logging.getLogger()
    ours = [name for name in list(logging.root.manager.loggerDict) if name.startswith("kvbm")]
    yield from map(logging.getLogger, ours)


@pytest.fixture
def small_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device is measured with a megabyte: the figures of one that is no device are nothing."""
    monkeypatch.setattr(measure, "MOVED_BYTES", 1 << 20)


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


@pytest.fixture
async def etcd_server() -> AsyncIterator[EtcdServer]:
    """A running etcd with an empty store; tests may kill, empty and start it.

    In memory, where there is such a place: a busy disk makes etcd late, which is not the subject.
    """
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="kvbm-etcd-", dir=memory) as directory:
        server = EtcdServer(Path(directory))
        await server.start()
        yield server
        server.kill()
