"""SGLang's real factory and host pools on CPU against a real stack: pages come back as they were.

A page is filled and compared by SGLang's own accessors, and moved by the addresses that its pools
give to every zero-copy back end.
"""

from __future__ import annotations

import pytest

from tests.sglang.conftest import StartRank
from tests.sglang.conversation import Command, Pool
from tests.sglang.harness import RankProcess, extra_of, keys_of, pages
from tests.vllm.harness import LiveStack, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

COUNT = 6
ALL = [True] * COUNT
SEEDS = list(range(COUNT))
LAYOUTS = ["page_first", "layer_first", "page_first_direct"]


def put(rank: RankProcess, keys: list[str]) -> None:
    """Fill the first pages and store them."""
    rank.ask("fill", pages=pages(0, COUNT), seeds=SEEDS)
    assert rank.ask("set", keys=keys, pages=pages(0, COUNT)).flags == ALL


def came_back(rank: RankProcess, keys: list[str], first: int = 10) -> bool:
    """Load into other pages and compare every byte; false if some were missing."""
    there = pages(first, COUNT)
    rank.ask("fill", pages=there, seeds=[99] * COUNT)
    loaded = rank.ask("get", keys=keys, pages=there).flags
    right = rank.ask("holds", pages=there, seeds=SEEDS).flags
    assert loaded == right
    return loaded == ALL


@pytest.mark.parametrize("kind", ["mha", "mla"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(stack: LiveStack, rank: RankProcess, layout: str, kind: str) -> None:
    """1. Nothing is found. 2. Pages are stored and found. 3. They come back byte by byte.
    4. A pool that was not loaded holds something else: the comparison can fail."""
    rank.attach(stack.settings, {"kv": Pool(kind=kind, layout=layout)})
    keys = keys_of(f"{kind}/{layout}", COUNT)
    assert rank.ask("exists", keys=keys).number == 0
    put(rank, keys)
    assert rank.ask("exists", keys=keys).number == COUNT
    assert came_back(rank, keys)
    assert rank.ask("holds", pages=[17], seeds=[0]).flags == [False]
    assert rank.ask("exists", keys=[keys[0], "f" * 64, keys[1]]).number == 1
    counts = rank.ask("counts").counts
    assert (counts["prefetch_pgs"], counts["backup_pgs"]) == (COUNT, COUNT)
    assert counts["kv.verified_blocks"] >= COUNT
    rank.ask("detach")


@pytest.mark.parametrize("kind", ["mha", "mla"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_restart_of_our_stack(
    stack: LiveStack, rank: RankProcess, layout: str, kind: str
) -> None:
    """1. Pages are stored, and the disk has them. 2. Both tiers are killed and start again: host
    memory is empty. 3. The rank, which was not restarted, loads its pages as soon as it has seen
    the new life."""
    # Pages of one size: the first who attaches after a start decides, and the disk follows.
    layers = 16 if kind == "mla" else 4
    rank.attach(stack.settings, {"kv": Pool(kind=kind, layout=layout, layers=layers)})
    keys = keys_of(f"restart/{kind}/{layout}", COUNT)
    before = stack.held("disk-tier")
    put(rank, keys)
    wait_for(lambda: len(stack.held("disk-tier") - before) == COUNT, "not on disk")
    for service in ("host-tier", "disk-tier"):
        stack.kill(service)
    for service in ("host-tier", "disk-tier"):
        stack.start(service)
    assert stack.held("host-tier") == set()
    assert rank.ask("wait").flags == [True]
    # Until the disk tier has mapped the new arena, its blocks are misses.
    wait_for(lambda: came_back(rank, keys), "not found again")
    assert rank.ask("exists", keys=keys).number == COUNT
    rank.ask("detach")


def test_two_engines_share(stack: LiveStack, rank: RankProcess, start: StartRank) -> None:
    """What one has stored the other finds and loads; a third of another model finds nothing."""
    other = start()
    rank.attach(stack.settings)
    other.attach(stack.settings)
    keys = keys_of("shared", COUNT)
    put(rank, keys)
    assert other.ask("exists", keys=keys).number == COUNT
    assert came_back(other, keys)
    other.ask("detach")
    other.attach(stack.settings, config={"model_name": "another"})
    assert other.ask("exists", keys=keys).number == 0
    other.ask("detach")
    rank.ask("detach")


def test_ranks_of_attention_heads(stack: LiveStack, rank: RankProcess) -> None:
    """The pages of two ranks have the same keys, and are not the same."""
    keys = keys_of("ranks", COUNT)
    for number in range(2):
        rank.attach(stack.settings, config={"tp_rank": number, "tp_size": 2})
        assert rank.ask("exists", keys=keys).number == 0
        put(rank, keys)
        rank.ask("detach")


def test_one_writer_of_latent_attention(stack: LiveStack, rank: RankProcess) -> None:
    """1. Rank 1 stores nothing. 2. It loads what rank 0 has stored."""
    pool = {"kv": Pool(kind="mla", layers=3)}
    keys = keys_of("latent", COUNT)
    rank.attach(stack.settings, pool, config={"tp_rank": 1, "tp_size": 2})
    put(rank, keys)
    assert rank.ask("exists", keys=keys).number == 0
    rank.ask("detach")
    rank.attach(stack.settings, pool, config={"tp_rank": 0, "tp_size": 2})
    put(rank, keys)
    rank.ask("detach")
    rank.attach(stack.settings, pool, config={"tp_rank": 1, "tp_size": 2})
    assert came_back(rank, keys)
    rank.ask("detach")


def test_a_hybrid_model(stack: LiveStack, rank: RankProcess) -> None:
    """A KV pool and one of states: a prefix is restored where a state was kept."""
    rank.attach(stack.settings, {"kv": Pool(), "mamba": Pool(kind="mamba")})
    keys = keys_of("hybrid", COUNT)
    put(rank, keys)
    assert rank.ask("exists_v2", pool="mamba", keys=keys, window=1).number == 0
    for page in (1, 4):
        rank.ask("fill", pool="mamba", pages=[page], seeds=[page])
        assert rank.ask("set_v2", pool="mamba", keys=[keys[page]], pages=[page]).flags == [True]
    hits = rank.ask("exists_v2", pool="mamba", keys=keys, window=1)
    assert (hits.number, hits.lengths) == (5, [2, 5])
    assert hits.counts == {"kv": COUNT, "mamba": 5}
    assert rank.ask("get_v2", pool="mamba", keys=[keys[4]], pages=[12]).flags == [True]
    assert rank.ask("holds", pool="mamba", pages=[12], seeds=[4]).flags == [True]
    assert rank.ask("get_v2", pool="kv", keys=keys, pages=pages(10, COUNT)).flags == ALL
    rank.ask("detach")


def test_attach_detach_and_clear_at_run_time(stack: LiveStack, rank: RankProcess) -> None:
    """1. Detached and attached again, everything is there. 2. No thread is left behind.
    3. Cleared, nothing is. 4. An attachment that SGLang would use badly fails."""
    keys = keys_of("again", COUNT)
    rank.attach(stack.settings)
    put(rank, keys)
    alone = rank.ask("detach").number
    for _ in range(3):
        rank.attach(stack.settings)
        assert came_back(rank, keys)
        assert rank.ask("detach").number == alone
    rank.attach(stack.settings)
    rank.ask("clear")
    assert rank.ask("exists", keys=keys).number == 0
    put(rank, keys)
    assert came_back(rank, keys)
    rank.ask("detach")
    extra = extra_of(stack.settings) | {"interface_v1": 0}
    failed = rank.say(Command(what="attach", extra=extra, pools={"kv": Pool()}))
    assert "interface_v1" in failed.error


def test_eight_threads(stack: LiveStack, rank: RankProcess) -> None:
    """Queries, reads and writes at once: every page is stored, found and loaded as it was."""
    rank.attach(stack.settings, {"kv": Pool(pages=32)})
    counts = rank.ask("threads", keys=["threads"], pages=pages(0, 32), rounds=10).counts
    assert counts == {"asked": 320, "stored": 320, "found": 320, "loaded": 320, "wrong": 0}
    rank.ask("detach")
