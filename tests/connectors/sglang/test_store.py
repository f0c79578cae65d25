"""The store of one pool: how long its calls wait, with a real host tier."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from kvbm_connectors.sglang import store as store_module

from tests.connectors.sglang.conftest import Attach
from tests.connectors.sglang.pool import Config, Pool, Transfer, keys_of
from tests.vllm.harness import LiveStack, live_stack
from tests.waiting import stop_child

COUNT = 5


@pytest.fixture(scope="module")
def stack() -> Iterator[LiveStack]:
    """A host tier without a miss filter: it is asked for every page that it does not list."""
    tiers = {"cpu_cache_gb": 0.05, "miss_filter": False}
    with live_stack(tiers, ("consolidator", "host-tier")) as stack:
        yield stack


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_question_for_states_waits_for_one_deadline(
    attach: Attach, stack: LiveStack, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    """Goal: a long prompt of a hybrid model waits no longer than any other question. Its states
    are asked for in several parts, and the host tier stands still: one part waits in vain."""
    monkeypatch.setattr(store_module, "PRESENT_MAX", 1)
    pool, states = Pool(), Pool(page_size=1)
    extra = {"onboard_deadline_ms": 200}
    storage = attach(pool, Config(tp_size=ranks), extra=extra, mamba=states)
    keys = keys_of(f"states of {ranks}", COUNT)
    assert storage.set(keys, pool.indices(range(COUNT)), None) == [True] * COUNT
    trailing = Transfer("mamba", keys[-1:], hit_policy="trailing_pages")
    stop_child(pid := stack.stack.pids["host-tier"])
    try:
        hits = storage.exists_in_all(keys, [trailing])
    finally:
        os.kill(pid, signal.SIGCONT)
    assert (hits.pages, hits.by_pool) == (0, {"kv": COUNT})
    assert storage.all_counts()["mamba.lookups_unanswered"] == 1
