"""Fixtures of the SGLang suite: a stack in a thread, ranks in processes of their own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.sglang.harness import PYTHON, RankProcess
from tests.vllm.harness import LiveStack, live_stack

StartRank = Callable[..., RankProcess]


def pytest_itemcollected(item: pytest.Item) -> None:
    """Stacks are killed here, and the NATS client leaves the sockets of lost connections open."""
    ignored = "ignore::pytest.PytestUnraisableExceptionWarning"
    item.add_marker(pytest.mark.filterwarnings(ignored))


@pytest.fixture(scope="session", autouse=True)
def environment() -> None:
    """`make test-sglang` makes the environment, and says that nothing may be skipped."""
    if not PYTHON.exists() and "KVBM_TEST_SGLANG" not in os.environ:
        pytest.skip("`make test-sglang` makes the environment")


@pytest.fixture(scope="module")
def stack() -> Iterator[LiveStack]:
    """Host memory and disk, and who is told of it."""
    tiers = {"cpu_cache_gb": 0.1, "disk_cache_gb": 0.2, "disable_disk_offload_filter": True}
    with live_stack(tiers, ("consolidator", "index", "host-tier", "disk-tier")) as running:
        yield running


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartRank]:
    """Start a rank's process; it ends with the module."""
    directory: Path = tmp_path_factory.mktemp("ranks")
    ranks: list[RankProcess] = []

    def start(**environ: str) -> RankProcess:
        ranks.append(RankProcess(directory / f"rank-{len(ranks)}.log", environ))
        return ranks[-1]

    yield start
    for rank in ranks:
        rank.stop()


@pytest.fixture(scope="module")
def rank(start: StartRank) -> RankProcess:
    """One that the tests of a module share: each attaches what it needs."""
    return start()
