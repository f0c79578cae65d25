"""Looks at requests that decode, where a step has the block tables of few of them."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
from kvbm_common.identity import Hasher
from kvbm_connectors.vllm.calendar import GATHER_REQUESTS
from kvbm_connectors.vllm.scheduler_side import SchedulerSide
from kvbm_connectors.vllm.tracked import DECODED_BLOCKS

from tests.connectors.helpers import NAMESPACE
from tests.connectors.vllm.requests import BlockSnapshot, Output, Request
from tests.connectors.vllm.test_steps import Half

BLOCK = NAMESPACE.block_tokens
STEPS = 8 * DECODED_BLOCKS * BLOCK


class Tables(dict[str, tuple[list[int], ...]]):
    """Tables of some requests, and how often another one's was asked for."""

    in_vain = 0

    def get(self, name: str, default: Any = None) -> Any:
        self.in_vain += name not in self
        return super().get(name, default)


class Engine:
    """An engine of vLLM 0.29: a step has the tables of requests that get a block in it.

    Answers come `depth` steps later, and of `drafts` none is right.
    """

    def __init__(self, prompts: range, depth: int, drafts: int = 0) -> None:
        self.half = Half()
        self.side = SchedulerSide(self.half, Hasher(NAMESPACE), all_tables=False)
        self.requests = [
            Request(str(tokens), all_token_ids=[tokens] * tokens, skip_reading_prefix_cache=True)
            for tokens in prompts
        ]
        for request in self.requests:
            self.side.matched(request, 0)
        self.depth, self.drafts = depth, [0] * drafts
        self.in_flight: deque[dict[str, int]] = deque()
        self.in_vain = 0
        self.blocks = dict.fromkeys(prompts, 0)
        """Request → blocks in its table."""

    def step(self, *, left_out: str = "") -> None:
        """Plan a step of all requests but one, and let the step end that is due."""
        counts: dict[str, int] = {}
        drafts: dict[str, list[int]] = {}
        tables = Tables()
        for request in self.requests:
            if (name := request.request_id) == left_out:
                continue
            counts[name] = request.num_tokens
            if request.num_computed_tokens:
                counts[name] = 1 + len(self.drafts)
                drafts[name] = self.drafts
            blocks = -(-(request.num_computed_tokens + counts[name]) // BLOCK)
            if blocks > self.blocks[int(name)]:
                self.blocks[int(name)] = blocks
                tables[name] = ([1000 * int(name) + index for index in range(blocks)],)
        self.side.plan(Output(counts, drafts, kv_connector_block_state=BlockSnapshot(tables)))
        self.in_vain += tables.in_vain
        for request in self.requests:
            request.begin(counts.get(request.request_id, 0))
        self.in_flight.append(counts)
        if len(self.in_flight) >= self.depth:
            self._end(self.in_flight.popleft())

    def _end(self, counts: dict[str, int]) -> None:
        for request in self.requests:
            if tokens := counts.get(request.request_id, 0):
                rejected = len(self.drafts) if request.num_tokens > int(request.request_id) else 0
                request.end(tokens, rejected=rejected)
                request.all_token_ids = [*request.all_token_ids, 7]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("every", [STEPS, 15])
def test_decoded_blocks_are_offered_where_a_step_has_few_tables(
    depth: int, drafts: int, every: int
) -> None:
    """Goal: an engine that dies loses what waits, not all that it has decoded.

    Prompts of all lengths decode, and `every` so many steps one is left out. With `depth` 2 the
    next step is planned before one ends.
    """
    engine = Engine(range(BLOCK, BLOCK + 2 * GATHER_REQUESTS), depth, drafts)
    for number in range(1, STEPS):
        name = engine.requests[number % len(engine.requests)].request_id
        engine.step(left_out="" if number % every else name)
    offered = [block for blocks in engine.half.blocks for block in blocks]
    assert len(set(offered)) == len(offered)
    for request in engine.requests:
        full = (request.num_computed_tokens - request.num_in_flight_tokens) // BLOCK
        count = sum(block // 1000 == int(request.request_id) for block in offered)
        assert full - count <= 2 * DECODED_BLOCKS, f"{count} of {full} of {request.request_id}"
    if not drafts and every == STEPS:
        assert engine.in_vain <= len(engine.requests), "a look without a table costs a step's time"
