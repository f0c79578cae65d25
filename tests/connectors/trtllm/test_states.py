"""Whatever an engine does in whatever order: no wrong byte is computed on, and nothing is left."""

from __future__ import annotations

import contextlib
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from tests.connectors.trtllm.engine import LlmRequest
from tests.connectors.trtllm.running import engine_on
from tests.vllm.harness import LiveStack

STARTS = st.integers(0, 3)
LENGTHS = st.integers(1, 30)
ROOM = 60
"""Tokens for which the smallest device has room, with some for the answer."""


class EngineMachine(RuleBasedStateMachine):
    """Requests that share prompts come, grow, are cancelled; the device forgets; ranks differ.

    The executor compares each block that is looked back on, the leader checks its own books, and at
    the end every block is free, every promise given up and every offer over.
    """

    stack: ClassVar[LiveStack]

    @initialize(
        ranks=st.integers(1, 2),
        chunk_tokens=st.sampled_from([3, 8, 1000]),
        blocks=st.sampled_from([16, 40]),
        overtake=st.booleans(),
        rematch=st.booleans(),
        min_priority=st.sampled_from([0, 0, 40]),
        promise_gb=st.sampled_from(["2e-6", "2e-3"]),
    )
    def begin(self, min_priority: int, promise_gb: str, **options: Any) -> None:
        self.requests: list[LlmRequest] = []
        self.cleanup = contextlib.ExitStack()
        monkeypatch = self.cleanup.enter_context(pytest.MonkeyPatch.context())
        variables = {
            "DYN_KVBM_HOST_OFFLOAD_PREFIX_MIN_PRIORITY": str(min_priority),
            "KVBM_PROMISE_GB": promise_gb,
        }
        self.engine = self.cleanup.enter_context(
            engine_on(self.stack, monkeypatch, variables=variables, **options)
        )

    @rule(
        start=STARTS,
        length=LENGTHS,
        output=st.integers(1, 6),
        salt=st.sampled_from([None, None, "a"]),
        priority=st.sampled_from([None, 35, 40]),
        deferred=st.sampled_from([0, 0, 1, 3]),
        honoured=st.sampled_from([None, None, 0, 3, 8]),
    )
    def submit(
        self,
        start: int,
        length: int,
        output: int,
        salt: str | None,
        priority: int | None,
        **waits: int | None,
    ) -> None:
        priorities = None if priority is None else [priority] * 2 + [35]
        tokens = range(100 * start, 100 * start + length)
        self.requests.append(
            self.engine.request(tokens, output, cache_salt=salt, priorities=priorities, **waits)
        )

    @rule(number=st.integers(0, 5), more=st.integers(1, 5))
    def go_on(self, number: int, more: int) -> None:
        """A conversation: what was generated is part of the next prompt."""
        before = self.requests[-6:]
        if before:
            last = before[number % len(before)]
            tokens = [*last.tokens, *range(more)][:ROOM]
            self.requests.append(self.engine.request(tokens, 2, cache_salt=last.cache_salt))

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.engine.step()

    @rule(number=st.integers(0, 5))
    def cancel(self, number: int) -> None:
        requests = [*self.engine.active, *self.engine.waiting]
        if requests:
            self.engine.cancel(requests[number % len(requests)])

    @rule()
    def settle_and_forget(self) -> None:
        self.engine.settle()
        self.engine.forget()

    @invariant()
    def books_are_right(self) -> None:
        if hasattr(self, "engine"):
            self.engine.side.check()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        try:
            self.engine.settle()
            assert self.engine.pool.free_count == self.engine.pool.block_count
            side = self.engine.side
            side.plan(None)
            assert self.engine.half.idle()
            assert self.engine.keeper.promised == 0
        finally:
            self.cleanup.close()


def run(stack: LiveStack, examples: int) -> None:
    """The machine, on one stack for all examples."""

    class Machine(EngineMachine):
        pass

    Machine.stack = stack
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=25,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        ),
    )


@pytest.mark.slow
def test_an_engine_in_any_order(stack: LiveStack) -> None:
    run(stack, 12)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_an_engine_in_many_orders(stack: LiveStack) -> None:
    run(stack, 150)
