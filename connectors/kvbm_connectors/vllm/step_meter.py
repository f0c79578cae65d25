"""The step meter: times vLLM's steps for `core/prefill_meter.py`, on the scheduler's side alone.

vLLM plans a step in `build_connector_meta`, and hands its output on in `update_connector_output`.
What lies between is the step, whatever number of ranks computes it. With pipeline parallelism a
step overlaps with the next one, and with loads that a step waits for it is not computing: neither
is measured.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from kvbm_common.tier.prefill_cost import PrefillCost

from kvbm_connectors.core.messages import LoadResult
from kvbm_connectors.core.prefill_meter import (
    NOTHING,
    PROMPT_TOKENS_MIN,
    PrefillMeter,
    PrefillStep,
)
from kvbm_connectors.vllm.engine_types import SchedulerOutput
from kvbm_connectors.vllm.tracked import Tracked

STEP_TOKENS = 2_048
"""The tokens of a step, at most, where vLLM does not tell."""


def monotonic_us() -> int:
    """Return microseconds of a clock that does not go back."""
    return time.monotonic_ns() // 1000


class StepMeter:
    """The prefill of one engine; without a meter nothing is measured, and all is loaded."""

    def __init__(
        self,
        meter: PrefillMeter | None = None,
        *,
        counts: Counter[str] | None = None,
        clock_us: Callable[[], int] = monotonic_us,
    ) -> None:
        self._meter = meter
        self._counts = Counter[str]() if counts is None else counts
        self._clock_us = clock_us

    def planned(self, output: SchedulerOutput, requests: Mapping[str, Tracked]) -> None:
        """Note that a step is sent out."""
        if self._meter is None:
            return
        if not output.num_scheduled_tokens:
            self._meter.planned_empty()
        else:
            self._meter.planned(step_of(output, requests), self._clock_us())

    def ended(self) -> None:
        """Note that the output of a step is here."""
        if self._meter is not None and self._meter.ended(self._clock_us()):
            self._counts["prefill_steps_measured"] += 1

    def loaded(self, result: LoadResult) -> None:
        """Note a load that has ended on every rank."""
        if self._meter is not None and result.usable == len(result.intact):
            size = len(result.intact) * result.load.block_bytes
            self._meter.copied(size, result.seconds, self._clock_us())

    def cost(self, before: int) -> PrefillCost | None:
        """Return what a lookup says of computing; None: too little was measured."""
        return None if self._meter is None else self._meter.cost(before)

    def leave(self, tracked: Tracked, tokens: int, step: int) -> int:
        """Return how many of the tokens that a request may load it computes, to be measured: the
        same whenever the request is asked for."""
        if tracked.left is None:
            meter, now_us = self._meter, self._clock_us()
            left = 0 if meter is None else meter.tokens_to_leave(tokens, now_us)
            self._counts["tokens_left_to_measure"] += left
            tracked.left = -(-left // step) * step
        return tracked.left


def step_of(output: SchedulerOutput, requests: Mapping[str, Tracked]) -> PrefillStep:
    """Return what a step computes; NOTHING where it has few prompt tokens."""
    scheduled = output.num_scheduled_tokens
    total = sum(scheduled.values())
    if total - len(scheduled) < PROMPT_TOKENS_MIN:
        return NOTHING  # The common case: decodes.
    drafts = output.scheduled_spec_decode_tokens or {}
    prompt, pairs = 0, 0.0
    for name, tokens in scheduled.items():
        tracked = requests.get(name)
        if tracked is None:
            return NOTHING
        pairs += tokens * (tracked.request.num_computed_tokens + tokens / 2)
        if tokens > 1 + len(drafts.get(name, ())):
            prompt += tokens
    return PrefillStep(prompt, total - prompt, pairs)


def meter_of(vllm_config: Any) -> PrefillMeter | None:
    """Return a meter for an engine of this configuration; None: its steps overlap."""
    if int(vllm_config.parallel_config.pipeline_parallel_size) > 1:
        return None
    tokens = getattr(vllm_config.scheduler_config, "max_num_batched_tokens", None) or STEP_TOKENS
    steps = getattr(vllm_config, "max_concurrent_batches", None) or 1
    return PrefillMeter(step_tokens_max=int(tokens), steps_in_flight_max=int(steps))
