"""Marks in the ranks' compute streams, for KV that is written after a step has been reported.

A draft model's pass may still run when its step has been reported. So blocks that it writes are
offered after a mark: the plan of a later step lays it in the stream of every rank, and a rank
reports it when the stream has come so far. Streams keep their order: what was begun before the mark
is done then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from kvbm_common.cuda.runtime import CudaError

if TYPE_CHECKING:
    from kvbm_common.cuda.reading import Gpu

MarkEnd = tuple[int, bool]
"""A mark that is over, and whether the streams have passed it. False: that is unknown."""
MARK_DEADLINE_S = 60.0
"""The longest wait of a mark for its last rank, in seconds; no step takes as long. vLLM frees
nothing that waits for the mark."""


class RankMarks:
    """Marks of the scheduler side: each is over when every rank has reported it, or too late."""

    def __init__(
        self, world_size: int, *, rewritten: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Count the reports of `world_size` ranks. KV of the last `rewritten` tokens of a request
        is written again with its next step."""
        assert world_size > 0, world_size
        assert rewritten >= 0, rewritten
        self._world_size, self.rewritten, self._clock = world_size, rewritten, clock
        self.next = 1
        """The mark that the next plan with one lays."""
        self._reports: dict[int, list[bool]] = {}
        self._laid_s: dict[int, float] = {}

    def begin(self) -> int:
        """Return the mark that the plan which is made now lays."""
        mark, self.next = self.next, self.next + 1
        self._reports[mark], self._laid_s[mark] = [], self._clock()
        return mark

    def ended(self, reports: Iterable[MarkEnd]) -> list[MarkEnd]:
        """Take what ranks report; return the marks that are over with it, or too late. A report of
        a mark that was never laid, or is over already, is ignored."""
        ends: list[MarkEnd] = []
        for mark, has_passed in reports:
            if (reported := self._reports.get(mark)) is None:
                continue
            reported.append(has_passed)
            if len(reported) == self._world_size:
                ends.append(self._end(mark, all(reported)))
        now_s = self._clock()
        late = [mark for mark, at_s in self._laid_s.items() if now_s - at_s > MARK_DEADLINE_S]
        return ends + [self._end(mark, False) for mark in late]

    def _end(self, mark: int, has_passed: bool) -> MarkEnd:
        del self._reports[mark], self._laid_s[mark]
        return mark, has_passed


class StreamMarks:
    """Marks in the compute stream of one rank, for the thread that computes."""

    def __init__(self) -> None:
        self._laid: list[tuple[int, Gpu, int]] = []
        """Mark, GPU and event, in the order of the stream."""
        self._ends: list[MarkEnd] = []

    def lay(self, mark: int, gpu: Gpu | None, *, on_host: bool) -> None:
        """Put a mark after all that has begun. `on_host`: KV is in host memory, and the engine's
        thread has written it when it comes here. Of a GPU that is not open nothing is known."""
        if gpu is None:
            self._ends.append((mark, on_host))
            return
        try:
            self._laid.append((mark, gpu, gpu.fence()))
        except CudaError:
            self._ends.append((mark, False))

    def take_ends(self) -> tuple[MarkEnd, ...]:
        """Return the marks that are over since the last call; each once."""
        while self._laid:
            mark, gpu, fence = self._laid[0]
            try:
                if not gpu.has_passed(fence):
                    break
                self._ends.append((mark, True))
            except CudaError:
                self._ends.append((mark, False))
            self._laid.pop(0)
        ends, self._ends = tuple(self._ends), []
        return ends
