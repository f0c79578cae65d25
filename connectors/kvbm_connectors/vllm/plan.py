"""Plans: what the two halves tell each other in a step, and the bell that announces one."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvbm_common.identity import SequenceHash

from kvbm_connectors.core.messages import Load, LoadResult, merge_results
from kvbm_connectors.vllm.stream_marks import MarkEnd

NEWS = threading.Event()
"""Rung by both halves' threads. With one worker they share a process with vLLM's scheduler, which
then need not sleep through the answer that it waits for."""
IDLE_WAIT_S = 0.001
"""The longest that a step without work waits; news ends the wait. vLLM itself waits as long."""


def await_news() -> None:
    """Wait for the bell, or IDLE_WAIT_S."""
    NEWS.wait(IDLE_WAIT_S)
    NEWS.clear()


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Scheduler half to worker halves, once a step."""

    loads: tuple[Load, ...] = ()
    offering: bool = False
    """The host tier may be reading device blocks, or will when a mark is over."""
    sent: tuple[str, ...] = ()
    """Finished requests whose blocks may be freed: each appears exactly once."""
    mark: int = 0
    """Workers lay it in their compute stream (`stream_marks.py`); 0: none."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """A worker half to the scheduler half, once a step: the loads that have ended, and marks."""

    results: tuple[LoadResult, ...] = ()
    passes_through: str = ""
    """The reason why this worker can load nothing, said once."""
    mark_ends: tuple[MarkEnd, ...] = ()
    """Marks of earlier plans that are over in this rank's compute stream."""

    def joined(self, other: StepReport) -> StepReport:
        """Return a report of two ranks: the scheduler side counts them."""
        reason = self.passes_through or other.passes_through
        return StepReport(self.results + other.results, reason, self.mark_ends + other.mark_ends)


class RankResults:
    """Results of loads that some ranks have reported, and others not yet."""

    def __init__(self, world_size: int) -> None:
        assert world_size > 0, world_size
        self._world_size = world_size
        self._parts: dict[str, list[LoadResult]] = {}

    def complete(self, report: StepReport) -> Iterator[LoadResult]:
        """Yield the results of loads that every rank has reported with this one."""
        for result in report.results:
            parts = self._parts.setdefault(result.load.request, [])
            parts.append(result)
            if len(parts) == self._world_size:
                del self._parts[result.load.request]
                yield merge_results(parts)


def impossible_load(
    request: str, blocks: Sequence[int], names: Sequence[SequenceHash], *, whole: bool
) -> Load:
    """Return a load that workers refuse: the engine counts on one, and computes it again."""
    count = len(blocks)
    return Load(
        request=request, epoch=0, lease=0, slots=(0,) * count, blocks=tuple(blocks),
        hashes=tuple(names), checksums=(b"",) * count, block_bytes=0, deadline_ms=0, whole=whole,
    )  # fmt: skip
