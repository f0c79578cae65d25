"""The scheduler side of vLLM's connector without vLLM: its request is a few numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from kvbm_common.identity import Hasher
from kvbm_common.wire.consolidator import Attach, Offered
from kvbm_common.wire.local import Hello, Lookup, Pulled
from kvbm_connectors.core.messages import LoadResult
from kvbm_connectors.vllm.block_holds import BlockHolds
from kvbm_connectors.vllm.plan import StepReport
from kvbm_connectors.vllm.scheduler_side import SchedulerSide

from tests.connectors.client.test_scheduler import Consolidator, Half, Host
from tests.connectors.endpoints import attached, consolidator, host_tier, welcome
from tests.connectors.helpers import EPOCH, NAMESPACE, answer
from tests.connectors.vllm.pool import Pool
from tests.connectors.vllm.requests import BlockSnapshot, BlockState, Output, Request
from tests.connectors.vllm.test_device_offers import Table
from tests.waiting import wait_for


@contextmanager
def both_attached(half: Half) -> Iterator[tuple[Host, Consolidator]]:
    """The half, started and attached to both services."""
    half.start()
    with host_tier(half.host_endpoint) as host, consolidator(half.consolidator_endpoint) as events:
        host.hear(Hello)
        host.say(welcome(EPOCH))
        events.hear(Attach)
        events.say(attached())
        wait_for(lambda: half.attached and half.streams_attached)
        yield host, events
        half.close()


def admit(side: SchedulerSide, host: Host, request: Request, local: int) -> None:
    """Look the request up; the host tier has nothing, the device `local` tokens."""
    if side.matched(request, local) == (None, False):
        host.say(answer(host.hear(Lookup).lookup, 0))
        wait_for(lambda: side.matched(request, local) == (0, False))
    request.num_computed_tokens = local


def test_workers_are_told_whether_anything_is_on_offer(tmp_path: Path) -> None:
    """Goal: a worker's mover stands ready exactly as long as the host tier may read.

    1. A request is looked up, computed and finished: its blocks are held and on offer.
    2. The host tier has them: they are sent, and nothing is on offer.
    """
    half = Half(tmp_path)
    side, request = SchedulerSide(half, Hasher(NAMESPACE)), Request()
    with both_attached(half) as (host, events):
        assert not side.plan(Output()).offering
        admit(side, host, request, 0)
        side.plan(Output({"r": 9}, kv_connector_block_state=BlockState({"r": [3, 4, 5]})))
        request.begin(9)
        request.end(9)
        assert side.finished(request, [[3, 4, 5]])
        assert side.plan(Output()).offering
        offered = events.hear(Offered)
        assert [run.blocks for run in offered.runs] == [[3, 4]]
        host.say(Pulled(offer=offered.offer, pulled=2, skipped=0))
        wait_for(lambda: not side.holding or side.plan(Output()).sent == ("r",))
        assert not side.plan(Output()).offering
        assert side.idle


def test_a_hit_of_the_same_step_is_offered_after_it(tmp_path: Path) -> None:
    """Goal: an offer holds only blocks that a finished step has written.

    1. Two requests with the same prompt arrive together: vLLM gives the second one the blocks
       that the first one computes in this very step. The plan offers nothing.
    2. The step has ended; the next plan offers the blocks once.
    """
    half = Half(tmp_path)
    side = SchedulerSide(half, Hasher(NAMESPACE))
    first, second = Request("first"), Request("second")
    with both_attached(half) as (host, events):
        admit(side, host, first, 0)
        admit(side, host, second, 8)
        state = BlockState({"first": [3, 4, 5], "second": [3, 4, 6]})
        output = Output({"first": 9, "second": 1}, kv_connector_block_state=state)
        assert not side.plan(output).offering
        first.begin(9)
        second.begin(1)
        first.end(9)
        second.end(1)
        assert side.plan(output).offering
        assert [run.blocks for run in events.hear(Offered).runs] == [[3, 4]]
        assert half.counts()["offered_blocks"] == 2


def test_a_preempted_request_loses_the_blocks_that_no_step_wrote(tmp_path: Path) -> None:
    """Goal: blocks that vLLM has hashed in the call that preempts are taken out of its cache."""
    half = Half(tmp_path)
    side, request = SchedulerSide(half, Hasher(NAMESPACE)), Request()
    evicted: list[tuple[str, int]] = []
    side.evict = lambda one, written: evicted.append((one.request_id, written))
    with both_attached(half) as (host, _):
        admit(side, host, request, 0)
        side.plan(Output({"r": 5}, kv_connector_block_state=BlockState({"r": [3, 4, 5]})))
        side.plan(Output(preempted_req_ids=["r"]))
        assert evicted == [("r", 5)], "tokens"


@pytest.mark.parametrize(("intact", "again"), [((False, True), False), ((True, False), True)])
def test_a_load_that_brings_nothing_is_not_tried_again(
    tmp_path: Path, intact: tuple[bool, bool], *, again: bool
) -> None:
    """Goal: no engine stands still behind a load that failed from its first block on.

    vLLM frees the blocks of such a request, asks again, and keeps the room for its first load
    reserved. A second one would wait for as much room once more. The host tier may be another one
    by then, that has the blocks. With a block of the load, vLLM computes on, and does not ask
    before the request is preempted.
    """
    half = Half(tmp_path)
    side, request = SchedulerSide(half, Hasher(NAMESPACE)), Request()
    with both_attached(half) as (host, _):
        assert side.matched(request, 0) == (None, False)
        host.say(answer(host.hear(Lookup).lookup, 2))
        wait_for(lambda: side.matched(request, 0) == (8, True))
        side.allocated(request, Table([3, 4, 5]), 8)
        (load,) = side.plan(Output()).loads
        elsewhere = replace(load, epoch=load.epoch - 1)  # Nothing of it is avoided.
        side.reported(StepReport((LoadResult(elsewhere, intact),)))
        assert side.matched(request, 0) == ((None, False) if again else (0, False))


def test_what_was_not_stored_is_offered_with_the_next_hit(tmp_path: Path) -> None:
    """Goal: an offer that ends without being stored does not keep its blocks from the tiers."""
    half = Half(tmp_path)
    side = SchedulerSide(half, Hasher(NAMESPACE))
    with both_attached(half) as (host, events):
        for number, stored in enumerate((0, 2)):
            request = Request(f"r{number}")
            admit(side, host, request, 8 * number)
            state = BlockState({request.request_id: [3, 4, 5]})
            side.plan(Output({request.request_id: 1}, kv_connector_block_state=state))
            request.begin(9 - request.num_computed_tokens)
            request.num_in_flight_tokens = 0
            assert side.finished(request, [[3, 4, 5]])
            offered = events.hear(Offered)
            assert [run.blocks for run in offered.runs] == [[3, 4]]
            host.say(Pulled(offer=offered.offer, pulled=stored, skipped=0, failed=2 - stored,
                            confirm=False))  # fmt: skip
            wait_for(lambda: side.plan(Output()).sent)
        assert side.idle


def test_an_id_is_free_at_its_requests_end_where_ids_repeat(tmp_path: Path) -> None:
    """Goal: vLLM keeps no finished request, so that the next one may have its id.

    1. A request ends: its blocks are on offer, held by themselves.
    2. Another one of that id finds the first block alone, and loads it: a part of a hit will do.
    3. The host tier has read the offer: the blocks are free.
    """
    half, pool, holds = Half(tmp_path), Pool(), BlockHolds()
    holds.bind(pool)
    side, request = SchedulerSide(half, Hasher(NAMESPACE), holds=holds, hybrid=False), Request()
    with both_attached(half) as (host, events):
        admit(side, host, request, 0)
        side.plan(Output({"r": 9}, kv_connector_block_state=BlockState({"r": [3, 4, 5]})))
        request.begin(9)
        request.end(9)
        assert not side.finished(request, [[3, 4, 5]])
        assert (pool.held(), side.holding) == ([3, 4], True)
        offered = events.hear(Offered)
        again = Request()
        assert side.matched(again, 0) == (None, False)
        host.say(answer(host.hear(Lookup).lookup, 1))
        wait_for(lambda: side.matched(again, 0) == (4, True))
        side.allocated(again, Table([6, 7, 8]), 4)
        (load,) = side.plan(Output()).loads
        assert (load.blocks, load.whole) == ((6,), False)
        host.say(Pulled(offer=offered.offer, pulled=2, skipped=0))
        wait_for(lambda: not side.plan(Output()).sent and not side.holding)
        assert pool.held() == []


def test_a_step_without_block_tables_puts_offers_off(tmp_path: Path) -> None:
    """Goal: vLLM 0.29 hands out no table of a request without new blocks; nothing is left out."""
    half = Half(tmp_path)
    side, request = SchedulerSide(half, Hasher(NAMESPACE)), Request()
    with both_attached(half) as (host, events):
        admit(side, host, request, 0)
        with_table = BlockSnapshot({"r": ([3, 4, 5],)})
        for state in (with_table, BlockSnapshot({}), with_table):
            side.plan(Output({"r": 4}, kv_connector_block_state=state))
            request.begin(4)
            request.end(4)
        assert [run.blocks for run in events.hear(Offered).runs] == [[3, 4]]
