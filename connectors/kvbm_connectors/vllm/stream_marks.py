"""Marks in the ranks' compute streams, for KV that is written after a step has been reported.

A draft model's pass goes on when its step has been reported. So blocks that it writes are offered
behind a mark: the plan of a later step lays it in the stream of every rank, and a rank reports it
when the stream has come so far. Streams keep their order: what was begun before the mark is done.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from kvbm_common.cuda.runtime import CudaError

if TYPE_CHECKING:
    from kvbm_common.cuda.reading import Gpu

Passed = tuple[int, bool]
"""A mark that is over, and whether the stream has passed it. False: that is unknown."""


class RankMarks:
    """Marks of the scheduler side: each is over when every rank has reported it."""

    def __init__(self, world_size: int) -> None:
        """Count the reports of so many ranks."""
        assert world_size > 0, world_size
        self._world_size = world_size
        self.next = 1
        """The mark that the next plan with one lays."""
        self._reports: dict[int, list[bool]] = {}

    def lay(self) -> int:
        """Return the mark of the plan that is made now."""
        mark, self.next = self.next, self.next + 1
        self._reports[mark] = []
        return mark

    def over(self, passed: Iterable[Passed]) -> Iterator[Passed]:
        """Take ranks' reports; yield the marks that are over with them. One of a mark that is not
        laid, or over, counts for nothing."""
        for mark, has_passed in passed:
            if (reports := self._reports.get(mark)) is None:
                continue
            reports.append(has_passed)
            if len(reports) == self._world_size:
                del self._reports[mark]
                yield mark, all(reports)


class StreamMarks:
    """Marks in the compute stream of one rank, for the thread that computes."""

    def __init__(self) -> None:
        self._laid: list[tuple[int, Gpu, int]] = []
        """Mark, GPU and event, in the order of the stream."""
        self._passed: list[Passed] = []

    def lay(self, mark: int, gpu: Gpu | None, *, on_host: bool) -> None:
        """Put a mark behind all that has begun. What computes `on_host` has done it by now; of a
        GPU that could not be opened nothing is known."""
        if gpu is None:
            self._passed.append((mark, on_host))
            return
        try:
            self._laid.append((mark, gpu, gpu.fence()))
        except CudaError:
            self._passed.append((mark, False))

    def take_passed(self) -> tuple[Passed, ...]:
        """Return the marks that are over since the last call; each once."""
        while self._laid:
            mark, gpu, fence = self._laid[0]
            try:
                if not gpu.has_passed(fence):
                    break
                self._passed.append((mark, True))
            except CudaError:
                self._passed.append((mark, False))
            self._laid.pop(0)
        passed, self._passed = tuple(self._passed), []
        return passed
