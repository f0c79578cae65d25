"""The storage against a real host tier, over NIXL and a mapped arena; SGLang is not needed."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest
from kvbm_common.wire.verbs import OFFER_BLOCKS_MAX
from kvbm_connectors.client import link_thread
from kvbm_connectors.sglang import storage as storage_module
from kvbm_connectors.sglang import store as store_module
from kvbm_connectors.sglang.pages import UnknownPool, names_of
from kvbm_connectors.sglang.storage import Storage

from tests.connectors.sglang.conftest import PATIENCE_MS, Attach
from tests.connectors.sglang.pool import Config, Extra, Pool, Transfer, keys_of
from tests.recording import recorded
from tests.vllm.harness import LiveStack, corrupt_arena
from tests.waiting import stop_child, wait_for

COUNT = 5


def put(storage: Storage, pool: Pool, keys: list[str], first: int = 0, name: str = "kv") -> None:
    """Store pages with a content of their own each."""
    for number in range(len(keys)):
        pool.fill(first + number, number)
    indices = pool.indices(range(first, first + len(keys)))
    assert storage.set(keys, indices, None, name) == [True] * len(keys)


def taken(
    storage: Storage, pool: Pool, keys: list[str], first: int, name: str = "kv"
) -> list[bool]:
    """Load pages; true where a page was said to be there, and is, byte by byte."""
    flags = storage.get(keys, pool.indices(range(first, first + len(keys))), name)
    return [flag and pool.holds(first + n, n) for n, flag in enumerate(flags)]


@pytest.mark.parametrize("mla", [False, True])
@pytest.mark.parametrize("layout", ["page_first", "page_first_direct", "layer_first"])
def test_pages_come_back_as_they_were(attach: Attach, layout: str, mla: bool) -> None:
    """1. Nothing is there. 2. Pages are stored and found. 3. Another engine loads them."""
    pool, other = Pool(layout, mla=mla), Pool(layout, mla=mla)
    ours, theirs = attach(pool), attach(other)
    keys = keys_of(layout, COUNT)
    assert ours.exists(keys) == 0
    put(ours, pool, keys)
    assert theirs.exists(keys) == COUNT
    assert taken(theirs, other, keys, 6) == [True] * COUNT
    assert theirs.all_counts()["kv.verified_blocks"] == COUNT


def test_more_pages_than_an_offer_may_name(attach: Attach) -> None:
    """Goal: SGLang stores the pages of a side pool at once, however many: with pages of one token
    those of a long prompt are more than a host tier takes in one offer."""
    count = OFFER_BLOCKS_MAX + 10
    pool = Pool(pages=count, page_size=1)
    engine = attach(pool)
    for page in (0, count - 1):
        pool.fill(page, page)
    keys = keys_of("many", count)
    assert engine.set(keys, pool.indices(range(count)), None) == [True] * count
    pool.memory[:] = 0
    assert engine.exists(keys) == count
    assert engine.get(keys, pool.indices(range(count))) == [True] * count
    assert pool.holds(0, 0)
    assert pool.holds(count - 1, count - 1)


def test_what_is_stored_is_there_for_everybody(attach: Attach) -> None:
    """Storing returns when it is committed, not when it was pulled: another engine, which asks at
    once through a socket of its own, finds it every time."""
    pool = Pool()
    ours, theirs = attach(pool), attach(Pool())
    found = []
    for turn in range(40):
        put(ours, pool, keys := keys_of(f"there/{turn}", 2))
        found.append(theirs.exists(keys))
    assert found == [2] * 40


def test_hits_are_consecutive(attach: Attach) -> None:
    """What comes after a gap does not count, and is not loaded."""
    pool = Pool()
    storage = attach(pool)
    keys = keys_of("gap", COUNT)
    put(storage, pool, keys[:2])
    pool.fill(9, 4)
    assert storage.set(keys[4:], pool.indices([9]), None) == [True]
    assert storage.exists(keys) == 2
    assert storage.exists(keys[4:]) == 1
    assert taken(storage, pool, keys, 4) == [True, True, False, False, False]


def test_a_load_takes_over_the_lookup_of_the_question(attach: Attach) -> None:
    """Also where SGLang, after its ranks have compared, wants fewer pages than were found."""
    pool, other = Pool(), Pool()
    put(attach(pool), pool, keys := keys_of("over", COUNT))
    storage = attach(other)
    assert storage.exists(keys) == COUNT
    lookups = storage.all_counts()["kv.lookups"]
    assert taken(storage, other, keys[:3], 0) == [True] * 3
    assert storage.all_counts()["kv.lookups"] == lookups
    assert taken(storage, other, keys, 6) == [True] * COUNT


def test_what_is_not_found_leaves_nothing_open(
    attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lookup that was kept for each miss had kept the link's thread awake, and an engine that is
    to move from leaving."""
    halves = recorded(monkeypatch, store_module, "SchedulerHalf")
    pool = Pool()
    storage = attach(pool)
    keys = keys_of("missed", COUNT)
    assert storage.exists(keys) == 0
    assert halves[0].idle()
    assert taken(storage, pool, keys, 0) == [False] * COUNT
    assert halves[0].idle()
    put(storage, pool, keys[:2])
    assert storage.exists(keys) == 2
    assert taken(storage, pool, keys[2:], 0) == [False] * 3
    assert taken(storage, pool, keys, 6) == [True] * 2 + [False] * 3
    assert halves[0].idle()


def test_a_question_is_answered_with_what_is_there_now(attach: Attach) -> None:
    """An older answer with less than all pages does not count, whatever its lease: what has been
    stored since is found and loaded."""
    pool = Pool()
    storage = attach(pool)
    keys = keys_of("since", COUNT)
    put(storage, pool, keys[:2])
    assert storage.exists(keys) == 2
    put(storage, pool, keys)
    assert storage.exists(keys) == COUNT
    assert taken(storage, pool, keys, 6) == [True] * COUNT


@pytest.mark.slow
def test_a_question_is_asked_again_after_its_lease(attach: Attach, stack: LiveStack) -> None:
    """A lease that has ended is no miss: the pages are there."""
    pool = Pool()
    storage = attach(pool, extra={"onboard_deadline_ms": 1_000, "lease_ms": 100})
    keys = keys_of("lease", COUNT)
    put(storage, pool, keys[:2])
    expired = stack.figures("host-tier")["leases_expired"]
    assert storage.exists(keys) == 2
    wait_for(lambda: stack.figures("host-tier")["leases_expired"] > expired)
    assert storage.exists(keys) == 2


def test_a_question_for_pages_in_memory_does_not_wait(attach: Attach) -> None:
    """1. An engine that has never seen them is told at once of pages that another has stored; the
    lookup that leases them is on its way. 2. One that is not there: it asks."""
    pool, other = Pool(), Pool()
    put(attach(pool), pool, keys := keys_of("known", COUNT))
    theirs = attach(other)
    assert theirs.exists(keys) == COUNT
    assert theirs.all_counts()["kv.known_pages"] == COUNT
    assert taken(theirs, other, keys, 6) == [True] * COUNT
    assert theirs.exists([*keys, "unknown"]) == COUNT
    assert theirs.all_counts()["kv.known_pages"] == COUNT


@pytest.mark.slow
def test_a_question_that_could_wait_is_sent_when_its_pages_are_wanted(
    attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The link's thread sleeps until it is woken: a load whose question was left lying wakes it."""
    pool, other = Pool(), Pool()
    put(attach(pool), pool, keys := keys_of("lying", COUNT))
    theirs = attach(other)
    monkeypatch.setattr(link_thread, "POLL_MS_MAX", 3 * PATIENCE_MS)
    assert theirs.exists(["unknown"]) == 0
    assert theirs.exists(keys) == COUNT
    assert taken(theirs, other, keys, 6) == [True] * COUNT


def test_parents_are_named_where_sglang_says_them(
    attach: Attach, stack: LiveStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `hicache_storage_pass_prefix_keys` the chain goes on; else a batch is one of its own."""
    generations = recorded(monkeypatch, storage_module, "Generation")
    namespaces = recorded(monkeypatch, storage_module, "namespace_of")
    pool = Pool()
    storage = attach(pool)
    keys = keys_of("chain", 4)
    put(storage, pool, keys[:2])
    assert storage.set(keys[2:], pool.indices([2, 3]), Extra(prefix_keys=keys[:2])) == [True] * 2
    snapshot = stack.call(stack.view.snapshot("host-tier"))
    runs = [run for part in snapshot.parts for run in part.runs]
    parents = {name: run.parent for run in runs for name in run.hashes[:1]}
    names = [name.hex() for name in names_of(namespaces[0].digest, generations[0].read(), keys)]
    assert parents.get(names[2], names[1]) == names[1]


def test_ranks_do_not_mix(attach: Attach) -> None:
    """A page key holds no rank: two ranks' pages under the same key are two blocks."""
    pools = [Pool(), Pool()]
    ranks = [attach(pool, Config(tp_rank=n, tp_size=2)) for n, pool in enumerate(pools)]
    keys = keys_of("ranks", 1)
    for number, (rank, pool) in enumerate(zip(ranks, pools, strict=True)):
        assert rank.exists(keys) == 0
        pool.fill(0, number)
        assert rank.set(keys, pool.indices([0]), None) == [True]
    for number, (rank, pool) in enumerate(zip(ranks, pools, strict=True)):
        assert rank.get(keys, pool.indices([5])) == [True]
        assert pool.holds(5, number)


def test_latent_attention_has_one_writer(attach: Attach) -> None:
    """1. A rank that is no writer says it is stored, and stores nothing. 2. What the writer has
    stored, every rank reads."""
    pools = [Pool(mla=True), Pool(mla=True)]
    writer, reader = (
        attach(pool, Config(is_mla_model=True, tp_rank=n, tp_size=2))
        for n, pool in enumerate(pools)
    )
    keys = keys_of("latent", COUNT)
    put(reader, pools[1], keys)
    assert writer.exists(keys) == 0
    put(writer, pools[0], keys)
    assert taken(reader, pools[1], keys, 6) == [True] * COUNT


def test_a_state_pool_restores_at_its_boundaries(attach: Attach) -> None:
    """1. Every KV page is stored, states only after pages 2 and 4. 2. A prefix can be restored
    up to there, and nowhere else. 3. The state comes back."""
    pool, states = Pool(), Pool(page_size=1)
    storage = attach(pool, mamba=states)
    keys = keys_of("states", COUNT)
    put(storage, pool, keys)
    for page in (1, 3):
        put(storage, states, keys[page : page + 1], page, "mamba")
    hits = storage.exists_in_all(keys, [Transfer("mamba", keys[-1:], hit_policy="trailing_pages")])
    assert (hits.pages, hits.restorable, hits.by_pool) == (4, [2, 4], {"kv": 5, "mamba": 4})
    assert taken(storage, states, keys[3:4], 7, "mamba") == [True]
    hits = storage.exists_in_all(keys, [Transfer("mamba", hit_policy="all_pages")])
    assert hits.pages == 0


def test_a_state_pool_is_asked_for_longer_prefixes_alone(attach: Attach) -> None:
    """States are stored at few pages: each question for another one is sent for nothing."""
    pool, states = Pool(), Pool(page_size=1)
    storage = attach(pool, mamba=states)
    put(storage, pool, keys := keys_of("few states", COUNT))
    put(storage, states, keys[3:4], 3, "mamba")
    before = storage.all_counts()["mamba.lookups"]
    trailing = Transfer("mamba", keys[-1:], hit_policy="trailing_pages")
    assert storage.exists_in_all(keys[:4], [trailing]).pages == 4
    assert storage.all_counts()["mamba.lookups"] == before
    assert storage.exists_in_all(keys, [trailing]).pages == 4
    assert storage.all_counts()["mamba.lookups"] == before + 1


def test_questions_for_states_are_no_misses(attach: Attach, stack: LiveStack) -> None:
    """1. Of five pages the states of two are stored. What can be restored is all found: the host
    tier counts no miss. 2. Without a state at all it counts one page, and no hit."""
    pool, states = Pool(), Pool(page_size=1)
    storage = attach(pool, Config(tp_size=2), mamba=states)
    put(storage, pool, keys := keys_of("no misses", COUNT))
    put(storage, pool, others := keys_of("one miss", COUNT), COUNT)
    for page in (0, 2):
        put(storage, states, keys[page : page + 1], page, "mamba")
    before = stack.figures("host-tier")
    trailing = Transfer("mamba", keys[-1:], hit_policy="trailing_pages")
    assert storage.exists_in_all(keys, [trailing]).restorable == [1, 3]
    assert taken(storage, states, keys[2:3], 9, "mamba") == [True]
    found = stack.figures("host-tier")
    assert found["lookup_blocks.miss"] == before["lookup_blocks.miss"]
    assert storage.exists_in_all(others, [trailing]).pages == 0
    wait_for(
        lambda: stack.figures("host-tier")["lookup_blocks.miss"] == before["lookup_blocks.miss"] + 1
    )


def test_a_state_pool_of_several_ranks_is_asked_for_every_prefix(attach: Attach) -> None:
    """Ranks intersect the lengths that they have: a shorter one may be the longest of all."""
    pool, states = Pool(), Pool(page_size=1)
    storage = attach(pool, Config(tp_size=2), mamba=states)
    put(storage, pool, keys := keys_of("ranks", COUNT))
    put(storage, states, keys[3:4], 3, "mamba")
    before = storage.all_counts()["mamba.lookups"]
    trailing = Transfer("mamba", keys[-1:], hit_policy="trailing_pages")
    assert storage.exists_in_all(keys, [trailing]).pages == 4
    assert storage.all_counts()["mamba.lookups"] == before + COUNT - 1


def test_cleared_pages_are_not_found_by_anybody(attach: Attach) -> None:
    """Not by an engine that has just found them either; what is stored afterwards is."""
    pool, other = Pool(), Pool()
    ours, theirs = attach(pool), attach(other)
    keys = keys_of("clear", COUNT)
    put(ours, pool, keys)
    assert theirs.exists(keys) == COUNT
    ours.clear()
    assert (ours.exists(keys), theirs.exists(keys)) == (0, 0)
    assert taken(theirs, other, keys, 0) == [False] * COUNT
    put(ours, pool, keys)
    assert taken(theirs, other, keys, 6) == [True] * COUNT


def test_a_clear_that_others_cannot_see_fails(
    attach: Attach, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """1. The log says at the start that it will. 2. Who has called it hears of it. 3. This engine
    finds nothing from before, and goes on to store."""
    (tmp_path / "file").write_text("")
    pool = Pool()
    storage = attach(pool, extra={"state_dir": str(tmp_path / "file" / "state")})
    assert "KVBM_STATE_DIR cannot be written" in caplog.text
    put(storage, pool, keys := keys_of("not cleared", COUNT))
    with pytest.raises(NotADirectoryError):
        storage.clear()
    assert storage.exists(keys) == 0
    put(storage, pool, keys)
    assert taken(storage, pool, keys, 6) == [True] * COUNT
    assert storage.all_counts()["failed.clear.NotADirectoryError"] == 1


def test_errors_are_misses_that_are_counted(
    attach: Attach, caplog: pytest.LogCaptureFixture
) -> None:
    """SGLang swallows what a back end raises: here it is logged, counted and answered."""
    pool = Pool()
    storage = attach(pool)
    keys = keys_of("wrong", 2)
    odd = pool.indices([0, 1]) + 1
    assert storage.set(keys, odd, None) == [False, False]
    assert storage.get(keys, odd) == [False, False]
    assert storage.exists(keys, "nobody") == 0
    assert storage.exists_in_all(keys, []).pages == 0
    storage.count_unsupported("batch_get")
    counts = storage.all_counts()
    assert counts["failed.set.UnknownPool"] == counts["failed.get.UnknownPool"] == 1
    assert counts["failed.exists.KeyError"] == counts["unsupported.batch_get"] == 1
    assert "counts as a miss" in caplog.text
    with pytest.raises(UnknownPool):
        storage.register(Pool(), "kv")


def test_a_pool_with_another_policy_passes_through(
    attach: Attach, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing of such a model is found, and the log says which pool and which policy."""
    pool = Pool()
    storage = attach(pool)
    keys = keys_of("policy", COUNT)
    put(storage, pool, keys)
    groups = Transfer("compressed", keys, hit_policy="block_groups")
    assert storage.exists_in_all(keys, [groups]).pages == 0
    assert storage.all_counts()["failed.exists.UnknownPool"] == 1
    assert "pool 'compressed' has the hit policy 'block_groups'" in caplog.text
    assert storage.exists(keys) == COUNT


def test_threads_query_read_and_write_at_once(attach: Attach) -> None:
    """Eight threads, each with keys and pages of its own, in one storage."""
    pool = Pool(pages=64)
    storage = attach(pool)
    wrong: list[str] = []

    def work(number: int) -> None:
        first = number * 8
        for turn in range(10):
            keys = keys_of(f"{number}/{turn}", 4)
            for page in range(4):
                pool.fill(first + page, 100 * number + page)
            here = pool.indices(range(first, first + 4))
            if not all(storage.set(keys, here, None)) or storage.exists(keys) != 4:
                wrong.append(f"{number}/{turn}: not stored")
            flags = storage.get(keys, pool.indices(range(first + 4, first + 8)))
            right = [pool.holds(first + 4 + page, 100 * number + page) for page in range(4)]
            if not all(flags) or not all(right):
                wrong.append(f"{number}/{turn}: {flags} {right}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []


def test_an_offer_is_over_before_its_pages_are_given_back(
    attach: Attach, stack: LiveStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A storage is closed while the host tier is slow to pull: what it would read after `set` has
    returned is another page's."""
    halves = recorded(monkeypatch, store_module, "SchedulerHalf")
    pool = Pool()
    storage = attach(pool)
    stored: list[bool] = []

    def give_back() -> None:
        stored.extend(storage.set(keys_of("given back", 1), pool.indices([0]), None))

    thread = threading.Thread(target=give_back)
    good_bye, ended = halves[0].close, []

    def close() -> None:
        thread.join(10)
        ended.append(halves[0].counts().get("offers_ended.revoked", 0))
        good_bye()

    monkeypatch.setattr(halves[0], "close", close)
    stop_child(pid := stack.stack.pids["host-tier"])
    try:
        thread.start()
        wait_for(lambda: halves[0].counts().get("offered_blocks"))
        storage.close()
    finally:
        os.kill(pid, signal.SIGCONT)
    assert (stored, ended) == ([False], [1])


def test_attached_again_and_again(attach: Attach) -> None:
    """A pool outlives its storages, and no thread outlives a storage."""
    pool = Pool()
    keys = keys_of("again", COUNT)
    first = attach(pool)
    put(first, pool, keys)
    assert taken(first, pool, keys, 6) == [True] * COUNT  # Its threads are there.
    before = threading.active_count()
    for _ in range(3):
        storage = attach(pool)
        assert taken(storage, pool, keys, 6) == [True] * COUNT
        storage.close()
        assert storage.exists(keys) == 0
        storage.close()
    wait_for(lambda: threading.active_count() <= before)


def test_batches_are_told_once(attach: Attach) -> None:
    pool = Pool()
    storage = attach(pool)
    put(storage, pool, keys := keys_of("figures", COUNT))
    taken(storage, pool, keys, 6)
    found = storage.statistics()
    assert (found.read_pages, found.written_pages) == ([COUNT], [COUNT])
    assert found.read_gb_per_s[0] > 0
    assert found.written_gb_per_s[0] > 0
    assert storage.statistics().read_pages == []


@pytest.mark.slow
def test_a_host_tier_that_is_killed(attach: Attach, stack: LiveStack) -> None:
    """1. It dies: listed pages may be promised for a moment, nothing wrong is ever loaded, nothing
    raises, and nobody waits longer than a deadline. 2. It is back: stored and found again."""
    pool = Pool()
    storage = attach(pool, extra={"onboard_deadline_ms": 500, "offer_deadline_ms": 500})
    put(storage, pool, keys := keys_of("killed", COUNT))
    stack.kill("host-tier")
    assert taken(storage, pool, keys, 6) in ([False] * COUNT, [True] * COUNT)
    assert storage.set(keys_of("dead", 1), pool.indices([0]), None) == [False]
    wait_for(lambda: storage.exists(keys) == 0)
    assert taken(storage, pool, keys, 6) == [False] * COUNT
    stack.start("host-tier")
    wait_for(lambda: storage.wait_attached(5))
    assert storage.exists(keys) == 0
    put(storage, pool, keys)
    assert taken(storage, pool, keys, 6) == [True] * COUNT


@pytest.mark.slow
def test_a_load_waits_for_one_deadline(
    attach: Attach, stack: LiveStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host tier stands still after it has listed the pages: the lookup that the question has
    left is not followed by another one, which nothing would answer either."""
    halves = recorded(monkeypatch, store_module, "SchedulerHalf")
    pool = Pool()
    storage = attach(pool, extra={"onboard_deadline_ms": 300})
    put(storage, pool, keys := keys_of("still", COUNT))
    before = halves[0].counts()["lookups"]
    stop_child(pid := stack.stack.pids["host-tier"])
    try:
        assert storage.exists(keys) == COUNT
        assert taken(storage, pool, keys, 6) == [False] * COUNT
    finally:
        os.kill(pid, signal.SIGCONT)
    counts = halves[0].counts()
    assert (counts["lookups"] - before, counts["lookups_unanswered"]) == (1, 1)
    wait_for(lambda: taken(storage, pool, keys, 6) == [True] * COUNT)


def test_a_page_that_has_rotted_is_zeroed_and_missed(attach: Attach, stack: LiveStack) -> None:
    """With the settings that are shipped. 1. Somebody writes over the host tier's memory. 2. No
    page of it comes back, and none of its bytes stays in the pool. 3. What is stored again is
    found again."""
    pool, other = Pool(), Pool()
    ours, theirs = attach(pool), attach(other)
    put(ours, pool, keys := keys_of("rot", COUNT))
    corrupt_arena(stack.settings)
    assert taken(theirs, other, keys, 6) == [False] * COUNT
    by_load = theirs.all_counts().get("kv.loads_failed.corrupt", 0)
    # On a slow machine the scrubber reads them before the load comes: a miss then, no failure.
    by_scrubber = stack.figures("host-tier").get("scrub_corrupt_blocks", 0)
    assert by_load == 1 or by_scrubber > 0
    assert not other.memory.any()
    put(ours, pool, again := keys_of("rot again", COUNT))
    assert taken(theirs, other, again, 6) == [True] * COUNT
