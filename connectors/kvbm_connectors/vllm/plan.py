"""What the two halves tell each other in a step, and the bell that says that something came."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from kvbm_connectors.core.messages import Load, LoadResult

NEWS = threading.Event()
"""Rung by both halves' threads. With one worker they share a process with vLLM's scheduler, which
then need not sleep through the answer that it waits for."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Scheduler half to worker halves, once a step."""

    loads: tuple[Load, ...] = ()
    sync: bool = False
    """The loads must be in before this step computes."""
    offering: bool = False
    """The host tier may be reading device blocks."""
    sent: tuple[str, ...] = ()
    """Finished requests whose blocks may be freed: each appears exactly once."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """A worker half to the scheduler half, once a step: the loads that have ended."""

    results: tuple[LoadResult, ...]
