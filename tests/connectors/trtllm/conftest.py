"""Fixtures: one stack for all engines of a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.vllm.harness import LiveStack, live_stack


def pytest_itemcollected(item: pytest.Item) -> None:
    """Stacks are killed here, and the NATS client leaves the sockets of lost connections open."""
    ignored = "ignore::pytest.PytestUnraisableExceptionWarning"
    item.add_marker(pytest.mark.filterwarnings(ignored))


@pytest.fixture(scope="module")
def stack() -> Iterator[LiveStack]:
    """NATS, a consolidator, an index and a host tier, in processes of their own.

    Without the scrubber: where the tests' process waits for a core, it finds wrong bytes first.
    """
    with live_stack({"cpu_cache_gb": 0.05, "scrub_cpu_percent": 0}) as stack:
        yield stack
