"""Loads that would take longer than computing: measured, declined, and told why."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvbm_common.identity import pack_hashes
from kvbm_common.wire.admin import PrefetchRequest
from kvbm_common.wire.local import Lookup
from kvbm_host_tier.core.limits import HostTierLimits
from kvbm_host_tier.core.load_cost import FORGOTTEN_MS, KEPT, LOADS_MIN, Line
from kvbm_host_tier.core.messages import AdminAsked, AskFill, Effect
from kvbm_host_tier.core.peer_messages import AskHolders, PullFromPeer

from tests.services.host_tier.helpers import (
    LEASE_MS,
    LOOKUP_MS,
    NAMESPACE,
    Host,
    asked,
    incarnation,
    name,
    of,
)
from tests.services.host_tier.peer_helpers import ANN, HostWithPeers

TOKENS_PER_S = 1000.0
"""A block of four tokens is computed in 4 ms."""
BLOCK_MS = 4


def load(host: Host, number: int, took_ms: int) -> None:
    """A block comes from disk in so many ms."""
    host.disk_stored(number)
    [fill] = of(host.look_up(number), AskFill)
    host.now_ms += took_ms
    host.release(host.found(host.filled(fill)).lease)


def measured(took_ms: int, *, tokens_per_s: float = TOKENS_PER_S, slots: int = 8) -> Host:
    """A host tier whose disk takes so many ms for a block."""
    host = Host(slots=slots, recompute_tokens_per_s=tokens_per_s)
    for number in range(LOADS_MIN):
        load(host, 101 + number, took_ms)
    return host


def declined(host: Host) -> int:
    return host.core.view.counts["declined_blocks"]


# --- the line -------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(1, 100), st.integers(0, 50)), min_size=2, max_size=30))
def test_the_line_is_that_of_weighted_least_squares(loads: list[tuple[int, int]]) -> None:
    """numpy's, wherever sizes differ enough and neither part of it is negative."""
    line = Line()
    for size, took_ms in loads:
        line.add(size, took_ms, 0)
    sizes, times = np.array(loads, float).T
    weights = KEPT ** np.arange(len(loads))[::-1]
    mean = np.average(sizes, weights=weights)
    estimate = line.at(50)
    assert estimate >= 0
    if np.average((sizes - mean) ** 2, weights=weights) < 0.02 * mean**2:
        return
    slope, start = np.polyfit(sizes, times, 1, w=np.sqrt(weights))
    if slope > 1e-6 and start > 1e-6:
        assert estimate == pytest.approx(start + slope * 50, rel=1e-6)


def test_loads_of_one_size_say_that_twice_as_much_takes_twice_as_long() -> None:
    line = Line()
    for _ in range(5):
        line.add(10, 3, 0)
    assert line.at(20) == pytest.approx(6)


def test_a_start_that_costs_time_is_not_multiplied() -> None:
    """10 ms for whatever it is, and 1 ms a block: 30 blocks take 40 ms, not 165."""
    line = Line()
    for size in (2, 4, 2, 4, 8):
        line.add(size, 10 + size, 0)
    assert line.at(30) == pytest.approx(40)


# --- lookups --------------------------------------------------------------------------------------


def test_a_load_that_takes_longer_than_computing_is_declined() -> None:
    """The engine is answered at once, and an operator may ask why."""
    host = measured(BLOCK_MS + 1)
    host.disk_stored(1, 2)
    effects = ask(host, 1, 2)
    assert of(effects, AskFill) == []
    found = host.found(effects)
    assert (found.slots, found.reason) == ([], "recompute_cheaper")
    [told] = host.core.view.explanations("r")
    assert (told.hit_blocks, told.reason) == (0, "recompute_cheaper")
    assert [(s.blocks, s.reason, s.tier) for s in told.segments] == [
        (1, "recompute_cheaper", "disk"), (1, "behind", "disk"),
    ]  # fmt: skip
    assert declined(host) == 2
    assert host.core.view.counts["missed_blocks.recompute_cheaper"] == 1


def test_a_load_that_is_as_fast_is_made() -> None:
    host = measured(BLOCK_MS)
    host.disk_stored(1, 2)
    [fill] = of(host.look_up(1, 2), AskFill)
    assert asked(fill) == [1, 2]
    assert declined(host) == 0


def test_what_is_here_before_it_is_found_all_the_same() -> None:
    host = measured(BLOCK_MS + 1)
    host.store(1)
    host.disk_stored(2)
    found = host.found(host.look_up(1, 2))
    assert (len(found.slots), found.reason) == (1, "recompute_cheaper")


def test_what_is_here_behind_it_would_have_to_be_computed_too() -> None:
    """Block 1 takes 5 ms to come. Alone that is too long; with 2 behind it, 8 ms are at stake."""
    host = measured(BLOCK_MS + 1)
    host.disk_stored(1)
    host.store(2)
    [fill] = of(host.look_up(1, 2), AskFill)
    assert asked(fill) == [1]


def test_nothing_is_declined_before_it_was_measured_a_few_times() -> None:
    host = Host(slots=8, recompute_tokens_per_s=TOKENS_PER_S)
    for number in range(LOADS_MIN):
        load(host, 101 + number, 50)
    assert declined(host) == 0
    host.disk_stored(1)
    assert of(host.look_up(1), AskFill) == []


def test_a_load_that_the_deadline_cuts_counts_as_so_long() -> None:
    host = Host(slots=8, recompute_tokens_per_s=TOKENS_PER_S)
    for number in range(LOADS_MIN):
        host.disk_stored(101 + number)
        [fill] = of(host.look_up(101 + number), AskFill)
        host.wait(LOOKUP_MS)
        host.filled(fill)
    host.disk_stored(1)
    assert of(host.look_up(1), AskFill) == []


def test_a_disk_that_has_recovered_is_found_out() -> None:
    """Declined, nothing is measured; after half a minute a few loads are, whatever they take."""
    host = measured(50)
    host.disk_stored(1)
    assert of(host.look_up(1), AskFill) == []
    host.wait(FORGOTTEN_MS)
    host.attach()
    for number in range(LOADS_MIN):
        load(host, 201 + number, 1)
    host.disk_stored(2)
    assert asked(of(host.look_up(2), AskFill)[0]) == [2]


def test_a_fill_that_fails_teaches_nothing() -> None:
    """It may have failed at once."""
    host = Host(slots=8, recompute_tokens_per_s=TOKENS_PER_S)
    for number in range(LOADS_MIN + 1):
        host.disk_stored(101 + number)
        [fill] = of(host.look_up(101 + number), AskFill)
        host.now_ms += 50
        host.filled(fill, 101 + number, reason="corrupt")
    assert declined(host) == 0


def test_off_by_default() -> None:
    host = measured(LOOKUP_MS - 1, tokens_per_s=0)
    host.disk_stored(1)
    assert of(host.look_up(1), AskFill)
    assert HostTierLimits().recompute_tokens_per_s == 0


def test_what_an_operator_wants_is_brought() -> None:
    host = measured(50)
    host.disk_stored(1)
    request = PrefetchRequest(hashes=[name(1).hex()], deadline_ms=LOOKUP_MS)
    assert of(host.step(AdminAsked(1, "prefetch", request)), AskFill)


def test_a_peer_that_is_slower_than_computing_is_not_read() -> None:
    """Its blocks are measured apart from the disk's, from when the index has answered."""
    host = HostWithPeers(slots=8, recompute_tokens_per_s=TOKENS_PER_S)
    for number in range(LOADS_MIN):
        [pull] = host.ask_peers(101 + number)
        host.now_ms += BLOCK_MS + 1
        host.release(host.found(host.came(pull)).lease)
    load(host, 301, 1)
    [question] = of(host.look_up(1), AskHolders)
    effects = host.answer(question, (ANN, 1))
    assert of(effects, PullFromPeer) == []
    assert host.found(effects).reason == "recompute_cheaper"


def ask(host: Host, *wanted: int) -> list[Effect]:
    """Request `r` of an engine."""
    return host.say(
        Lookup(
            engine="ada", incarnation=incarnation(1), lookup=99, namespace=NAMESPACE.digest,
            hashes=pack_hashes(map(name, wanted)), lease_ms=LEASE_MS, deadline_ms=LOOKUP_MS,
            request="r",
        )
    )  # fmt: skip
