"""Steps of requests with a sliding window: a block has left its table when the window has passed.

No step looks at every request. Compared is what is offered in the end with what a hit may need,
counted by brute force. A block has four tokens; vLLM's null block is 0.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvbm_common.identity import Hasher, SequenceHash
from kvbm_connectors.vllm import calendar
from kvbm_connectors.vllm.block_holds import BlockHolds
from kvbm_connectors.vllm.device_offers import WAIT_STEPS_MAX
from kvbm_connectors.vllm.kv_groups import TAILS_EVERY, KvGroup
from kvbm_connectors.vllm.plan import StepReport
from kvbm_connectors.vllm.scheduler_side import SchedulerSide
from msgspec.structs import replace

from tests.connectors.helpers import NAMESPACE
from tests.connectors.vllm.pool import Pool
from tests.connectors.vllm.requests import Output, Request
from tests.connectors.vllm.test_device_offers import FULL, Half

BLOCK = NAMESPACE.block_tokens
TOKENS_MAX = 400


@pytest.fixture(scope="module", params=["in time", "in turn"], autouse=True)
def looks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Requests are looked at when they are due, or as late as they may: as many are, in turn."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "in turn":
            patch.setattr(calendar, "GATHER_REQUESTS", 0)
            patch.setattr(calendar, "GATHER_STEPS", 13)
        yield


class Tables:
    """KVConnectorBlockState: a request's block `i` of group `g` has a number of its own."""

    def __init__(self, window: int) -> None:
        self.window = window
        self.of: dict[str, tuple[list[int], list[int]]] = {}

    def plan(self, request: Request, tokens: int) -> None:
        """Allocate for a step as vLLM does, which first takes away what the window has passed."""
        first = 1 + 250 * int(request.request_id)
        count = -(-(request.num_computed_tokens + tokens) // BLOCK)
        certain = request.num_computed_tokens - request.num_in_flight_tokens
        passed = max(0, certain - self.window + 1) // BLOCK
        full = list(range(first, first + count))
        tail = [0 if at < passed else 125 + block for at, block in enumerate(full)]
        self.of[request.request_id] = full, tail

    def get_block_ids(self, req_id: str) -> tuple[list[int], ...]:
        return self.of[req_id]


class Engine:
    """An engine with full attention and a window; answers come one or two steps later.

    With `rewritten` a draft model writes KV of so many tokens at the end again.
    """

    def __init__(self, window: int, depth: int, rewritten: int | None = None) -> None:
        group = replace(NAMESPACE, group=1)
        self.window = KvGroup(Hasher(group), -(-(window - 1) // BLOCK), table=1)
        self.pool, self.half, self.holds = Pool(1_000), Half(), BlockHolds()
        self.holds.bind(self.pool)
        self.side = SchedulerSide(
            self.half, FULL.hasher, groups=[FULL, self.window], holds=self.holds,
            rewritten=rewritten,
        )  # fmt: skip
        self.tables, self.depth, self.rewritten = Tables(window), depth, rewritten or 0
        self.in_flight: deque[dict[str, tuple[int, int]]] = deque()
        """Steps that have not ended: the tokens and drafts of each request."""
        self.stale: dict[str, int] = {}
        """Tokens in flight of requests that were preempted since."""
        self.preempted: list[str] = []
        self.requests: dict[str, Request] = {}

    def submit(self, number: int, prompt: int) -> None:
        request = Request(
            str(number), all_token_ids=[number] * prompt, skip_reading_prefix_cache=True
        )
        self.requests[request.request_id] = request
        self.side.matched(request, 0)

    def preempt(self, name: str) -> None:
        """Take a request's blocks; what is in flight of it counts no more."""
        request = self.requests[name]
        if request.num_computed_tokens:
            request.num_computed_tokens = 0
            self.stale[name] = request.num_in_flight_tokens
            self.preempted.append(name)
            del self.tables.of[name]

    def step(self, tokens: Mapping[str, int], drafts: int = 0, right: int = 0) -> None:
        """Plan a step of so many tokens of each request: of its prompt, or else one and `drafts`.
        Of the step that ends, so many of these are right."""
        scheduled: dict[str, int] = {}
        guesses: dict[str, list[int]] = {}
        for name, wanted in tokens.items():
            request = self.requests[name]
            left = request.num_tokens - request.num_computed_tokens
            if name in self.preempted:
                continue
            if not request.num_computed_tokens:
                self.side.matched(request, 0)
            if left > 1 or (left and not request.num_computed_tokens):
                scheduled[name] = min(wanted, left)
            elif left == 1 or (self.depth == 2 and request.num_in_flight_tokens):
                scheduled[name], guesses[name] = 1 + drafts, [0] * drafts
        for name in scheduled:
            self.tables.plan(self.requests[name], scheduled[name])
        self.plan(Output(dict(scheduled), guesses, self.preempted, self.tables))
        self.preempted = []
        for name, count in scheduled.items():
            self.requests[name].begin(count)
        self.in_flight.append(
            {name: (count, len(guesses.get(name, ()))) for name, count in scheduled.items()}
        )
        if len(self.in_flight) == self.depth:
            self.end_step(right)

    def plan(self, output: Output) -> None:
        """Plan a step; ranks have passed its mark, and the host tier takes what is on offer."""
        mark = self.side.plan(output).mark
        self.side.reported(StepReport(mark_ends=((mark, True),)))
        self.half.end(*(offer for offer in self.half.offered if offer not in self.half.over))
        self.half.over.update(self.half.offered)

    def end_step(self, right: int = 0) -> None:
        for name, (count, drafts) in self.in_flight.popleft().items():
            request, rejected = self.requests[name], max(0, drafts - right)
            if self.stale.get(name):
                self.stale[name] -= count
                request.end(count)
                continue
            request.end(count, rejected=rejected)
            new = request.num_computed_tokens - request.num_in_flight_tokens + 1
            request.all_token_ids = [*request.all_token_ids, *[7] * (new - request.num_tokens)]

    def stall(self) -> None:
        """Have vLLM find no room for any request, until the offers are over."""
        while self.in_flight:
            self.end_step()
        for _ in range(WAIT_STEPS_MAX + 3):  # A mark is laid, it is over, the offers are.
            self.plan(Output())

    def finish(self) -> None:
        """End all requests, and have the host tier take what is on offer."""
        while self.in_flight:
            self.end_step()
        for name, request in self.requests.items():
            self.side.finished(request, self.tables.of.get(name, ([], [])))
        self.stall()

    def offered(self) -> list[SequenceHash]:
        return [name for run in self.half.offered.values() for name in run.hashes]

    def wanted(self, prompts: Sequence[int]) -> set[SequenceHash]:
        """What a hit may need: every full block, windows before some boundaries, and what is left
        of the one before the end."""
        found: set[SequenceHash] = set()
        for prompt, request in zip(prompts, self.requests.values(), strict=True):
            count = max(0, request.num_computed_tokens - self.rewritten) // BLOCK
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


steps_of_two = st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(1, 40))
"""How many tokens each of two requests may compute in a step, and how many such steps follow."""
prompts_of_two = st.tuples(st.integers(1, 60), st.integers(1, 60))


def run(engine: Engine, steps: tuple[int, int, int], drafts: int = 0, right: int = 0) -> None:
    """Have two requests compute in some steps."""
    first, second, times = steps
    wanted = {name: count for name, count in (("0", first), ("1", second)) if count}
    for _ in range(times):
        if sum(one.num_tokens for one in engine.requests.values()) < TOKENS_MAX:
            engine.step(wanted, drafts, right)


@settings(max_examples=300, deadline=None)
@given(
    window=st.integers(2, 70),
    depth=st.integers(1, 2),
    prompts=prompts_of_two,
    program=st.lists(steps_of_two, min_size=1, max_size=12),
)
def test_what_a_hit_may_need_is_offered_once(
    window: int, depth: int, prompts: tuple[int, int], program: list[tuple[int, int, int]]
) -> None:
    """Goal: a block is held before the window has passed it, and nothing is held in the end."""
    engine = Engine(window, depth)
    for number, prompt in enumerate(prompts):
        engine.submit(number, prompt)
    for steps in program:
        run(engine, steps)
    engine.finish()
    assert sorted(engine.offered()) == sorted(engine.wanted(prompts))
    assert engine.pool.held() == []


@settings(max_examples=150, deadline=None)
@given(
    window=st.integers(8, 70),
    depth=st.integers(1, 2),
    prompts=prompts_of_two,
    rewritten=st.integers(0, 6),
    program=st.lists(
        st.tuples(steps_of_two, st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=12
    ),
)
def test_what_a_draft_model_writes_again_is_held_again(
    window: int,
    depth: int,
    prompts: tuple[int, int],
    rewritten: int,
    program: list[tuple[tuple[int, int, int], int, int]],
) -> None:
    """Goal: a request without room for its next step holds no block that is not offered, so that
    vLLM has room, and when it goes on, its windows are offered as ever, each block once."""
    engine = Engine(window, depth, rewritten)
    for number, prompt in enumerate(prompts):
        engine.submit(number, prompt)
    for steps, drafts, right in program:
        run(engine, steps, drafts, right)
        engine.stall()
        assert engine.pool.held() == []
    engine.finish()
    assert sorted(engine.offered()) == sorted(engine.wanted(prompts))
    assert engine.pool.held() == []


@settings(max_examples=150, deadline=None)
@given(
    window=st.integers(2, 70),
    depth=st.integers(1, 2),
    prompts=prompts_of_two,
    program=st.lists(st.tuples(steps_of_two, st.sampled_from("01")), min_size=1, max_size=8),
)
def test_a_preempted_request_holds_its_windows_again(
    window: int,
    depth: int,
    prompts: tuple[int, int],
    program: list[tuple[tuple[int, int, int], str]],
) -> None:
    """Goal: what it computes again is found by the next turn, though it was held before."""
    engine = Engine(window, depth)
    for number, prompt in enumerate(prompts):
        engine.submit(number, prompt)
    for steps, victim in program:
        run(engine, steps)
        engine.preempt(victim)
    for request in engine.requests.values():
        while request.num_computed_tokens < len(request.all_token_ids) - 1:
            engine.step({request.request_id: 9})
    engine.finish()
    assert set(engine.offered()) == engine.wanted(prompts)
    assert engine.pool.held() == []
