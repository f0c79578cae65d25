"""Steps of requests with a sliding window: a block has left its table when the window has passed.

No step looks at every request. Compared is what is offered in the end with what a hit may need,
counted by brute force. A block has four tokens; vLLM's null block is 0.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st
from kvbm_common.identity import Hasher, SequenceHash
from kvbm_connectors.vllm.block_holds import BlockHolds
from kvbm_connectors.vllm.kv_groups import TAILS_EVERY, KvGroup
from kvbm_connectors.vllm.scheduler_side import SchedulerSide
from msgspec.structs import replace

from tests.connectors.helpers import NAMESPACE
from tests.connectors.vllm.pool import Pool
from tests.connectors.vllm.requests import Output, Request
from tests.connectors.vllm.test_device_offers import FULL, Half

BLOCK = NAMESPACE.block_tokens
TOKENS_MAX = 400


class Tables:
    """KVConnectorBlockState: a request's block `i` of group `g` has a number of its own."""

    def __init__(self, window: int) -> None:
        self.window = window
        self.of: dict[str, tuple[list[int], list[int]]] = {}

    def plan(self, request: Request, tokens: int) -> None:
        """Allocate for a step as vLLM does, which first takes away what the window has passed."""
        first = 1 + 250 * int(request.request_id)
        count = -(-(request.num_computed_tokens + tokens) // BLOCK)
        passed = max(0, request.num_computed_tokens - self.window + 1) // BLOCK
        full = list(range(first, first + count))
        tail = [0 if at < passed else 125 + block for at, block in enumerate(full)]
        self.of[request.request_id] = full, tail

    def get_block_ids(self, req_id: str) -> tuple[list[int], ...]:
        return self.of[req_id]


class Engine:
    """An engine with full attention and a window; answers come one or two steps later."""

    def __init__(self, window: int, depth: int) -> None:
        group = replace(NAMESPACE, group=1)
        self.window = KvGroup(Hasher(group), -(-(window - 1) // BLOCK), table=1)
        self.pool, self.half, self.holds = Pool(1_000), Half(), BlockHolds()
        self.holds.bind(self.pool)
        self.side = SchedulerSide(
            self.half, FULL.hasher, groups=[FULL, self.window], holds=self.holds
        )
        self.tables, self.depth = Tables(window), depth
        self.flying: deque[dict[str, int]] = deque()
        self.requests: dict[str, Request] = {}

    def submit(self, number: int, prompt: int) -> None:
        request = Request(
            str(number), all_token_ids=[number] * prompt, skip_reading_prefix_cache=True
        )
        self.requests[request.request_id] = request
        self.side.matched(request, 0)

    def step(self, tokens: Mapping[str, int]) -> None:
        """Plan a step of so many tokens of each request: of its prompt, or else one."""
        scheduled = {}
        for name, wanted in tokens.items():
            left = self.requests[name].num_tokens - self.requests[name].num_computed_tokens
            if left > 0:
                scheduled[name] = min(wanted, left)
            elif self.depth == 2 and self.requests[name].num_in_flight_tokens:
                scheduled[name] = 1  # The token that the step in flight makes.
        for name, count in scheduled.items():
            self.tables.plan(self.requests[name], count)
        self.side.plan(Output(dict(scheduled), kv_connector_block_state=self.tables))
        for name, count in scheduled.items():
            self.requests[name].begin(count)
        self.flying.append(scheduled)
        if len(self.flying) == self.depth:
            self.end_step()
        self.half.end(*(offer for offer in self.half.offered if offer not in self.half.over))
        self.half.over.update(self.half.offered)

    def end_step(self) -> None:
        for name, count in self.flying.popleft().items():
            request = self.requests[name]
            before = request.num_computed_tokens - request.num_in_flight_tokens
            request.end(count)
            if before + count >= request.num_tokens:
                request.all_token_ids = [*request.all_token_ids, 7]

    def finish(self) -> None:
        """End all requests, and have the host tier take what is on offer."""
        while self.flying:
            self.end_step()
        for name, request in self.requests.items():
            self.side.finished(request, self.tables.of.get(name, ([], [])))
        self.half.end(*(offer for offer in self.half.offered if offer not in self.half.over))
        self.side.plan(Output())

    def offered(self) -> set[SequenceHash]:
        return {name for run in self.half.offered.values() for name in run.hashes}

    def wanted(self, prompts: Sequence[int]) -> set[SequenceHash]:
        """What a hit may need: every full block, windows before some boundaries, and what is left
        of the one before the end."""
        found: set[SequenceHash] = set()
        for prompt, request in zip(prompts, self.requests.values(), strict=True):
            count = request.num_computed_tokens // BLOCK
            tokens = list(request.all_token_ids[: count * BLOCK])
            found.update(FULL.hasher.chain(tokens))
            window = self.window.window_blocks
            regular = range(0, TOKENS_MAX, TAILS_EVERY * window * BLOCK)
            ends = {(prompt - 1) // BLOCK} | {tokens // BLOCK for tokens in regular}
            table = self.tables.of.get(request.request_id, ([], []))[1]
            last = [at for at in self.window.needed_indices(0, count * BLOCK) if table[at]]
            found.update(
                name
                for at, name in enumerate(self.window.hasher.chain(tokens))
                if at in last or any(end - window <= at < end for end in ends)
            )
        return found


steps_of_two = st.lists(
    st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(1, 40)), min_size=1, max_size=12
)
"""How many tokens each of two requests may compute in a step, and how many such steps follow."""


@settings(max_examples=300, deadline=None)
@given(
    window=st.integers(2, 70),
    depth=st.integers(1, 2),
    prompts=st.tuples(st.integers(1, 60), st.integers(1, 60)),
    program=steps_of_two,
)
def test_what_a_hit_may_need_is_offered(
    window: int, depth: int, prompts: tuple[int, int], program: list[tuple[int, int, int]]
) -> None:
    """Goal: a block is held before the window has passed it, and nothing is held in the end."""
    engine = Engine(window, depth)
    for number, prompt in enumerate(prompts):
        engine.submit(number, prompt)
    for first, second, times in program:
        wanted = {name: count for name, count in (("0", first), ("1", second)) if count}
        for _ in range(times):
            if sum(one.num_tokens for one in engine.requests.values()) < TOKENS_MAX:
                engine.step(wanted)
    engine.finish()
    assert engine.offered() == engine.wanted(prompts)
    assert engine.pool.held() == []
