"""Steps of many requests of one KV group: what each looks at, and what it offers together."""

from __future__ import annotations

from collections.abc import Sequence

from kvbm_common.identity import Hasher
from kvbm_connectors.core.messages import OfferEnded, OfferRun
from kvbm_connectors.vllm.calendar import GATHER_STEPS
from kvbm_connectors.vllm.device_offers import (
    DECODED_TOGETHER,
    TOGETHER_BLOCKS_MAX,
    WAIT_STEPS_MAX,
)
from kvbm_connectors.vllm.scheduler_side import SchedulerSide
from kvbm_connectors.vllm.tracked import DECODED_BLOCKS

from tests.connectors.helpers import NAMESPACE
from tests.connectors.vllm.requests import Output, Request
from tests.connectors.vllm.test_names import FakeHalf

BLOCK = NAMESPACE.block_tokens


class Half(FakeHalf):
    """A scheduler half that keeps what it is offered."""

    def __init__(self) -> None:
        super().__init__()
        self.runs: dict[int, Sequence[OfferRun]] = {}
        self.hurries: list[bool] = []
        self.ended: list[OfferEnded] = []

    def offer(
        self, runs: Sequence[OfferRun], *, priority: int = 0, namespace: bytes = b"",
        hurry: bool = True,
    ) -> int:  # fmt: skip
        number = super().offer(runs)
        self.runs[number] = runs
        self.hurries.append(hurry)
        return number

    def drain_ended(self) -> list[OfferEnded]:
        ended, self.ended = self.ended, []
        return ended

    @property
    def blocks(self) -> list[list[int]]:
        """The device blocks of each offer."""
        return [[block for run in runs for block in run.blocks] for runs in self.runs.values()]


class Tables:
    """KVConnectorBlockState that counts the tables that it is asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def get_block_ids(self, req_id: str) -> tuple[list[int], ...]:
        self.asked.append(req_id)
        first = 100 * int(req_id)
        return (list(range(first, first + 50)),)


class Engine:
    """A scheduler side and requests with a prompt of one block, which a step computes before they
    decode; request 3 has device blocks from 300 on."""

    def __init__(self, count: int) -> None:
        self.half, self.tables = Half(), Tables()
        self.side = SchedulerSide(self.half, Hasher(NAMESPACE))
        self.requests = [
            Request(str(number), all_token_ids=[number] * BLOCK, skip_reading_prefix_cache=True)
            for number in range(1, count + 1)
        ]
        for request in self.requests:
            self.side.matched(request, 0)

    def step(
        self, tokens: int, *, preempted: Sequence[str] = (), only: Sequence[Request] | None = None
    ) -> None:
        """Plan a step of all requests, or of some, and let it end."""
        self.tables.asked.clear()
        running = self.requests if only is None else only
        scheduled = {request.request_id: tokens for request in running}
        self.side.plan(
            Output(scheduled, preempted_req_ids=preempted, kv_connector_block_state=self.tables)
        )
        for request in running:
            self.end(request, tokens)

    @staticmethod
    def end(request: Request, tokens: int) -> None:
        """Have the step of a request end: after its last token, it has one more."""
        request.begin(tokens)
        request.end(tokens)
        if request.num_computed_tokens == request.num_tokens:
            request.all_token_ids = [*request.all_token_ids, 7]


def test_blocks_that_a_step_has_filled_are_one_offer() -> None:
    engine = Engine(3)
    engine.step(BLOCK)
    engine.step(1)
    assert engine.half.blocks == [[100, 200, 300]]


def test_an_offer_of_several_requests_has_a_bound() -> None:
    engine = Engine(TOGETHER_BLOCKS_MAX + 1)
    engine.step(BLOCK)
    engine.step(1)
    assert [len(blocks) for blocks in engine.half.blocks] == [TOGETHER_BLOCKS_MAX, 1]


def test_a_step_that_offers_nothing_asks_for_no_table() -> None:
    """Goal: vLLM makes a list of block ids for each table that it is asked for.

    1. The step after the prompt offers it. 2. The step after the one that fills the last of
    eight more blocks asks again.
    """
    engine = Engine(2)
    engine.step(BLOCK)
    engine.step(1)
    assert engine.tables.asked == ["1", "2"]
    for _ in range(DECODED_BLOCKS * BLOCK - 1):
        engine.step(1)
        assert engine.tables.asked == []
    engine.step(1)
    assert engine.tables.asked == ["1", "2"]


def test_blocks_that_were_decoded_wait_for_others() -> None:
    """1. Those of one request wait for some steps. 2. Those of many are enough for an offer."""
    for count, more in ((1, WAIT_STEPS_MAX - 1), (DECODED_TOGETHER // DECODED_BLOCKS, 0)):
        engine = Engine(count)
        engine.step(BLOCK)
        for _ in range(DECODED_BLOCKS * BLOCK + more):
            assert len(engine.half.blocks) <= 1
            engine.step(1)
        assert len(engine.half.blocks) == 1
        engine.step(1)
        first = [100 * number for number in range(1, count + 1)]
        decoded = [block + index for block in first for index in range(1, DECODED_BLOCKS + 1)]
        assert engine.half.blocks == [first, decoded]
        assert engine.half.hurries == [True, False], "only a prompt's blocks leave at once"


def test_many_requests_that_began_together_offer_in_turn() -> None:
    """Goal: no step does the work of all, and every block is offered once.

    1. A hundred prompts of one block are offered together. 2. They decode: a step reads few tables.
    """
    engine = Engine(100)
    engine.step(BLOCK)
    engine.step(1)
    tables: list[int] = []
    for _ in range(4 * DECODED_BLOCKS * BLOCK):
        engine.step(1)
        tables.append(len(engine.tables.asked))
    assert max(tables) <= 40, "32 of them are looked at before there are many"
    assert max(tables[-DECODED_BLOCKS * BLOCK :]) <= 2 * 100 * GATHER_STEPS // (8 * BLOCK)
    offered = [block for blocks in engine.half.blocks for block in blocks]
    assert len(set(offered)) == len(offered) >= 100 * (1 + 2 * DECODED_BLOCKS)


def test_a_request_that_ends_offers_all_that_has_waited() -> None:
    """Goal: nothing that was decoded is lost, and what another request has waits no longer."""
    engine = Engine(2)
    engine.step(BLOCK)
    for _ in range(DECODED_BLOCKS * BLOCK + 1):
        engine.step(1)
    assert engine.half.blocks == [[100, 200]]
    assert engine.side.finished(engine.requests[0], [list(range(100, 150))])
    decoded = [block + index for block in (100, 200) for index in range(1, DECODED_BLOCKS + 1)]
    assert engine.half.blocks == [[100, 200], decoded]
    assert engine.half.hurries == [True, True], "vLLM waits for the blocks"


def test_a_preempted_request_offers_nothing_that_has_waited() -> None:
    """Goal: vLLM has freed the blocks, and the step now planned may overwrite them."""
    engine = Engine(2)
    engine.step(BLOCK)
    for _ in range(DECODED_BLOCKS * BLOCK + 1):
        engine.step(1)
    engine.half.ended.append(OfferEnded(1, 2, complete=True))
    for _ in range(WAIT_STEPS_MAX):
        engine.step(1, preempted=["1"], only=engine.requests[1:])
    assert engine.half.blocks == [[100, 200], [200 + i for i in range(1, DECODED_BLOCKS + 1)]]


def test_what_a_preempted_request_has_written_is_known_by_blocks() -> None:
    """Goal: of blocks that steps were sent out for none is evicted, and of others
    all are."""
    engine = Engine(2)
    written: list[int] = []
    engine.side.evict = lambda _, first: written.append(first // BLOCK)
    engine.step(BLOCK)
    for _ in range(BLOCK):
        engine.step(1)
    engine.step(0, preempted=["1"], only=engine.requests[1:])
    engine.step(1, preempted=["2"], only=[])
    assert written == [2, 2]


def test_a_preempted_request_takes_its_offer_with_it_and_others_offer_again() -> None:
    """Goal: blocks of others in a revoked offer are not lost, and those that have ended are freed.

    1. Two requests have a block each in one offer. The second one ends: it waits for its blocks.
    2. The first is preempted: the offer is revoked, and the plan names the second as sent.
    3. A third, which runs on, offers its block once more with its next ones.
    """
    engine = Engine(3)
    engine.step(BLOCK)
    engine.step(1)
    _, second, third = engine.requests
    assert engine.side.finished(second, [[200, 201]])
    plan = engine.side.plan(
        Output({"3": 1}, preempted_req_ids=["1"], kv_connector_block_state=engine.tables)
    )
    assert (engine.half.revoked, plan.sent) == ([1], ("2",))
    engine.end(third, 1)
    for _ in range(DECODED_BLOCKS * BLOCK):
        engine.step(1, only=[third])
    again = [300 + index for index in range(DECODED_BLOCKS + 1)]
    assert engine.half.blocks == [[100, 200, 300], again]


def test_requests_of_one_offer_are_freed_together() -> None:
    engine = Engine(2)
    engine.step(BLOCK)
    engine.step(1)
    for request, block in zip(engine.requests, (100, 200), strict=True):
        assert engine.side.finished(request, [[block, block + 1]])
    assert engine.side.plan(Output()).sent == ()
    engine.half.ended.append(OfferEnded(1, 2, complete=True))
    assert engine.side.plan(Output()).sent == ("1", "2")
    assert engine.side.idle
