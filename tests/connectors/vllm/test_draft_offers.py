"""Offers of an engine with a draft model, which writes KV when its step has been reported."""

from __future__ import annotations

import pytest
from kvbm_connectors.vllm.block_holds import BlockHolds
from kvbm_connectors.vllm.plan import StepPlan, StepReport
from kvbm_connectors.vllm.scheduler_side import SchedulerSide

from tests.connectors.vllm.pool import Pool
from tests.connectors.vllm.requests import BlockState, Output, Request
from tests.connectors.vllm.test_device_offers import FULL, WINDOW, Half, State

TABLE = [3, 4, 5]


class DraftEngine:
    """The scheduler side of an engine with one KV group, and what its plans say."""

    def __init__(self, ranks: int = 1, rewritten: int | None = 0) -> None:
        self.half, self.request = Half(), Request()
        self.side = SchedulerSide(self.half, FULL.hasher, world_size=ranks, rewritten=rewritten)
        self.side.matched(self.request, 0)

    def prefill(self) -> None:
        """Compute the prompt of two blocks and a token."""
        self.plan({"r": 9})
        self.request.begin(9)
        self.request.end(9)

    def plan(
        self, tokens: dict[str, int] | None = None, preempted: tuple[str, ...] = ()
    ) -> StepPlan:
        state = BlockState({"r": TABLE})
        output = Output(tokens or {}, preempted_req_ids=preempted, kv_connector_block_state=state)
        return self.side.plan(output)

    def report(self, *passed: tuple[int, bool]) -> None:
        self.side.reported(StepReport(mark_ends=passed))

    def waits(self) -> tuple[bool, bool]:
        """Whether offers wait for marks, and whether blocks of ended requests are held."""
        return self.side.awaits_marks, self.side.holding

    @property
    def offered(self) -> list[tuple[int, ...]]:
        return [run.blocks for run in self.half.offered.values()]


def test_what_a_request_has_computed_is_offered_behind_a_mark() -> None:
    """1. A step is over: the next plan lays a mark, and nothing is offered. 2. Both ranks have
    passed it: the blocks are."""
    engine = DraftEngine(ranks=2)
    engine.prefill()
    assert engine.plan({"r": 1}).mark == 1
    engine.report((1, True))
    assert engine.offered == []
    engine.report((1, True))
    assert engine.offered == [(3, 4)]


def test_a_request_of_one_token_is_stored() -> None:
    """Goal: a prefill node, or a short answer, stores its prompt.

    1. The request ends with its first step: vLLM keeps its blocks, and goes on to step.
    2. The mark of the next step is over: they are offered. 3. The host tier has them: they are
    free, and nothing is left.
    """
    engine = DraftEngine()
    engine.prefill()
    assert engine.side.finished(engine.request, [TABLE])
    assert engine.waits() == (True, True)
    assert engine.plan().mark == 1
    assert engine.plan().mark == 0
    engine.report((1, True))
    assert engine.offered == [(3, 4)]
    assert engine.waits() == (False, True)
    assert engine.plan().sent == ()
    engine.half.end(1)
    assert engine.plan().sent == ("r",)
    assert engine.side.idle


@pytest.mark.parametrize("takes", [True, False])
def test_a_stream_of_which_nothing_is_known_offers_nothing(*, takes: bool) -> None:
    """Its blocks are free at once, as those of an offer that the half does not take."""
    engine = DraftEngine()
    engine.half.takes = takes
    engine.prefill()
    assert engine.side.finished(engine.request, [TABLE])
    engine.plan()
    engine.report((1, not takes))
    assert engine.offered == []
    assert engine.plan().sent == ("r",)
    assert engine.side.idle
    assert engine.side.counts["offers_unmarked"] == takes


def test_a_preempted_request_offers_nothing_behind_its_mark() -> None:
    """vLLM has freed its blocks: another request may write them before the mark is over."""
    engine = DraftEngine()
    engine.prefill()
    assert engine.plan({"r": 1}).mark == 1
    engine.plan(preempted=("r",))
    engine.report((1, True))
    assert engine.offered == []
    assert not engine.request.num_in_flight_tokens


def test_a_reset_offers_nothing_behind_a_mark() -> None:
    """1. A request has ended, and a mark is laid. 2. A reset: its blocks are free. 3. The mark is
    over: nothing is offered under the names of before."""
    engine = DraftEngine()
    engine.prefill()
    engine.side.finished(engine.request, [TABLE])
    engine.plan()
    engine.side.reset("2")
    assert engine.plan().sent == ("r",)
    engine.report((1, True))
    assert engine.offered == []
    assert engine.side.idle


@pytest.mark.parametrize("rewritten", [None, 0])
def test_what_a_reset_has_freed_is_not_offered_by_a_request_that_ends(
    rewritten: int | None,
) -> None:
    """Goal: nothing reads blocks that vLLM may have given to others.

    1. Blocks are on offer, or wait for a mark. 2. A reset preempts their request, which is aborted
    before the plan that would say so. 3. Nothing is kept, and no offer goes on.
    """
    engine = DraftEngine(rewritten=rewritten)
    engine.prefill()
    mark = engine.plan({"r": 1}).mark
    engine.request.num_computed_tokens = 0
    assert not engine.side.finished(engine.request, [[]])
    engine.report((mark, True))
    engine.plan(preempted=("r",))
    assert engine.half.revoked == list(engine.half.offered)
    assert engine.side.idle


def test_what_the_next_step_writes_again_is_not_offered_yet() -> None:
    """A draft model of three modules has guessed two tokens of what it read after token 9."""
    engine = DraftEngine(rewritten=2)
    engine.prefill()
    engine.report((engine.plan({"r": 1}).mark, True))
    assert engine.offered == [(3,)]
    engine.request.all_token_ids = tuple(range(10))
    engine.request.begin(1)
    engine.request.end(1)
    engine.report((engine.plan({"r": 1}).mark, True))
    assert engine.offered == [(3,), (4,)]


def test_a_block_of_a_window_that_is_written_again_is_given_back_and_held_again() -> None:
    """Goal: vLLM does not wait for a block that cannot be offered: it has no room for the request.

    1. A step fills 14, whose end the next one writes again. 2. A step leaves the request out: the
    block is given back. 3. The request goes on: 14 is held as before, and full attention's blocks.
    """
    half, pool, holds = Half(), Pool(), BlockHolds()
    holds.bind(pool)
    side = SchedulerSide(half, FULL.hasher, rewritten=2, groups=[FULL, WINDOW], holds=holds)
    request = Request(all_token_ids=tuple(range(17)))
    side.matched(request, 0)
    state = State({"r": ([1, 2, 3, 4, 5], [11, 12, 13, 14, 15])})
    side.plan(Output({"r": 16}, kv_connector_block_state=state))
    request.begin(16)
    request.end(16)
    assert pool.held() == [14]
    side.plan(Output())
    assert pool.held() == []
    side.plan(Output({"r": 1}, kv_connector_block_state=state))
    assert pool.held() == [1, 2, 3, 14]


def test_without_a_host_tier_nothing_waits_for_a_mark() -> None:
    """The offer is counted as one that no host tier took, and the blocks are free at once."""
    engine = DraftEngine()
    engine.half.epoch, engine.half.takes = 0, False
    engine.prefill()
    assert not engine.side.finished(engine.request, [TABLE])
    assert engine.plan().mark == 0
    assert engine.side.idle


def test_over_several_groups_blocks_are_held_until_a_mark_is_over() -> None:
    """1. A request over two groups has ended: its blocks are held, though it is not. 2. The mark is
    over: each group's are offered, and held on until the offers end."""
    half, pool, holds = Half(), Pool(), BlockHolds()
    holds.bind(pool)
    side = SchedulerSide(half, FULL.hasher, rewritten=0, groups=[FULL, WINDOW], holds=holds)
    request = Request()
    side.matched(request, 0)
    tables = ([1, 2, 3], [11, 12, 13])
    side.plan(Output({"r": 9}, kv_connector_block_state=State({"r": tables})))
    request.begin(9)
    request.end(9)
    assert not side.finished(request, tables)
    assert (pool.held(), half.offered) == ([1, 2, 12], {})
    assert side.plan(Output()).mark == 1
    side.reported(StepReport(mark_ends=((1, True),)))
    assert [run.blocks for run in half.offered.values()] == [(1, 2), (12,)]
    assert pool.held() == [1, 2, 12]
    half.end(1, 2)
    side.plan(Output())
    assert pool.held() == []
    assert side.idle


def test_over_several_groups_a_preempted_request_loses_nothing_behind_a_mark() -> None:
    """Its blocks are held beside it: no step overwrites them, and they are offered with the end of
    the mark."""
    half, pool, holds = Half(), Pool(), BlockHolds()
    holds.bind(pool)
    side = SchedulerSide(half, FULL.hasher, rewritten=0, groups=[FULL, WINDOW], holds=holds)
    request = Request()
    side.matched(request, 0)
    state = State({"r": ([1, 2, 3], [11, 12, 13])})
    side.plan(Output({"r": 9}, kv_connector_block_state=state))
    request.begin(9)
    request.end(9)
    mark = side.plan(Output({"r": 1}, kv_connector_block_state=state)).mark
    side.plan(Output(preempted_req_ids=["r"]))
    assert pool.held() == [1, 2, 12]
    side.reported(StepReport(mark_ends=((mark, True),)))
    assert [run.blocks for run in half.offered.values()] == [(1, 2), (12,)]
