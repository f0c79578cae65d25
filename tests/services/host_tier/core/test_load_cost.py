"""Loads that would take longer than computing: measured, left to compute, and told why."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from kvbm_common.identity import pack_hashes
from kvbm_common.tier.cost_line import LOADS_MIN, SURPRISES_MAX
from kvbm_common.tier.prefill_cost import PrefillCost
from kvbm_common.wire.admin import PrefetchRequest
from kvbm_common.wire.local import Lookup
from kvbm_host_tier.core.limits import HostTierLimits
from kvbm_host_tier.core.load_cost import EXPLORED_BLOCKS, FAVOUR, TRY_MS, TRY_SHARE
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
SLOWER_MS = 6
"""More than the clock and the favour of what was chosen last."""


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


# --- lookups --------------------------------------------------------------------------------------


def test_a_load_that_takes_longer_than_computing_is_declined() -> None:
    """The engine is answered at once, and an operator may ask why."""
    host = measured(BLOCK_MS + SLOWER_MS)
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
    assert told.segments[0].detail == "20 ms to come, 8 ms to compute, 0 MiB under way"
    assert host.core.view.counts["left_to_compute_blocks.disk.slow"] == 2
    assert declined(host) == 2
    assert host.core.view.counts["missed_blocks.recompute_cheaper"] == 1


def test_a_load_that_is_as_fast_is_made() -> None:
    host = measured(BLOCK_MS)
    host.disk_stored(1, 2)
    [fill] = of(host.look_up(1, 2), AskFill)
    assert asked(fill) == [1, 2]
    assert declined(host) == 0


def test_what_is_here_before_it_is_found_all_the_same() -> None:
    host = measured(BLOCK_MS + SLOWER_MS)
    host.store(1)
    host.disk_stored(2)
    found = host.found(host.look_up(1, 2))
    assert (len(found.slots), found.reason) == (1, "recompute_cheaper")


def test_what_is_here_after_it_would_have_to_be_computed_too() -> None:
    """Block 1 takes 7 ms to come. Alone that is too long; with 2 after it, 8 ms are at stake."""
    host = measured(7)
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
    """Left, it is tried in the background; nobody waits, and three tries say that it is fast."""
    host = measured(50)
    for number in range(1, 2 + SURPRISES_MAX):
        host.disk_stored(number)
        host.now_ms += TRY_MS[1]
        host.attach()
        effects = host.look_up(number)
        assert host.found(effects).slots == [], "a lookup waits for a try"
        [fill] = of(effects, AskFill)
        host.now_ms += 1
        host.filled(fill)
        if number == SURPRISES_MAX:
            break
    host.disk_stored(77)
    assert asked(of(host.look_up(77), AskFill)[0]) == [77]
    assert host.core.view.counts["explored_blocks"] == SURPRISES_MAX


def test_a_medium_that_stays_slow_is_tried_at_most_so_often() -> None:
    """Ten seconds of lookups, one each 100 ms: every try is due, and has few blocks."""
    host, tried = measured(50), 0
    for number in range(1, 101):
        host.disk_stored(number)
        host.now_ms += 100
        host.attach()
        effects = host.look_up(number)
        assert host.found(effects).slots == []
        for fill in of(effects, AskFill):
            tried += 1
            assert len(asked(fill)) <= max(EXPLORED_BLOCKS)
            host.now_ms += 50
            host.filled(fill)
    assert 1 <= tried <= 15_000 // (TRY_SHARE * 50)


def test_what_a_try_has_brought_is_a_hit_of_the_next_lookup() -> None:
    host = measured(50)
    host.disk_stored(1)
    host.now_ms += TRY_MS[1]
    host.attach()
    [fill] = of(host.look_up(1), AskFill)
    host.filled(fill)
    assert len(host.found(host.look_up(1)).slots) == 1


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


# --- what the engine says -------------------------------------------------------------------------


def test_the_speed_that_the_engine_has_measured_decides() -> None:
    """4 ms a block: 20 ms to come is too long; a fast engine and a slow one differ."""
    host = measured(20, tokens_per_s=0)
    host.disk_stored(1)
    assert of(ask(host, 1), AskFill), "an engine that says nothing has all brought"
    host.disk_stored(2)
    fast = PrefillCost(1_000_000)
    assert host.found(ask(host, 2, prefill=fast)).reason == "recompute_cheaper"
    assert of(ask(host, 2, prefill=PrefillCost(20_000_000)), AskFill)


def test_long_prompts_are_slower_to_compute() -> None:
    """The same block after 1,000,000 tokens: each of its tokens attends to all of them."""
    host = measured(20, tokens_per_s=0)
    host.disk_stored(1)
    near = PrefillCost(1_000_000, pair_fs=10_000_000)
    assert host.found(ask(host, 1, prefill=near)).reason == "recompute_cheaper"
    far = PrefillCost(1_000_000, pair_fs=10_000_000, before=1_000_000)
    assert of(ask(host, 1, prefill=far), AskFill)


def test_an_absurd_speed_is_not_believed() -> None:
    host = measured(20, tokens_per_s=0)
    for number, said in enumerate((PrefillCost(0), PrefillCost(5, -1), PrefillCost(5, before=-9))):
        host.disk_stored(number + 1)
        assert of(ask(host, number + 1, prefill=said), AskFill)


def test_the_setting_turns_it_off() -> None:
    host = Host(slots=8, load_or_compute=False)
    for number in range(LOADS_MIN):
        load(host, 101 + number, 50)
    host.disk_stored(1)
    assert of(ask(host, 1, prefill=PrefillCost(1_000)), AskFill)


def test_the_queue_before_a_load_counts() -> None:
    """8 ms a block: one is brought; after four others it would come after 40 ms."""
    host = measured(8, tokens_per_s=0, slots=32)
    cost = PrefillCost(3_000_000)
    host.disk_stored(1, 2, 3, 4, 5)
    assert asked(of(ask(host, 1, 2, 3, 4, prefill=cost), AskFill)[0]) == [1, 2, 3, 4]
    assert host.found(ask(host, 5, prefill=cost)).reason == "recompute_cheaper"
    assert host.core.view.counts["left_to_compute_blocks.disk.queued"] == 1


def test_a_load_that_hangs_keeps_others_from_its_medium() -> None:
    """The disk takes 8 ms a block, and has not answered for 90 ms."""
    host = measured(8, tokens_per_s=0, slots=32)
    host.disk_stored(1, 2)
    ask(host, 1, prefill=PrefillCost(10_000_000))
    host.now_ms += 90
    assert host.found(ask(host, 2, prefill=PrefillCost(10_000_000))).reason == "recompute_cheaper"
    assert host.core.view.counts["left_to_compute_blocks.disk.stalled"] == 1


@given(
    took_ms=st.integers(3, 60),
    token_ns=st.integers(100_000, 20_000_000),
    pair_fs=st.integers(0, 10**12),
    blocks=st.integers(1, 6),
)
def test_the_run_ends_where_brute_force_says(
    took_ms: int, token_ns: int, pair_fs: int, blocks: int
) -> None:
    """All ends of the run, tried one by one: none is better by more than the favour."""
    host = measured(took_ms, tokens_per_s=0, slots=32)
    names = list(range(1, blocks + 1))
    host.disk_stored(*names)
    fills = of(ask(host, *names, prefill=PrefillCost(token_ns, pair_fs)), AskFill)
    end = sum(len(asked(fill)) for fill in fills)

    def total_ms(loaded: int) -> float:
        tokens = range(4 * loaded, 4 * blocks)
        computed = sum(token_ns / 1e6 + (at + 0.5) * pair_fs / 1e12 for at in tokens)
        return took_ms * loaded + computed

    best = min(map(total_ms, range(blocks + 1)))
    assert total_ms(end) <= best * FAVOUR * 1.01


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


def test_an_awaited_load_that_has_become_too_slow_is_left_when_the_index_answers() -> None:
    """1 and 2 come from disk while the index is asked for 3 and 4; 20 ms later the disk is slower
    than computing all of them. The run ends at 1, before where the question began."""
    host = HostWithPeers(slots=8)
    host.disk_stored(1, 2)
    effects = ask(host, 1, 2, 3, 4, prefill=PrefillCost(round(1e9 / TOKENS_PER_S)))
    [fill], [question] = of(effects, AskFill), of(effects, AskHolders)
    host.now_ms += 4 * BLOCK_MS + SLOWER_MS
    effects = host.answer(question, (ANN, 2))
    assert of(effects, PullFromPeer) == []
    found = host.found(effects)
    assert (found.slots, found.reason) == ([], "recompute_cheaper")
    host.filled(fill)
    assert host.announced == {1, 2}, "what was under way has come all the same"


def ask(host: Host, *wanted: int, prefill: PrefillCost | None = None) -> list[Effect]:
    """Request `r` of an engine."""
    return host.say(
        Lookup(
            engine="ada", incarnation=incarnation(1), lookup=99, namespace=NAMESPACE.digest,
            hashes=pack_hashes(map(name, wanted)), lease_ms=LEASE_MS, deadline_ms=LOOKUP_MS,
            request="r", prefill=prefill,
        )
    )  # fmt: skip
