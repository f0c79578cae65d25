"""Batches of peers: when their deadline begins, which goes first, and which is dropped."""

from __future__ import annotations

from typing import Any

import pytest
from kvbm_common.tier.breaker import FAILURES_MAX
from kvbm_common.tier.cost_line import LOADS_MIN
from kvbm_host_tier.core.limits import HostTierLimits
from kvbm_host_tier.core.load_cost import TRY_MS
from kvbm_host_tier.core.peer_messages import AskHolders, PullFromPeer
from kvbm_host_tier.core.peer_pulls import AHEAD_MS

from tests.services.host_tier.helpers import LOOKUP_MS, SLOT_BYTES, of
from tests.services.host_tier.peer_helpers import ANN, HostWithPeers, asked_numbers

BATCH_MS = HostTierLimits().peer_deadline_ms
LONG_MS = 5 * BATCH_MS


def host_of(*, slots: int = 32, peer_pulls_max: int = 1, **limits: Any) -> HostWithPeers:
    """A host whose batches have one block each, and go one after the other."""
    return HostWithPeers(
        slots=slots, peer_pulls_max=peer_pulls_max, batch_blocks_max=1, engine_lost_ms=10**6,
        **limits,
    )  # fmt: skip


def dropped(host: HostWithPeers, reason: str) -> int:
    return host.core.view.counts[f"dropped.peer_{reason}"]


def bypassed(host: HostWithPeers) -> float:
    return host.core.view.statistics(host.now_ms).figures["peers_bypassed"]


def test_the_deadline_of_a_batch_counts_from_its_start() -> None:
    """Each batch is nearly late. The last one begins after more than the time that one may take."""
    host = host_of()
    pulls = host.ask_peers(*range(1, FAILURES_MAX + 2), deadline_ms=LONG_MS)
    for number in range(1, FAILURES_MAX + 2):
        [pull] = pulls
        assert (asked_numbers(pull), pull.deadline_ms) == ([number], BATCH_MS)
        host.now_ms += BATCH_MS - 1
        effects = host.came(pull)
        pulls = of(effects, PullFromPeer)
    assert len(host.found(effects).slots) == FAILURES_MAX + 1
    assert bypassed(host) == dropped(host, "deadline") == 0


def test_a_batch_that_begins_shortly_before_the_answer_has_its_whole_time() -> None:
    """The engine is answered without it; the block comes, and nothing is said of the peer."""
    host = host_of()
    [first] = host.ask_peers(1, 2)
    host.now_ms += LOOKUP_MS - 1
    [second] = of(host.came(first), PullFromPeer)
    assert second.deadline_ms == BATCH_MS
    assert len(host.found(host.wait(1)).slots) == 1
    host.now_ms += LOOKUP_MS
    host.came(second)
    assert host.slot_of(2) is not None


def test_the_front_of_a_short_run_overtakes_the_tail_of_a_long_one() -> None:
    host = host_of()
    [first] = host.ask_peers(*range(1, 9), deadline_ms=LONG_MS)
    assert host.ask_peers(21, deadline_ms=LONG_MS) == []
    order = list[int]()
    pulls = [first]
    while pulls:
        order += asked_numbers(pulls[0])
        pulls = of(host.came(pulls[0]), PullFromPeer)
    assert order == [1, 21, *range(2, 9)]


def test_a_tail_does_not_wait_without_end() -> None:
    """A block is asked for in each step; the old tail has its turn, later for its place."""
    host = host_of()
    pulls = host.ask_peers(*range(1, 4), deadline_ms=LONG_MS)
    order = list[int]()
    for step in range(6):
        host.now_ms += AHEAD_MS
        host.ask_peers(21 + step, deadline_ms=LONG_MS)
        order += asked_numbers(pulls[0])
        pulls = of(host.came(pulls[0]), PullFromPeer)
    assert order[:5] == [1, 2, 21, 3, 22]


def test_the_batches_after_a_cut_are_dropped() -> None:
    host = host_of()
    [first] = host.ask_peers(1, 2, 3, deadline_ms=LONG_MS)
    effects = host.lost(first)
    assert host.found(effects).reason == "transfer_timeout"
    assert of(effects, PullFromPeer) == []
    assert dropped(host, "unwanted") == 2
    assert host.slots["staged"] == 0


def test_a_batch_after_a_cut_that_another_lookup_wants_is_kept() -> None:
    host = host_of()
    [first] = host.ask_peers(1, 2, 3, deadline_ms=LONG_MS)
    host.look_up(3, deadline_ms=LONG_MS)
    [third] = of(host.lost(first), PullFromPeer)
    assert asked_numbers(third) == [3]
    assert len(host.found(host.came(third)).slots) == 1
    assert dropped(host, "unwanted") == 1


@pytest.mark.parametrize("leaves", [False, True])
def test_the_batches_of_an_answered_lookup_are_dropped_at_the_next_tick(leaves: bool) -> None:
    """The pull in flight stays; no slot waits behind it."""
    host = host_of()
    [first] = host.ask_peers(1, 2, 3)
    if leaves:
        host.bye()
    host.wait(1 if leaves else LOOKUP_MS)
    assert dropped(host, "unwanted" if leaves else "deadline") == 2
    assert host.slots["staged"] == 1
    assert of(host.came(first), PullFromPeer) == []


def test_a_try_in_the_queue_waits_for_its_turn() -> None:
    """No lookup waits for a try, which measures a peer that is too slow."""
    host = host_of(recompute_tokens_per_s=1000.0)
    for number in range(LOADS_MIN):
        [pull] = host.ask_peers(101 + number, deadline_ms=LONG_MS)
        host.now_ms += 50
        host.release(host.found(host.came(pull)).lease)
    host.now_ms += TRY_MS[1]
    [first, *rest] = host.ask_peers(1, 2, 3, 4, deadline_ms=LONG_MS)
    assert rest == []
    host.wait(1)
    assert host.core.view.counts["explored_blocks"] == 4
    assert [asked_numbers(pull) for pull in of(host.came(first), PullFromPeer)] == [[2]]
    host.wait(LONG_MS)
    assert dropped(host, "deadline") == 2


def test_small_blocks_come_in_larger_batches() -> None:
    host = host_of(batch_bytes=3 * SLOT_BYTES)
    [ask] = of(host.look_up(1, 2, 3, 4), AskHolders)
    [pull] = of(host.answer(ask, (ANN, 4)), PullFromPeer)
    assert asked_numbers(pull) == [1, 2, 3]
