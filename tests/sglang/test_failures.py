"""What goes wrong is a miss: never a wrong page, never an exception, never a wait without end."""

from __future__ import annotations

import pytest

from tests.sglang.conftest import StartRank
from tests.sglang.conversation import Command, Pool
from tests.sglang.harness import RankProcess, keys_of, pages
from tests.sglang.test_round_trips import ALL, COUNT, came_back, put
from tests.vllm.harness import LiveStack, corrupt_arena, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def test_sglangs_own_fault_injection(stack: LiveStack, start: StartRank) -> None:
    """Calls fail and are late at random, in eight threads: fewer pages are loaded, none wrong."""
    rank = start(
        SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY="0.02",
        SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE="0.2",
    )
    rank.attach(stack.settings, {"kv": Pool(pages=32)})
    assert "HiCache storage test injector enabled" in rank.log_text()
    counts = rank.ask("threads", keys=["injected"], pages=pages(0, 32), rounds=10).counts
    assert counts["wrong"] == 0
    assert 0 < counts["loaded"] < counts["asked"] == 320
    assert 0 < counts["stored"] < 320
    rank.ask("detach")


def test_a_host_tier_that_is_killed_under_load(stack: LiveStack, rank: RankProcess) -> None:
    """1. It dies while eight threads store and load. 2. No page is wrong, every call returns.
    3. It is back, and everything works."""
    rank.attach(
        stack.settings,
        {"kv": Pool(pages=32)},
        extra={"onboard_deadline_ms": 500, "offer_deadline_ms": 500},
    )
    rank.begin(Command(what="threads", keys=["killed"], pages=pages(0, 32), rounds=60))
    wait_for(lambda: stack.figures("host-tier").get("offload_blocks_d2h", 0) > 100, "no load")
    stack.kill("host-tier")
    stack.start("host-tier")
    counts = rank.wait_reply().counts
    assert counts["wrong"] == 0
    assert 0 < counts["stored"] < counts["asked"] == 32 * 60
    assert rank.ask("wait").flags == [True]
    keys = keys_of("after", COUNT)
    put(rank, keys)
    assert came_back(rank, keys)
    assert not [name for name in rank.ask("counts").counts if name.startswith("failed.")]
    rank.ask("detach")


def test_a_host_tier_that_is_away(stack: LiveStack, rank: RankProcess) -> None:
    """Nothing is found and nothing stored, at once; the lost connection is in the log."""
    rank.attach(stack.settings, extra={"onboard_deadline_ms": 300, "offer_deadline_ms": 300})
    keys = keys_of("away", COUNT)
    put(rank, keys)
    lost = rank.log_text().count("passing through")
    stack.kill("host-tier")
    wait_for(lambda: rank.ask("exists", keys=keys).number == 0, "still found")
    there = pages(10, COUNT)
    assert rank.ask("get", keys=keys, pages=there).flags == [False] * COUNT
    assert rank.ask("set", keys=keys_of("more", COUNT), pages=there).flags == [False] * COUNT
    wait_for(lambda: rank.log_text().count("passing through") > lost, "no line of the log")
    stack.start("host-tier")
    assert rank.ask("wait").flags == [True]
    rank.ask("detach")


def test_bytes_that_rot_in_host_memory(stack: LiveStack, rank: RankProcess) -> None:
    """They are loaded, found to be wrong, and said to be missing; the page is stored anew."""
    rank.attach(stack.settings)
    keys = keys_of("rot", COUNT)
    put(rank, keys)
    corrupt_arena(stack.settings)
    assert rank.ask("get", keys=keys, pages=pages(10, COUNT)).flags == [False] * COUNT
    by_load = rank.ask("counts").counts.get("kv.loads_failed.corrupt", 0)
    # On a slow machine the scrubber reads them before the load comes: a miss then, no failure.
    by_scrubber = stack.figures("host-tier").get("scrub_corrupt_blocks", 0)
    assert by_load == 1 or by_scrubber > 0
    assert rank.ask("set", keys=keys, pages=pages(0, COUNT)).flags == ALL
    rank.ask("detach")
