"""The store of one pool: how long its calls wait, with a real host tier."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from kvbm_connectors.client.scheduler import SchedulerHalf
from kvbm_connectors.core import messages as messages_module
from kvbm_connectors.core.messages import OFFER_BLOCKS_MAX, Hit, OfferRun
from kvbm_connectors.core.outbox import Outbox
from kvbm_connectors.sglang import options as options_module
from kvbm_connectors.sglang import storage as storage_module
from kvbm_connectors.sglang import store as store_module
from kvbm_connectors.sglang.committed_pages import CommittedPages
from kvbm_connectors.sglang.page_offers import PageOffers
from kvbm_connectors.sglang.pages import names_of

from tests.connectors.sglang.conftest import Attach
from tests.connectors.sglang.pool import Config, Pool, Transfer, keys_of
from tests.recording import recorded
from tests.vllm.harness import LiveStack, live_stack
from tests.waiting import stop_child, wait_for

COUNT = 5


@pytest.fixture(scope="module")
def stack() -> Iterator[LiveStack]:
    """A host tier without a miss filter: it is asked for every page that it does not list."""
    tiers = {"cpu_cache_gb": 0.05, "miss_filter": False}
    with live_stack(tiers, ("consolidator", "host-tier")) as stack:
        yield stack


@pytest.mark.slow
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


def test_a_late_answer_in_part_is_loaded(attach: Attach, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: a load waits for one deadline, and has what came, where pages leave while it waits.

    1. `exists` leaves its question to the load. 2. It is answered late, and in part. 3. The load
    asks no second question.
    """
    pool, keys = Pool(), keys_of("in part", COUNT)
    storage = attach(pool, extra={"onboard_deadline_ms": 5_000})
    assert storage.set(keys, pool.indices(range(COUNT)), None) == [True] * COUNT
    assert storage.exists(keys) == COUNT
    asked: dict[str, int] = {}
    real = SchedulerHalf.lookup

    def lookup(half: SchedulerHalf, request: str, *rest: Any, **named: Any) -> Hit | None:
        hit, asked[request] = real(half, request, *rest, **named), asked.get(request, 0) + 1
        if hit is None or asked[request] < 3:
            return None
        return replace(hit, blocks=COUNT - 1)

    monkeypatch.setattr(SchedulerHalf, "lookup", lookup)
    found = storage.get(keys, pool.indices(range(COUNT)))
    assert found == [True] * (COUNT - 1) + [False]
    assert len(asked) == 1


@pytest.mark.parametrize("pause_s", [3600.0, 0.0])
def test_one_part_of_a_write_waits_where_nothing_is_pulled(
    attach: Attach, stack: LiveStack, monkeypatch: pytest.MonkeyPatch, pause_s: float
) -> None:
    """Goal: SGLang's scheduler, which waits 10 s for its writer at a flush, does not end.

    1. The host tier stands still: the states of a prompt wait for a deadline in vain. 2. Its pages
    do not wait. 3. After the pause, writes go on.
    """
    monkeypatch.setattr(storage_module, "WRITE_PAUSE_S", pause_s)
    pool, states = Pool(), Pool(page_size=1)
    storage = attach(pool, Config(), extra={"offer_deadline_ms": 500}, mamba=states)
    keys = keys_of(f"parts, {pause_s}", COUNT)
    stop_child(pid := stack.stack.pids["host-tier"])
    try:
        assert storage.set(keys, states.indices(range(COUNT)), None, "mamba") == [False] * COUNT
        if pause_s:
            assert storage.set(keys, pool.indices(range(COUNT)), None) == [False] * COUNT
    finally:
        os.kill(pid, signal.SIGCONT)
    found = storage.all_counts()
    assert (found["mamba.offered_blocks"], found.get("kv.offered_blocks", 0)) == (COUNT, 0)
    assert found.get("paused_writes", 0) == bool(pause_s)
    if not pause_s:
        wait_for(lambda: all(storage.set(keys, pool.indices(range(COUNT)), None)))


@pytest.mark.slow
def test_a_call_with_a_long_deadline_ends_before_a_flush_does(
    attach: Attach, stack: LiveStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. The host tier stands still: a write and a question end before it counts as lost, which it
    does after seconds. 2. It goes on: what is stored then is found."""
    monkeypatch.setattr(options_module, "CALL_MAX_S", 0.5)
    long = {"onboard_deadline_ms": 60_000, "offer_deadline_ms": 60_000}
    pool, keys = Pool(), keys_of("long", COUNT)
    storage = attach(pool, extra=long)
    stop_child(pid := stack.stack.pids["host-tier"])
    try:
        assert storage.set(keys, pool.indices(range(COUNT)), None) == [False] * COUNT
        assert storage.exists(keys) == 0
    finally:
        os.kill(pid, signal.SIGCONT)
    found = storage.all_counts()
    assert (found["kv.offers_ended.deadline"], found["kv.lookups_unanswered"]) == (1, 1)
    wait_for(lambda: all(storage.set(keys, pool.indices(range(COUNT)), None)))
    assert storage.exists(keys) == COUNT


@pytest.mark.slow
def test_pools_of_one_question_share_its_time(
    attach: Attach, stack: LiveStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second pool's question is over with the time of the call, long before its deadline."""
    monkeypatch.setattr(storage_module, "CALL_MAX_S", 0.1)
    pool, states, draft = Pool(), Pool(page_size=1), Pool()
    storage = attach(pool, mamba=states, draft=draft)
    keys = keys_of("shared time", COUNT)
    assert storage.set(keys, pool.indices(range(COUNT)), None) == [True] * COUNT
    asked = [Transfer("draft", keys), Transfer("mamba", keys[-1:], hit_policy="trailing_pages")]
    stop_child(pid := stack.stack.pids["host-tier"])
    try:
        hits = storage.exists_in_all(keys, asked)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert (hits.pages, hits.by_pool["kv"]) == (0, COUNT)
    found = storage.all_counts()
    assert found["draft.lookups_unanswered"] == 1
    assert found["mamba.unasked_pages"] == COUNT


def test_a_write_of_pages_that_another_engine_stores_is_a_write(attach: Attach) -> None:
    """Goal: two engines that compute one prompt at once store its tail, too: where a batch of a
    write fails, SGLang stores none of those that follow.

    1. Both store the same pages at once. 2. Both hear that they are stored, every time.
    """
    count = 24
    pools = [Pool(pages=count) for _ in range(2)]
    engines = [attach(pool) for pool in pools]
    told: list[bool] = []

    def write(number: int, keys: list[str], begin: threading.Barrier) -> None:
        begin.wait(10)
        told.extend(engines[number].set(keys, pools[number].indices(range(count)), None))

    for turn in range(20):
        keys, begin = keys_of(f"both/{turn}", count), threading.Barrier(2)
        writers = [threading.Thread(target=write, args=(n, keys, begin)) for n in range(2)]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join(30)
        assert engines[0].exists(keys) == count
    assert told == [True] * (2 * count * 20)


def test_pages_that_are_there_are_written_again_without_a_question(attach: Attach) -> None:
    """The host tier lists them, and has no more to do than to say that it has them."""
    pool = Pool()
    storage, keys = attach(pool), keys_of("again", COUNT)
    assert storage.set(keys, pool.indices(range(COUNT)), None) == [True] * COUNT
    before = storage.all_counts()["kv.lookups"]
    assert storage.set(keys, pool.indices(range(COUNT)), None) == [True] * COUNT
    assert storage.all_counts()["kv.lookups"] == before


def test_a_page_that_the_list_lacks_is_written_again(
    attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row of the host tier's list may have been full: then the host tier is asked."""
    pool = Pool()
    storage, keys = attach(pool), keys_of("unlisted", COUNT)
    assert storage.set(keys, pool.indices(range(COUNT)), None) == [True] * COUNT
    listed = CommittedPages.which

    def lacks_one(*given: Any, **named: Any) -> list[bool] | None:
        found = listed(*given, **named)
        return None if found is None else [False, *found[1:]]

    monkeypatch.setattr(CommittedPages, "which", lacks_one)
    assert storage.set(keys, pool.indices(range(COUNT)), None) == [True] * COUNT
    assert storage.all_counts().get("paused_writes", 0) == 0


def test_pages_of_a_write_that_is_partly_there_are_offered_once(attach: Attach) -> None:
    pool = Pool(pages=2 * COUNT)
    storage, keys = attach(pool), keys_of("partly", 2 * COUNT)
    assert all(storage.set(keys[:COUNT], pool.indices(range(COUNT)), None))
    assert all(storage.set(keys, pool.indices(range(2 * COUNT)), None))
    assert storage.all_counts()["kv.offered_blocks"] == 3 * COUNT


@pytest.mark.parametrize("has_list", [True, False])
def test_pages_that_another_engine_gives_up_are_stored(
    attach: Attach, monkeypatch: pytest.MonkeyPatch, *, has_list: bool
) -> None:
    """1. An engine offers pages, takes them back while they are pulled, and gives them to another
    prompt. 2. Another one, which writes them at the same time, hears that they are stored, and so
    they are. A host tier has no list before its first commit."""
    if not has_list:
        monkeypatch.setattr(CommittedPages, "which", lambda *_given, **_named: None)
    offers = recorded(monkeypatch, store_module, "PageOffers")
    generations = recorded(monkeypatch, storage_module, "Generation")
    namespaces = recorded(monkeypatch, storage_module, "namespace_of")
    count = 24
    pools = [Pool(pages=count) for _ in range(2)]
    _, writing = [attach(pool) for pool in pools]
    for page in range(count):
        pools[1].fill(page, page)
    for turn in range(20):
        for page in range(count):
            pools[0].fill(page, page)
        keys = keys_of(f"given up/{has_list}/{turn}", count)
        names = names_of(namespaces[0].digest, generations[0].read(), keys)
        run = OfferRun(namespaces[0].root, tuple(names), tuple(range(count)))
        assert offers[0].pull([run], 0.0) is None
        pools[0].memory[:] = 0
        assert writing.set(keys, pools[1].indices(range(count)), None) == [True] * count
        assert writing.get(keys, pools[1].indices(range(count))) == [True] * count
        assert all(pools[1].holds(page, page) for page in range(count))


def test_all_parts_of_a_long_write_are_asked_about(
    attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. A write is more than one offer may name. 2. The host tier, which stood still, has given up
    the first one when our confirmation comes. 3. SGLang does not hear that all is stored."""
    confirm, unheard = Outbox.confirm, [1]

    def late(outbox: Outbox, offer: int, *, held: bool) -> None:
        if unheard:
            unheard.pop()
            return
        confirm(outbox, offer, held=held)

    monkeypatch.setattr(Outbox, "confirm", late)
    count = OFFER_BLOCKS_MAX + 1
    pool = Pool(pages=count, page_size=1)
    storage, keys = attach(pool), keys_of("two parts", count)
    assert storage.set(keys, pool.indices(range(count)), None) == [False] * count
    assert storage.exists(keys) == 0


@pytest.mark.slow
def test_parts_of_a_long_write_share_the_time_of_a_call(
    attach: Attach, stack: LiveStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host tier stands still when it has pulled the first part: the second one is given up with
    the time of the call, long before the deadline of its offer."""
    monkeypatch.setattr(store_module, "CALL_MAX_S", 0.5)
    halves = recorded(monkeypatch, store_module, "SchedulerHalf")
    pull, parts = PageOffers.pull, []
    pid = stack.stack.pids["host-tier"]

    def stopping(offers: PageOffers, *given: Any) -> int | None:
        parts.append(given)
        if len(parts) == 2:
            stop_child(pid)
        return pull(offers, *given)

    monkeypatch.setattr(PageOffers, "pull", stopping)
    count = OFFER_BLOCKS_MAX + 1
    pool = Pool(pages=count, page_size=1)
    storage, keys = attach(pool, extra={"offer_deadline_ms": 2_000}), keys_of("slow parts", count)
    try:
        assert storage.set(keys, pool.indices(range(count)), None) == [False] * count
    finally:
        os.kill(pid, signal.SIGCONT)
    assert halves[0].counts().get("offers_ended.deadline", 0) == 0
    assert halves[0].counts()["offers_ended.revoked"] == 1


def test_a_page_twice_in_a_question_is_a_miss(attach: Attach) -> None:
    """Also where the host tier lists all of its pages: the load would find none."""
    pool = Pool()
    storage, keys = attach(pool), keys_of("asked twice", COUNT)
    assert storage.set(keys, pool.indices(range(COUNT)), None) == [True] * COUNT
    assert storage.exists([*keys[:-1], keys[0]]) == 0
    assert storage.exists(keys) == COUNT


def test_a_page_twice_in_a_load_is_a_miss_at_once(attach: Attach) -> None:
    """The host tier refuses such a question, and its answer would be waited for in vain."""
    pool = Pool()
    storage, keys = attach(pool), keys_of("twice", COUNT)
    twice = [*keys[:-1], keys[0]]
    assert storage.set(twice, pool.indices(range(COUNT)), None) == [True] * COUNT
    assert storage.get(twice, pool.indices(range(COUNT))) == [False] * COUNT
    found = storage.all_counts()
    assert (found["failed.get.ValueError"], found.get("kv.lookups_unanswered", 0)) == (1, 0)
    assert storage.get(keys[:-1], pool.indices(range(COUNT - 1))) == [True] * (COUNT - 1)


def test_a_write_without_a_list_trusts_a_page_that_failed_to_load_lately(
    attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: no write waits for its deadline where all of its pages are stored. The host tier has
    no room for a list, and the engine asks for no page that has failed it."""
    pool, keys = Pool(), keys_of("avoided", COUNT)
    storage = attach(pool)
    monkeypatch.setattr(CommittedPages, "which", lambda *_given, **_named: None)
    assert storage.set(keys, pool.indices(range(COUNT)), None) == [True] * COUNT
    monkeypatch.setattr(SchedulerHalf, "lookup", lambda *_given, **_named: Hit(0, reason="avoided"))
    began_s = time.monotonic()
    assert storage.set(keys, pool.indices(range(COUNT)), None) == [True] * COUNT
    assert time.monotonic() - began_s < 2


def test_the_parts_of_a_long_write_are_asked_about_at_once(
    attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages_module, "OFFER_BLOCKS_MAX", 1)
    pool, keys = Pool(), keys_of("at once", COUNT)
    storage = attach(pool)
    asked: list[str] = []
    real = SchedulerHalf.lookup

    def lookup(half: SchedulerHalf, request: str, *rest: Any, **named: Any) -> Hit | None:
        hit = real(half, request, *rest, **named)
        asked.append(request)
        return hit

    monkeypatch.setattr(SchedulerHalf, "lookup", lookup)
    assert storage.set(keys, pool.indices(range(COUNT)), None) == [True] * COUNT
    assert len(set(asked[:COUNT])) == COUNT
