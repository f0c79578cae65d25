"""The prefill meter: from a scheduler's steps to what a lookup says of the cost of computing.

A step is measured from when it was planned, or from the end of the step before if that is later:
an engine may plan a step while another one runs. Steps end in the order in which they were planned.
Only steps with many prompt tokens tell what prefill takes; decodes in them count as tokens, too.

Where all is loaded, no prefill is measured any more. So after a while without a measured step one
lookup leaves its last tokens to compute: that costs one small step a minute.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from kvbm_common.tier.cost_line import Line
from kvbm_common.tier.prefill_cost import MIB, PrefillCost

from kvbm_connectors.core.prefill_fit import PrefillFit

PROMPT_TOKENS_MIN = 64
"""A step with fewer prompt tokens than this takes what decoding takes."""
DECODES_MAX = 0.25
"""Decodes for each prompt token; a step with more tells of decoding."""
STALE_MS = 60_000
"""After so long without a measured step, a lookup leaves some tokens to measure one."""
STEP_US_MAX = 60_000_000
"""A step that takes longer was not computing: the machine was suspended."""


@dataclass(frozen=True, slots=True)
class PrefillStep:
    """The work of one step. Without prompt tokens it is not measured."""

    prompt_tokens: int = 0
    decodes: int = 0
    pairs: float = 0.0
    """Summed over its tokens: the tokens of the same request before each."""

    @property
    def is_telling(self) -> bool:
        """Tell whether the step is mostly prefill."""
        enough = self.prompt_tokens >= PROMPT_TOKENS_MIN
        return enough and self.decodes <= DECODES_MAX * self.prompt_tokens


NOTHING = PrefillStep()


class PrefillMeter:
    """The steps in flight, and what those that have ended say. Each call takes constant time."""

    def __init__(self, *, step_tokens_max: int, steps_in_flight_max: int = 1) -> None:
        """Measure an engine whose steps have so many tokens at most."""
        assert step_tokens_max > 0, step_tokens_max
        assert steps_in_flight_max > 0, steps_in_flight_max
        self.fit = PrefillFit()
        self.copies = Line()
        """The measured time of copies from host memory to the device."""
        self._step_tokens_max = step_tokens_max
        self._steps_max = steps_in_flight_max
        self._steps: deque[tuple[PrefillStep, int]] = deque()
        """Steps, each with the time at which it was planned."""
        self._ended_us = 0
        self._told_ms = 0
        """The time when a step was measured last, or tokens were left for one."""

    def planned(self, step: PrefillStep, now_us: int) -> None:
        """Note a step that is sent out now."""
        if len(self._steps) >= self._steps_max:
            self._steps.clear()  # The end of one was not reported: which one is not known.
        self._steps.append((step, now_us))

    def planned_empty(self) -> None:
        """Note a step without tokens, whose end the engine reports or not: it is not awaited, and
        no end that comes now says whose it is."""
        self._steps.clear()

    def ended(self, now_us: int) -> bool:
        """Note the end of the oldest step; returns whether it was measured."""
        if not self._steps:
            return False
        step, planned_us = self._steps.popleft()
        assert len(self._steps) < self._steps_max, f"{len(self._steps)} steps are in flight"
        took_us = now_us - max(planned_us, self._ended_us)
        self._ended_us = now_us
        if not step.is_telling or not 0 < took_us <= STEP_US_MAX:
            return False
        self.fit.add(step.prompt_tokens + step.decodes, step.pairs, took_us)
        self._told_ms = now_us // 1000
        return True

    def copied(self, size: int, seconds: float, now_us: int) -> None:
        """Note a copy from host memory to the device that has ended."""
        if size > 0 and seconds > 0:
            self.copies.observe(size, seconds * 1000, now_us // 1000)

    def cost(self, before: int) -> PrefillCost | None:
        """Return what a lookup says, whose first block comes after so many tokens; None: too little
        was measured."""
        assert before >= 0, f"{before} tokens are on the device"
        known = self.fit.known
        if known is None:
            return None
        load_mib_us = 0
        if self.copies.is_known:
            load_mib_us = round(self.copies.estimate().ms_per_byte * MIB * 1e3)
        return PrefillCost(
            max(1, round(known.token_us * 1e3)), round(known.pair_us * 1e9), before,
            0, load_mib_us, round(known.start_us), self._step_tokens_max,
        )  # fmt: skip

    def tokens_to_leave(self, tokens: int, now_us: int) -> int:
        """Return how many of the tokens that a request may load it shall compute instead, to be
        measured: none, unless no step was measured for long."""
        now_ms = now_us // 1000
        is_stale = self.fit.known is not None and now_ms - self._told_ms >= STALE_MS
        if not is_stale or tokens < 4 * PROMPT_TOKENS_MIN:
            return 0
        self._told_ms = now_ms
        return PROMPT_TOKENS_MIN
