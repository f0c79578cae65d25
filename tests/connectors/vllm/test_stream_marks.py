"""Marks in the ranks' compute streams."""

from __future__ import annotations

import pytest
from kvbm_common.cuda.reading import Gpu
from kvbm_common.cuda.runtime import CudaError
from kvbm_connectors.vllm.stream_marks import MARK_DEADLINE_S, RankMarks, StreamMarks

from tests.gpu.fake_runtime import FakeRuntime

pytestmark = pytest.mark.usefixtures("small_measurements")


def test_a_mark_is_over_when_every_rank_has_reported_it() -> None:
    """1. Two marks of two ranks, whose reports come mixed. 2. One rank that knows nothing is
    enough: nobody knows. 3. Once more, or of a mark that nobody has laid: nothing."""
    marks = RankMarks(2)
    assert (marks.begin(), marks.begin(), marks.next) == (1, 2, 3)
    assert marks.ended([(1, True), (2, True)]) == []
    assert marks.ended([(2, False)]) == [(2, False)]
    assert marks.ended([(1, True)]) == [(1, True)]
    assert marks.ended([(1, True), (9, True)]) == []


def test_a_mark_that_a_rank_does_not_report_is_over_in_the_end() -> None:
    """Goal: a rank that fails does not keep the blocks after a mark for ever."""
    clock = [0.0]
    marks = RankMarks(2, clock=lambda: clock[0])
    assert marks.begin() == 1
    clock[0] = MARK_DEADLINE_S
    assert marks.begin() == 2
    assert marks.ended([(1, True)]) == []
    clock[0] += 1
    assert marks.ended(()) == [(1, False)]
    assert marks.ended([(1, True), (2, True), (2, True)]) == [(2, True)]


def test_memory_of_this_host_is_written_when_a_mark_is_laid() -> None:
    marks = StreamMarks()
    marks.lay(1, None, on_host=True)
    marks.lay(2, None, on_host=False)
    assert marks.take_ends() == ((1, True), (2, False))
    assert marks.take_ends() == ()


def test_a_stream_passes_its_marks_in_order() -> None:
    """Goal: a mark is over when all is done that the engine had begun before it, and not earlier.

    1. The engine has begun to zero some memory; a mark is laid, and one after more of it.
    2. Nothing has run: no mark is over. 3. All has run: both are, and their events are gone.
    """
    runtime = FakeRuntime()
    gpu, marks, memory = Gpu(runtime), StreamMarks(), runtime.allocate(8)
    runtime.moves = False
    runtime.calls.clear()
    compute = runtime.stream(urgent=False)
    gpu.computes_on(compute)
    runtime.zero(memory, 8, compute)
    marks.lay(1, gpu, on_host=False)
    runtime.zero(memory, 8, compute)
    marks.lay(2, gpu, on_host=False)
    assert marks.take_ends() == ()
    runtime.advance()
    assert marks.take_ends() == ((1, True), (2, True))
    assert sum(call[0] == "end_event" for call in runtime.calls) == 2


class BrokenRuntime(FakeRuntime):
    """A GPU that fails once it `is_broken`."""

    is_broken = False

    def is_done(self, event: int) -> bool:
        if self.is_broken:
            raise CudaError(f"no answer of event {event}")
        return super().is_done(event)

    def record(self, event: int, stream: int) -> None:
        if self.is_broken:
            raise CudaError(f"stream {stream} does not take event {event}")
        super().record(event, stream)

    def break_down(self) -> None:
        self.is_broken = True
        self.calls.clear()

    @property
    def events_ended(self) -> int:
        return sum(call[0] == "end_event" for call in self.calls)


def test_of_a_stream_that_fails_behind_a_mark_nothing_is_known() -> None:
    """Goal: a GPU's failure does not come out of a report: it would end the engine's step. Its
    events are gone."""
    runtime, marks = BrokenRuntime(), StreamMarks()
    gpu = Gpu(runtime)
    marks.lay(1, gpu, on_host=False)
    marks.lay(2, gpu, on_host=False)
    runtime.break_down()
    assert marks.take_ends() == ((1, False), (2, False))
    assert marks.take_ends() == ()
    assert runtime.events_ended == 2


def test_of_a_stream_that_takes_no_event_nothing_is_known() -> None:
    runtime, marks = BrokenRuntime(), StreamMarks()
    gpu = Gpu(runtime)
    runtime.break_down()
    marks.lay(1, gpu, on_host=False)
    assert marks.take_ends() == ((1, False),)
    assert runtime.events_ended == 1
