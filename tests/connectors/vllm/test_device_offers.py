"""Offers over two KV groups: full attention, and a window of one block. A block has four tokens.

vLLM replaces blocks that have left the window by its null block, 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace as replace_rule
from typing import Any

import pytest
from kvbm_common.identity import Hasher, SequenceHash
from kvbm_common.wire.session_hint import Action
from kvbm_connectors.core.messages import Hit, Load, LoadResult, OfferEnded, OfferRun
from kvbm_connectors.vllm.block_holds import BlockHolds
from kvbm_connectors.vllm.kv_groups import KvGroup
from kvbm_connectors.vllm.plan import StepReport
from kvbm_connectors.vllm.scheduler_side import SchedulerSide
from msgspec.structs import replace

from tests.connectors.helpers import NAMESPACE
from tests.connectors.vllm.pool import Pool
from tests.connectors.vllm.requests import Output, Request

FULL = KvGroup(Hasher(NAMESPACE))
WINDOW = KvGroup(Hasher(replace(NAMESPACE, group=1)), 1, table=1)


class Half:
    """A scheduler half whose host tier has `hit`, and takes every offer."""

    epoch = 1

    def __init__(self) -> None:
        self.hit = Hit(0)
        self.asked: list[tuple[SequenceHash, ...]] = []
        self.offered: dict[int, OfferRun] = {}
        self.namespaces: dict[int, bytes] = {}
        self.revoked: list[int] = []
        self.ended: list[OfferEnded] = []
        self.over: set[int] = set()
        """Offers whose end was said, as those who look after them note."""
        self.results: list[LoadResult] = []
        self.takes = True

    def lookup(self, request: str, hashes: Sequence[SequenceHash], **_: Any) -> Hit:
        self.asked.append(tuple(hashes))
        return self.hit

    def take(self, request: str, blocks: Sequence[int]) -> Load:
        return Load(
            request=request, epoch=1, lease=1, slots=(0,) * len(blocks), blocks=tuple(blocks),
            hashes=self.asked[-1][: len(blocks)], checksums=(bytes(8),) * len(blocks),
            block_bytes=1, deadline_ms=1, whole=True,
        )  # fmt: skip

    def load_ended(self, result: LoadResult) -> None:
        self.results.append(result)

    def forget(self, request: str) -> None: ...

    def hint(
        self, session: str, action: Action, names: Sequence[SequenceHash] = (), *, ttl_ms: int = 0
    ) -> None: ...

    def offer(
        self, runs: Sequence[OfferRun], *, priority: int = 0, namespace: bytes = b"",
        hurry: bool = True,
    ) -> int | None:  # fmt: skip
        if not self.takes:
            return None
        number = len(self.offered) + 1
        self.offered[number] = OfferRun(
            runs[0].parent,
            tuple(name for run in runs for name in run.hashes),
            tuple(block for run in runs for block in run.blocks),
        )
        self.namespaces[number] = namespace
        return number

    def revoke(self, offer: int) -> None:
        self.revoked.append(offer)
        self.end(offer, complete=False)

    def end(self, *offers: int, complete: bool = True) -> None:
        """The host tier has these, or not."""
        self.ended += [OfferEnded(offer, 1, complete) for offer in offers]

    def drain_ended(self) -> list[OfferEnded]:
        ended, self.ended = self.ended, []
        return ended


class Engine:
    """The scheduler side of an engine with two groups, and its pool."""

    def __init__(self, *groups: KvGroup) -> None:
        self.pool, self.half, self.holds = Pool(), Half(), BlockHolds()
        self.holds.bind(self.pool)
        groups = groups or (FULL, WINDOW)
        self.side = SchedulerSide(self.half, groups[0].hasher, groups=groups, holds=self.holds)

    def admit(self, request: Request, local: int = 0) -> tuple[int | None, bool]:
        found = self.side.matched(request, local)
        request.num_computed_tokens = local
        return found

    def step(self, request: Request, tokens: int, *tables: list[int], ends: bool = True) -> None:
        """Plan a step, and let it end."""
        state = State({request.request_id: tables})
        self.side.plan(Output({request.request_id: tokens}, kv_connector_block_state=state))
        request.begin(tokens)
        if ends:
            request.end(tokens)

    @property
    def offers(self) -> dict[int, tuple[int, ...]]:
        """The device blocks of each offer."""
        return {number: run.blocks for number, run in self.half.offered.items()}


class State:
    """vllm.v1.core.sched.output.KVConnectorBlockState."""

    def __init__(self, tables: dict[str, tuple[list[int], ...]]) -> None:
        self.tables = tables
        self.boundary_state_offloads: dict[str, list[tuple[int, int, int]]] = {}

    def get_block_ids(self, req_id: str) -> tuple[list[int], ...] | None:
        return self.tables.get(req_id)


def tokens(count: int) -> tuple[int, ...]:
    return tuple(range(count))


def test_blocks_of_a_window_are_held_from_the_step_that_computes_them() -> None:
    """Goal: a block that leaves the window before its offer is not overwritten.

    1. A step computes four blocks, of a prompt of 17 tokens: the last one is the end of the
       prompt. It is held at once; nothing is offered.
    2. The step has ended, and vLLM has freed what left the window. Both groups are offered.
    """
    engine, request = Engine(), Request(all_token_ids=tokens(17))
    engine.admit(request)
    engine.step(request, 16, [1, 2, 3, 4], [11, 12, 13, 14])
    assert (engine.pool.held(), engine.offers) == ([14], {})
    engine.step(request, 1, [1, 2, 3, 4, 5], [0, 0, 0, 14, 15])
    assert engine.offers == {1: (1, 2, 3, 4), 2: (14,)}
    assert engine.half.namespaces == {
        1: FULL.hasher.namespace.digest,
        2: WINDOW.hasher.namespace.digest,
    }
    names = WINDOW.hasher.chain(tokens(16))
    assert engine.half.offered[2].parent == names[2]
    assert engine.half.offered[2].hashes == (names[3],)
    assert engine.pool.held() == [1, 2, 3, 4, 14]


def test_a_window_may_be_the_first_group() -> None:
    engine = Engine(replace_rule(FULL, window_blocks=1), replace_rule(WINDOW, window_blocks=0))
    request = Request(all_token_ids=tokens(17))
    engine.admit(request)
    engine.step(request, 16, [1, 2, 3, 4], [11, 12, 13, 14])
    assert (engine.pool.held(), engine.offers) == ([4], {})
    engine.step(request, 1, [0, 0, 0, 4, 5], [11, 12, 13, 14, 15])
    assert engine.offers == {1: (4,), 2: (11, 12, 13, 14)}


def test_what_an_offer_holds_is_free_when_it_ends() -> None:
    """The request goes on, and keeps its own references."""
    engine, request = Engine(), Request(all_token_ids=tokens(17))
    engine.admit(request)
    engine.step(request, 16, [1, 2, 3, 4], [11, 12, 13, 14])
    engine.step(request, 1, [1, 2, 3, 4, 5], [0, 0, 0, 14, 15])
    engine.half.end(1)
    engine.side.plan(Output())
    assert engine.pool.held() == [14]
    engine.half.end(2)
    assert engine.side.plan(Output()).sent == ()
    assert engine.pool.held() == []
    assert not len(engine.holds)


def test_a_finished_request_is_not_kept_and_its_last_window_is_offered() -> None:
    """Goal: the next turn of a conversation begins where this one ends.

    The answer has 7 tokens: two more blocks. The window before the end of the prompt was held, and
    the last block is in the table.
    """
    engine, request = Engine(), Request(all_token_ids=tokens(9))
    engine.admit(request)
    engine.step(request, 8, [1, 2], [11, 12])
    request.all_token_ids = tokens(16)
    engine.step(request, 8, [1, 2, 3, 4], [0, 12, 13, 14])
    assert not engine.side.finished(request, ([1, 2, 3, 4], [0, 0, 0, 14]))
    assert [engine.half.offered[number].blocks for number in (1, 2)] == [(1, 2), (12,)]
    assert [engine.half.offered[number].blocks for number in (3, 4)] == [(3, 4), (14,)]
    assert engine.pool.held() == [1, 2, 3, 4, 12, 14]
    engine.half.end(1, 2, 3, 4)
    engine.side.plan(Output())
    assert engine.side.idle
    assert engine.pool.held() == []


def test_where_no_host_tier_takes_offers_nothing_stays_held() -> None:
    engine, request = Engine(), Request(all_token_ids=tokens(17))
    engine.half.takes = False
    engine.admit(request)
    engine.step(request, 16, [1, 2, 3, 4], [11, 12, 13, 14])
    assert engine.pool.held() == [14]
    engine.step(request, 1, [1, 2, 3, 4, 5], [0, 0, 0, 14, 15])
    engine.side.finished(request, ([1, 2, 3, 4, 5], [0, 0, 0, 14, 15]))
    assert (engine.pool.held(), engine.side.idle) == ([], True)


def test_a_preempted_request_gives_back_what_is_not_on_offer() -> None:
    """What is on offer stays held: no step overwrites it, and the offer is not revoked."""
    engine, request = Engine(), Request(all_token_ids=tokens(33))
    engine.admit(request)
    engine.step(request, 16, [1, 2, 3, 4], [11, 12, 13, 14])
    engine.step(request, 16, [1, 2, 3, 4, 5, 6, 7, 8], [0, 0, 0, 14, 15, 16, 17, 18], ends=False)
    assert engine.pool.held() == [1, 2, 3, 4, 14, 18]
    engine.side.plan(Output(preempted_req_ids=["r"]))
    assert engine.pool.held() == [1, 2, 3, 4, 14]
    assert engine.half.revoked == []


def test_a_block_that_only_guesses_fill_is_not_held() -> None:
    """Goal: vLLM does not wait for a block that nothing fills: it schedules nothing meanwhile.

    1. A step with guesses is in flight, another one planned. 2. The guesses are rejected, and vLLM
    has no room for the request. 3. It has, and a block of the window is filled: this is held.
    """
    engine, request = Engine(), Request(all_token_ids=tuple(range(12)))
    engine.admit(request)
    tables = ([1, 2, 3, 4, 5], [11, 12, 13, 14, 15])
    engine.step(request, 12, *tables)
    request.all_token_ids = tuple(range(13))
    state = State({"r": tables})
    guesses = {"r": [0, 0, 0]}
    engine.side.plan(Output({"r": 4}, guesses, kv_connector_block_state=state))
    request.begin(4)
    engine.side.plan(Output({"r": 1}, kv_connector_block_state=state))
    request.begin(1)
    engine.half.end(*engine.half.offered)
    request.end(4, rejected=3)
    request.end(1)
    request.all_token_ids = tuple(range(15))
    engine.side.plan(Output())
    assert (engine.pool.held(), engine.side.holding) == ([], False)
    engine.step(request, 2, *tables)
    assert engine.pool.held() == [14]


def test_a_request_that_ends_with_its_first_step_offers_all_windows_that_were_held() -> None:
    """Goal: a prefill node, or an answer of one token, stores windows inside of the prompt, too.

    vLLM plans a step without the request while its only one is in flight: what it fills stays held.
    """
    engine, request = Engine(), Request(all_token_ids=tokens(33))
    engine.admit(request)
    tables = ([1, 2, 3, 4, 5, 6, 7, 8, 9], [11, 12, 13, 14, 15, 16, 17, 18, 19])
    engine.step(request, 33, *tables, ends=False)
    engine.side.plan(Output())
    assert engine.pool.held() == [14, 18]
    request.end(33)
    engine.side.finished(request, tables)
    assert engine.offers == {1: (1, 2, 3, 4, 5, 6, 7, 8), 2: (14, 18)}


def test_a_refused_request_gives_back_what_it_holds() -> None:
    """A reset with other weights: what is computed now is stored under no name."""
    engine, request = Engine(), Request(all_token_ids=tokens(17))
    engine.admit(request)
    engine.step(request, 16, [1, 2, 3, 4], [11, 12, 13, 14])
    engine.side.reset("0123456789abcdef")
    assert engine.pool.held() == []


def test_before_vllm_shows_its_pool_nothing_is_offered() -> None:
    engine, request = Engine(), Request(all_token_ids=tokens(17))
    side = SchedulerSide(engine.half, FULL.hasher, groups=[FULL, WINDOW], holds=BlockHolds())
    engine.side = side
    engine.admit(request)
    engine.step(request, 16, [1, 2, 3, 4], [11, 12, 13, 14])
    engine.step(request, 1, [1, 2, 3, 4, 5], [0, 0, 0, 14, 15])
    assert engine.offers == {}


def test_what_is_kept_of_a_request_without_a_step_is_offered_and_given_back() -> None:
    """Goal: vLLM waits for blocks that a connector holds, instead of preempting a request.

    1. A block of the window is held, and its step ends. There are no blocks for the next step.
    2. A step without the request offers it all the same; the offer ends, and the block is free.
    """
    engine, request = Engine(), Request(all_token_ids=tokens(17))
    engine.admit(request)
    engine.step(request, 16, [1, 2, 3, 4], [11, 12, 13, 14])
    assert engine.side.holding
    engine.side.plan(Output())
    assert engine.offers == {1: (14,)}
    engine.half.end(1)
    engine.side.plan(Output())
    assert (engine.pool.held(), engine.side.holding) == ([], False)


# --- recurrent states and blocks of other sizes ---------------------------------------------------

STATE = KvGroup(Hasher(replace(NAMESPACE, group=1, block_tokens=8)), 1, table=1, handed_over=True)
"""A state for eight tokens: two blocks of full attention."""


def recurrent() -> Engine:
    engine = Engine()
    engine.side = SchedulerSide(engine.half, FULL.hasher, groups=[FULL, STATE], holds=engine.holds)
    return engine


def hand_over(engine: Engine, request: Request, tokens: int, *states: tuple[int, int, int]) -> None:
    """Plan a step that computes so many tokens, and in which vLLM hands over states."""
    state = State({request.request_id: ([1, 2, 3, 4, 5], [0, 13])})
    state.boundary_state_offloads = {request.request_id: list(states)}
    engine.side.plan(Output({request.request_id: tokens}, kv_connector_block_state=state))
    request.begin(tokens)


def test_a_state_is_held_from_the_step_that_computes_it_and_offered_when_that_has_ended() -> None:
    """Goal: a state that vLLM moves on from is stored under the name of its boundary.

    1. A step computes 16 tokens: vLLM hands over the state after them, of group 1 in block 13.
    2. It has ended: four blocks of full attention are offered, and the second state.
    """
    engine, request = recurrent(), Request(all_token_ids=tokens(17))
    engine.admit(request)
    hand_over(engine, request, 16, (1, 13, 16))
    assert (engine.pool.held(), engine.offers) == ([13], {})
    request.end(16)
    hand_over(engine, request, 1)
    assert engine.offers == {1: (1, 2, 3, 4), 2: (13,)}
    assert engine.half.offered[2].hashes == (STATE.hasher.chain(tokens(16))[1],)
    assert engine.half.namespaces[2] == STATE.hasher.namespace.digest


@pytest.mark.parametrize("state", [(1, 13, 12), (2, 13, 16), (1, 0, 16)])
def test_states_that_no_hit_can_use_are_left(state: tuple[int, int, int]) -> None:
    """One inside of a block, one of a group that is not cached, and vLLM's null block."""
    engine, request = recurrent(), Request(all_token_ids=tokens(17))
    engine.admit(request)
    hand_over(engine, request, 16, state)
    assert engine.pool.held() == []


def test_a_state_that_was_loaded_is_not_offered_again() -> None:
    """vLLM hands over what a load has brought, too: it caches the block then."""
    engine, request = recurrent(), Request(all_token_ids=tokens(17))
    engine.half.hit = Hit(3, host=3, boundary=8, shared=8)
    assert engine.admit(request) == (8, True)
    engine.side.allocated(request, Table([1, 2], [13]), 8)
    [load] = engine.side.plan(Output()).loads
    assert load.blocks == (1, 2, 13)
    engine.side.reported(StepReport((LoadResult(load, (True,) * 3),)))
    request.num_computed_tokens = 8
    hand_over(engine, request, 8, (1, 13, 8), (1, 14, 16))
    assert engine.pool.held() == [14]


def test_a_lookup_asks_for_blocks_of_the_size_that_each_group_has() -> None:
    """One token is left to compute: 16 of 17, which are four blocks and two states."""
    engine, request = recurrent(), Request(all_token_ids=tokens(17))
    engine.admit(request)
    names = FULL.hasher.chain(tokens(16)), STATE.hasher.chain(tokens(16))
    assert engine.half.asked == [(*names[0], *names[1])]
    shorter = Request("s", all_token_ids=tokens(16))
    engine.admit(shorter)
    assert engine.half.asked[1] == (*names[0][:2], names[1][0]), "both groups end a block at 8"


def test_vllm_is_told_to_leave_a_state_where_prompts_part() -> None:
    """Goal: the second prompt with a shared beginning makes it a hit for the third.

    Full attention has 16 tokens of the prompt, and no state is there: vLLM ends a step at 16.
    """
    engine, request = recurrent(), Request(all_token_ids=tokens(25))
    engine.half.hit = Hit(0, reason="not_stored", boundary=0, shared=16)
    assert engine.admit(request) == (0, False)
    assert request.shared_prefix_boundary == 16
    engine.half.hit = Hit(3, boundary=16, shared=16)
    other = Request("o", all_token_ids=tokens(25))
    engine.admit(other)
    assert other.shared_prefix_boundary == 0


# --- chunks ---------------------------------------------------------------------------------------


def test_of_chunks_the_blocks_of_the_last_one_are_kept() -> None:
    """Goal: a prompt of 25 tokens ends in its second chunk of 16: two blocks are held of it.

    The end of the first chunk needs no block of the group.
    """
    engine, request = Engine(), Request(all_token_ids=tokens(25))
    chunks = KvGroup(Hasher(replace(NAMESPACE, group=1)), chunk_tokens=16, table=1)
    engine.side = SchedulerSide(engine.half, FULL.hasher, groups=[FULL, chunks], holds=engine.holds)
    engine.admit(request)
    engine.step(request, 24, [1, 2, 3, 4, 5, 6], [11, 12, 13, 14, 15, 16])
    assert engine.pool.held() == [15, 16]


# --- hits ---------------------------------------------------------------------------------------


def test_a_hit_is_loaded_into_the_blocks_that_it_needs() -> None:
    """Eight tokens are on the device; the host tier has up to 16: of the window, one block."""
    engine, request = Engine(), Request(all_token_ids=tokens(17))
    engine.half.hit = Hit(3, host=3, boundary=8, shared=8)
    assert engine.admit(request, 8) == (8, True)
    asked = FULL.hasher.chain(tokens(16))[2:] + WINDOW.hasher.chain(tokens(16))[2:]
    assert engine.half.asked == [tuple(asked)]
    engine.side.allocated(request, Table([1, 2, 3, 4], [0, 0, 0, 14]), 8)
    [load] = engine.side.plan(Output()).loads
    assert (load.blocks, load.whole) == ((3, 4, 14), True)


@pytest.mark.parametrize(("external", "table"), [(4, [0, 0, 13, 14]), (8, [0, 0, 0, 0])])
def test_a_hit_that_vllm_cuts_or_has_no_room_for_fails_as_a_whole(
    external: int, table: list[int]
) -> None:
    """Goal: a shorter hit needs other blocks of the window, which nobody has leased."""
    engine, request = Engine(), Request(all_token_ids=tokens(17))
    engine.half.hit = Hit(3, host=3, boundary=8, shared=8)
    engine.admit(request, 8)
    engine.side.allocated(request, Table([1, 2, 3, 4], table), external)
    [load] = engine.side.plan(Output()).loads
    assert (load.epoch, load.lease, load.whole) == (0, 0, True)
    assert engine.side.counts["loads_impossible"] == 1
    engine.side.reported(StepReport((LoadResult(load, (False,) * len(load.blocks)),)))
    assert engine.admit(request) == (0, False), "the same would happen again, and for ever"


LOADED = (True, True, True)


def load_two_blocks(engine: Engine, request: Request, intact: tuple[bool, ...]) -> None:
    """A hit of eight tokens is loaded: blocks 1 and 2, and 12 of the window."""
    engine.half.hit = Hit(3, host=3, boundary=8, shared=8)
    engine.admit(request)
    engine.side.allocated(request, Table([1, 2], [0, 12]), 8)
    [load] = engine.side.plan(Output()).loads
    corrupt = tuple(index for index, is_intact in enumerate(intact) if not is_intact)
    engine.side.reported(StepReport((LoadResult(load, intact, corrupt),)))


def test_loaded_blocks_are_not_offered_again_and_what_is_behind_them_is() -> None:
    engine, request = Engine(), Request(all_token_ids=tokens(17))
    load_two_blocks(engine, request, LOADED)
    request.num_computed_tokens = 8
    engine.step(request, 8, [1, 2, 3, 4], [0, 12, 13, 14])
    engine.step(request, 1, [1, 2, 3, 4, 5], [0, 0, 0, 14, 15])
    assert engine.offers == {1: (3, 4), 2: (14,)}


def test_loaded_blocks_that_another_request_shares_are_not_offered_again() -> None:
    """1. A load brings two full blocks, and one of the window. 2. Another prompt begins alike: the
    device has them, and what is behind them is offered."""
    engine = Engine()
    load_two_blocks(engine, Request(all_token_ids=tokens(17)), LOADED)
    engine.half.hit = Hit(0)
    second = Request(request_id="second", all_token_ids=tokens(17))
    engine.admit(second, 8)
    engine.step(second, 8, [1, 2, 5, 6], [0, 12, 15, 16])
    engine.step(second, 1, [1, 2, 5, 6, 7], [0, 0, 0, 16, 17])
    assert engine.offers == {1: (5, 6), 2: (16,)}


def test_after_a_load_that_failed_everything_is_offered_again() -> None:
    """One block of the window is corrupt: vLLM computes the whole prompt. Prompts part at 8."""
    engine, request = Engine(), Request(all_token_ids=tokens(17))
    load_two_blocks(engine, request, (True, True, False))
    assert engine.side.counts["loads_failed"] == 1
    assert engine.admit(request) == (0, False)
    assert len(engine.half.asked) == 1, "it is computed: vLLM may wait for ever for a second load"
    engine.step(request, 16, [1, 2, 3, 4], [11, 12, 13, 14])
    engine.step(request, 1, [1, 2, 3, 4, 5], [0, 0, 0, 14, 15])
    assert engine.offers == {1: (1, 2, 3, 4), 2: (12, 14)}


def test_a_load_that_failed_does_not_stand_before_others_that_have_ended() -> None:
    """Goal: vLLM tries the failed one first and nothing behind it while it has no room, which the
    others hold.

    1. No step computes: others go first, every second time. 2. One of them computes: it goes first.
    """
    engine = Engine()
    failed, ended = Request("failed", tokens(17)), Request("ended", tokens(17))
    load_two_blocks(engine, failed, (True, True, False))
    engine.side.plan(Output())
    assert engine.admit(failed) == (0, False), "it is alone"
    load_two_blocks(engine, ended, LOADED)
    ended.num_computed_tokens = 8
    found = []
    for _ in range(4):
        engine.side.plan(Output())
        found.append(engine.admit(failed)[0])
    assert found == [None, 0, None, 0]
    engine.step(ended, 8, [1, 2, 3, 4], [0, 12, 13, 14])
    assert [engine.admit(failed)[0] for _ in range(2)] == [0, 0]


def test_where_prompts_part_the_window_is_kept() -> None:
    """Goal: the second prompt with a shared beginning makes it a hit for the third.

    The full group has 12 tokens, the window none of them: the window before 12 is held.
    """
    engine, request = Engine(), Request(all_token_ids=tokens(25))
    engine.half.hit = Hit(0, reason="not_stored", boundary=0, shared=12)
    assert engine.admit(request) == (0, False)
    table = [11, 12, 13, 14, 15, 16]
    engine.step(request, 24, [1, 2, 3, 4, 5, 6], table)
    assert engine.pool.held() == [13, 14, 16], "12 tokens, every fourth window, the prompt's end"


def test_where_a_hit_of_the_device_ended_the_window_is_kept() -> None:
    """Goal: another prompt may part there, too. The device has 12 tokens; of full attention, the
    host tier has 20. Every fourth window and the prompt's end are kept as ever."""
    engine, request = Engine(), Request(all_token_ids=tokens(25))
    engine.half.hit = Hit(0, reason="not_stored", boundary=0, shared=8)
    engine.admit(request, 12)
    engine.step(request, 12, [1, 2, 3, 4, 5, 6], [0, 0, 13, 14, 15, 16])
    assert engine.pool.held() == [13, 14, 15, 16]


def test_what_no_host_tier_took_is_offered_when_another_request_shares_it() -> None:
    """1. No host tier is there, and two blocks are computed. 2. It is: a prompt begins alike."""
    engine, first = Engine(), Request(all_token_ids=tokens(9))
    engine.half.takes = False
    engine.admit(first)
    engine.step(first, 8, [1, 2, 3], [11, 12, 13])
    engine.step(first, 1, [1, 2, 3], [0, 12, 13])
    engine.half.takes = True
    second = Request("second", all_token_ids=tokens(17))
    engine.admit(second, 8)
    engine.step(second, 8, [1, 2, 5, 6], [0, 12, 15, 16])
    engine.step(second, 1, [1, 2, 5, 6, 7], [0, 0, 0, 16, 17])
    assert engine.offers == {1: (1, 2, 5, 6), 2: (12, 16)}


class Table:
    """vllm.v1.core.kv_cache_manager.KVCacheBlocks."""

    def __init__(self, *tables: list[int]) -> None:
        self.tables = tables

    def get_block_ids(self) -> tuple[list[int], ...]:
        return self.tables
