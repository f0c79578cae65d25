"""vLLM's steps as prefill: which are measured, and that only the scheduler's side decides."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from kvbm_connectors.core.prefill_meter import NOTHING, STALE_MS, PrefillMeter, PrefillStep
from kvbm_connectors.vllm.step_meter import STEP_TOKENS, StepMeter, meter_of, step_of
from kvbm_connectors.vllm.tracked import Tracked

from tests.connectors.vllm.requests import Output, Request


class Clock:
    """Microseconds that a test sets."""

    now_us = 0

    def __call__(self) -> int:
        return self.now_us


def tracked(name: str, computed: int = 0) -> Tracked:
    return Tracked(Request(name, num_computed_tokens=computed), "")


def test_a_step_of_chunks_and_decodes_is_told_apart() -> None:
    """A chunk of 100 tokens after 500, two whole prompts, and a decode at 1,000."""
    requests = {
        "chunk": tracked("chunk", 500), "a": tracked("a"), "b": tracked("b"),
        "decode": tracked("decode", 1_000),
    }  # fmt: skip
    step = step_of(Output({"chunk": 100, "a": 40, "b": 60, "decode": 1}), requests)
    pairs = 100 * 550 + 40 * 20 + 60 * 30 + 1_000.5
    assert step == PrefillStep(200, 1, pairs)
    assert step.is_telling


def test_decodes_alone_are_no_prefill() -> None:
    requests = {str(number): tracked(str(number), 100) for number in range(256)}
    assert step_of(Output(dict.fromkeys(requests, 1)), requests) is NOTHING


def test_drafts_of_a_decode_are_no_prompt() -> None:
    requests = {str(number): tracked(str(number), 100) for number in range(40)}
    drafts = {name: [1, 2, 3] for name in requests}
    step = step_of(Output(dict.fromkeys(requests, 4), drafts), requests)
    assert not step.is_telling


def test_a_request_that_is_not_followed_makes_a_step_unknown() -> None:
    assert step_of(Output({"stranger": 1_000}), {}) is NOTHING


def measured(clock: Clock) -> StepMeter:
    """A meter of an engine that takes 0.1 ms a token, and what it has counted is checked."""
    meter = StepMeter(PrefillMeter(step_tokens_max=2_048), clock_us=clock)
    requests = {"r": tracked("r")}
    for tokens in (100, 200, 400, 800, 100, 200, 400, 800):
        clock.now_us += 1_000
        meter.planned(Output({"r": tokens}), requests)
        clock.now_us += 100 * tokens
        meter.ended()
    return meter


def test_a_lookup_says_what_steps_have_taken() -> None:
    cost = measured(Clock()).cost(48)
    assert cost is not None
    assert cost.before == 48
    assert cost.compute_ms(0, 1_000) == pytest.approx(100, rel=0.05)


@pytest.mark.parametrize("are_reported", [False, True])
def test_a_step_without_tokens_takes_no_end_of_another(are_reported: bool) -> None:
    """Goal: the pairs stay right. Two steps are in flight, as vLLM plans them while others run.

    1. A prompt of 400 tokens takes 40 ms, a decode 10 ms. 2. All requests wait for loads: vLLM
    plans a step without tokens, and reports its end or not.
    """
    clock = Clock()
    meter = StepMeter(PrefillMeter(step_tokens_max=2_048, steps_in_flight_max=2), clock_us=clock)
    requests = {"r": tracked("r")}
    for number in range(40):
        tokens = (100, 200, 400, 800)[number % 4]
        meter.planned(Output({"r": tokens}), requests)
        meter.planned(Output({"r": 1}), requests)
        clock.now_us += 100 * tokens
        meter.ended()
        meter.planned(Output({}), requests)
        clock.now_us += 10_000
        meter.ended()
        if are_reported:
            meter.ended()
        clock.now_us += 1_000_000
    cost = meter.cost(0)
    assert cost is not None
    assert cost.compute_ms(0, 1_000) == pytest.approx(100, rel=0.05)


def test_a_request_leaves_the_same_tokens_however_often_it_is_asked_for() -> None:
    """Whole blocks; the next request leaves none."""
    clock = Clock()
    meter = measured(clock)
    clock.now_us += STALE_MS * 1_000
    first, second = tracked("a"), tracked("b")
    assert [meter.leave(first, 1_000, 48) for _ in range(3)] == [96, 96, 96]
    assert meter.leave(second, 1_000, 48) == 0


def test_without_a_meter_all_is_loaded() -> None:
    meter = StepMeter()
    meter.planned(Output({"r": 400}), {"r": tracked("r")})
    meter.ended()
    assert meter.cost(0) is None
    assert meter.leave(tracked("r"), 10_000, 16) == 0


def config(pipeline: int, **scheduler: Any) -> SimpleNamespace:
    return SimpleNamespace(
        parallel_config=SimpleNamespace(pipeline_parallel_size=pipeline),
        scheduler_config=SimpleNamespace(**scheduler),
        max_concurrent_batches=2,
    )


def test_an_engine_whose_steps_overlap_is_not_measured() -> None:
    assert meter_of(config(2, max_num_batched_tokens=4_096)) is None
    assert meter_of(config(1, max_num_batched_tokens=4_096)) is not None
    assert meter_of(config(1)) is not None, f"{STEP_TOKENS} tokens where it is not told"
