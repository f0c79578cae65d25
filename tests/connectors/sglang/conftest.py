"""Fixtures: a real host tier and consolidator, and what attaches to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from kvbm_connectors.sglang.options import Options, Stream
from kvbm_connectors.sglang.storage import Storage

from tests.connectors.sglang.pool import Config, Pool
from tests.vllm.harness import LiveStack, live_stack

PATIENCE_MS = 10_000
Attach = Callable[..., Storage]


def pytest_itemcollected(item: pytest.Item) -> None:
    """Stacks are killed here, and the NATS client leaves the sockets of lost connections open."""
    ignored = "ignore::pytest.PytestUnraisableExceptionWarning"
    item.add_marker(pytest.mark.filterwarnings(ignored))


@pytest.fixture(scope="module")
def stack() -> Iterator[LiveStack]:
    """What offers and lookups need, and nothing else."""
    with live_stack({"cpu_cache_gb": 0.05}, ("consolidator", "host-tier")) as stack:
        yield stack


@pytest.fixture
def attach(stack: LiveStack) -> Iterator[Attach]:
    """Attach a storage with some pools: the first argument is the KV pool."""
    made: list[Storage] = []

    def attach(
        pool: Pool, config: Config | None = None, *, wait: bool = True, extra: Any = None,
        **pools: Pool,
    ) -> Storage:  # fmt: skip
        settings = stack.settings
        options = {
            "interface_v1": 1,
            "runtime_dir": str(settings.runtime_dir),
            "state_dir": str(settings.state_dir),
            "onboard_deadline_ms": PATIENCE_MS,
            "offer_deadline_ms": PATIENCE_MS,
        } | (extra or {})
        config = replace(config or Config(), extra_config=options)
        storage = Storage(config, Options.read(options), Stream())
        made.append(storage)
        storage.register(pool, "kv")
        for name, further in pools.items():
            storage.register(further, name)
        storage.start()
        assert not wait or storage.wait_attached(15)
        return storage

    yield attach
    for storage in made:
        storage.close()
