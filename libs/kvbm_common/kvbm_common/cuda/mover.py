"""The device mover: copies between one GPU and host memory, on a stream of its own, in a thread.

    move ──► waiting ──► in flight (a few waves, each with an event) ──► Moved
                             └─ deadline ─► the future fails; `settling` ends with the event

A job is one or more waves: what fits into a table of rows. The thread divides a job when its turn
comes, while the device copies the ones before: in the caller's thread the mover would wait for
Python's lock until the caller has divided all that it asks for. It puts a wave into the stream in
one go: what it must wait for, the copies of the engine, the kernel's table and launch, an event.
No compute stream is ever made to wait for ours; ours waits for events that are given.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from kvbm_common.cuda.copies import Copies, Plan, plan
from kvbm_common.cuda.pinning import Pinning
from kvbm_common.cuda.runtime import CudaError, Runtime, put
from kvbm_common.cuda.stream_end import LATE_POLL_S, StreamEnd
from kvbm_common.errors import KvbmError
from kvbm_common.nixl.transfers import (
    MoverBusy,
    MoverClosed,
    TransferFailed,
    Transferred,
    TransferTimeout,
)

log = logging.getLogger(__name__)

JOBS_MAX = 1024
"""Accepted and not yet ended, as of the NIXL mover; above it callers get MoverBusy."""
WAVES_IN_FLIGHT = 4
"""The next wave is in the stream before this one ends; more would only delay urgent ones."""
TABLE_ROWS = 65_536
"""Rows of one wave: 1.5 MiB of table, 512 MiB of 8 KiB rows."""
POLL_S = 0.00005
"""Between two looks at the events in flight."""
LATE_LOOK_S = 0.01
"""Between two looks at the deadlines of what waits for a stream that stands still."""
CLOSE_DEADLINE_S = 5.0
ROW_BYTES = 24
NOTHING = Copies(np.empty((0, 3), dtype=np.uint64))


@dataclass(slots=True, eq=False)
class _Job:
    copies: Copies
    bytes: int
    deadline: float
    after: tuple[int, ...]
    future: Future[Transferred]
    waves_left: int = 1
    """Waves that have not ended; a job that is not divided yet has one."""
    failed: bool = False
    settling: Future[None] = field(default_factory=Future)
    started: float = 0.0


@dataclass(slots=True, eq=False)
class _Wave:
    job: _Job
    plan: Plan
    is_first: bool


@dataclass(slots=True, eq=False)
class _Slot:
    """A table in pinned memory, the same on the device, and the end of the wave that uses it."""

    staging: np.ndarray
    table: int
    end: StreamEnd
    wave: _Wave | None = None


class DeviceMover:
    """One stream of one device. `urgent`: a request waits for these copies.

    `pinning` says which host memory a kernel may touch; without one, all of it. `kernel_below`
    is the size of a piece from which on the copy engine is faster.
    """

    def __init__(
        self,
        runtime: Runtime,
        *,
        name: str,
        urgent: bool,
        pinning: Pinning | None,
        host_side: int,
        kernel_below: int,
    ) -> None:
        """Start the mover. `host_side`: 0 where the host is the target, 1 where it is source."""
        self._runtime, self._pinning, self._host_side = runtime, pinning, host_side
        self._kernel_below = kernel_below if runtime.kernels_reach_host else 0
        self._urgent = urgent
        self._waiting: deque[_Job] = deque()
        self._divided: deque[_Wave] = deque()
        self._jobs = 0
        self._work = threading.Condition()
        self._closing = False
        self._late_look = 0.0
        self._over: Future[None] = Future()
        started: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(started,), name=f"device-{name}", daemon=True
        )
        self._thread.start()
        started.result()

    def move(
        self, copies: Copies, *, deadline_s: float, after: Sequence[int] = ()
    ) -> Future[Transferred]:
        """Copy, once the events of `after` are done. The future fails with a TransferError; unless
        it says `settled`, late bytes may still be written. The events end with the job."""
        deadline = time.monotonic() + deadline_s
        job = _Job(copies, copies.bytes, deadline, tuple(after), Future())
        with self._work:
            if self._closing:
                job.future.set_exception(MoverClosed("the mover is closed"))
            elif self._jobs >= JOBS_MAX:
                job.future.set_exception(MoverBusy(f"{self._jobs} jobs are under way"))
            else:
                self._jobs += 1
                self._waiting.append(job)
                self._work.notify()
                return job.future
        self._end_events(job)
        return job.future

    def close(self, timeout_s: float = CLOSE_DEADLINE_S) -> Future[None]:
        """Fail what waits, let what is in flight land, and end the thread.

        A copy may outlive the deadline: keep all memory until the future ends. The thread settles
        the copy, and ends then.
        """
        with self._work:
            self._closing = True
            self._work.notify()
        self._thread.join(timeout_s)
        return self._over

    # --- the thread -------------------------------------------------------------------------

    def _run(self, started: Future[None]) -> None:
        try:
            self._runtime.enter()
            self._stream = self._runtime.stream(urgent=self._urgent)
            self._slots = [self._slot() for _ in range(WAVES_IN_FLIGHT)]
        except BaseException as error:  # The constructor raises it to its caller.
            started.set_exception(error)
            return
        started.set_result(None)
        self._in_flight: deque[_Slot] = deque()
        while not self._closing:
            self._launch_what_may()
            self._look()
            with self._work:
                if not self._closing and not (self._has_work() and self._free()):
                    self._work.wait(POLL_S if self._in_flight or self._has_work() else None)
        self._finish()

    def _slot(self) -> _Slot:
        staging = self._runtime.pinned(TABLE_ROWS * ROW_BYTES)
        table = self._runtime.allocate(TABLE_ROWS * ROW_BYTES)
        return _Slot(staging, table, StreamEnd(self._runtime, self._stream))

    def _has_work(self) -> bool:
        return bool(self._divided or self._waiting)

    def _free(self) -> _Slot | None:
        return next((slot for slot in self._slots if slot.wave is None), None)

    def _launch_what_may(self) -> None:
        while self._has_work() and (slot := self._free()) is not None:
            if not self._divided and not self._divide(self._waiting.popleft()):
                continue
            wave = self._divided.popleft()
            job = wave.job
            if not job.failed and time.monotonic() >= job.deadline:
                self._fail(job, TransferTimeout, "the deadline passed in the queue")
            if job.failed or not self._begin(job, wave):
                self._wave_ended(job)
                continue
            slot.wave = wave
            try:
                self._launch(slot, wave)
            except CudaError as error:
                self._fail(job, TransferFailed, str(error))
            self._launched(slot)

    def _divide(self, job: _Job) -> bool:
        """Divide a job into waves; a job that cannot be divided fails, and is the only one."""
        try:
            waves = self._waves(job)
        except Exception as error:
            log.exception("copies could not be divided")
            self._fail(job, TransferFailed, f"{type(error).__name__}: {error}")
            self._wave_ended(job)
            return False
        job.waves_left = len(waves)
        self._divided.extend(waves)
        return True

    def _waves(self, job: _Job) -> list[_Wave]:
        joined, pinned = job.copies.joined(), None
        if self._pinning is not None:
            base, step = self._pinning.address, self._pinning.slice_bytes
            joined = joined.cut_at(self._host_side, base, step)
            pinned = self._pinning.covers(joined.rows[:, self._host_side])
        divided = plan(joined, kernel_below_bytes=self._kernel_below, pinned=pinned)
        count = max(1, -(-divided.kernel.count // TABLE_ROWS))
        return [
            _Wave(
                job,
                Plan(
                    divided.engine if number == 0 else NOTHING,
                    Copies(divided.kernel.rows[number * TABLE_ROWS : (number + 1) * TABLE_ROWS]),
                    divided.pageable if number == 0 else NOTHING,
                ),
                is_first=number == 0,
            )
            for number in range(count)
        ]

    def _begin(self, job: _Job, wave: _Wave) -> bool:
        """Begin a job with its first wave; return False if the caller has cancelled it."""
        if not wave.is_first:
            return True
        job.started = time.monotonic()
        if job.future.set_running_or_notify_cancel():
            return True
        job.failed = True
        return False

    def _launch(self, slot: _Slot, wave: _Wave) -> None:
        runtime, stream = self._runtime, self._stream
        if wave.is_first:
            for event in wave.job.after:
                runtime.wait(stream, event)
        rows = wave.plan.kernel.rows
        if len(rows):
            slot.staging[: rows.nbytes].view(np.uint64).reshape(-1, 3)[:] = rows
            runtime.copy(slot.table, slot.staging.ctypes.data, rows.nbytes, stream)
            runtime.copy_rows(slot.table, len(rows), stream)
        put(runtime, wave.plan.engine, stream)
        for target, source, length in wave.plan.pageable.rows.tolist():
            runtime.copy(target, source, length, stream)  # Last: it may hold this thread up.

    def _launched(self, slot: _Slot) -> None:
        """Mark the end of a wave, even of one that failed half-way: that of its last copy."""
        slot.end.mark()
        self._in_flight.append(slot)

    def _look(self) -> None:
        """Take the waves that have ended, in the order of their one stream; fail the late jobs."""
        while self._in_flight and self._is_done(self._in_flight[0]):
            slot = self._in_flight.popleft()
            wave, slot.wave = slot.wave, None
            assert wave is not None
            self._wave_ended(wave.job)
        now = time.monotonic()
        for slot in self._in_flight:
            assert slot.wave is not None
            if not slot.wave.job.failed and now > slot.wave.job.deadline:
                self._fail(slot.wave.job, TransferTimeout, "the deadline passed in flight")
        if now >= self._late_look and self._has_work():
            self._late_look = now + LATE_LOOK_S
            self._fail_waiting(now)

    def _fail_waiting(self, now: float) -> None:
        """Fail the late jobs that wait: a stream that stands still begins none."""
        for wave in self._divided:
            if now > wave.job.deadline:
                self._fail(wave.job, TransferTimeout, "the deadline passed in the queue")
        with self._work:
            late = [job for job in self._waiting if now > job.deadline]
            for job in late:
                self._waiting.remove(job)
        for job in late:
            self._fail(job, TransferTimeout, "the deadline passed in the queue")
            self._wave_ended(job)

    def _is_done(self, slot: _Slot) -> bool:
        try:
            return slot.end.has_come()
        except CudaError as error:  # A broken context copies nothing any more.
            assert slot.wave is not None
            self._fail(slot.wave.job, TransferFailed, str(error))
            return True

    def _fail(self, job: _Job, kind: Callable[..., KvbmError], reason: str) -> None:
        if not job.failed:
            job.failed = True
            if not job.started:
                job.future.set_running_or_notify_cancel()
            if not job.future.cancelled():
                job.future.set_exception(kind(reason, job.settling))

    def _wave_ended(self, job: _Job) -> None:
        job.waves_left -= 1
        if job.waves_left:
            return
        self._end_events(job)
        with self._work:
            self._jobs -= 1
        job.settling.set_result(None)
        if not job.failed:
            job.future.set_result(Transferred(job.bytes, time.monotonic() - job.started))

    def _end_events(self, job: _Job) -> None:
        for event in job.after:
            with contextlib.suppress(CudaError):  # A broken context has none.
                self._runtime.end_event(event)

    def _finish(self) -> None:
        for job in [*(wave.job for wave in self._divided), *self._waiting]:
            self._fail(job, MoverClosed, "the mover was closed")
            self._wave_ended(job)
        for slot in self._in_flight:
            assert slot.wave is not None
            self._fail(slot.wave.job, MoverClosed, "the mover was closed in mid-transfer")
        close_by = time.monotonic() + CLOSE_DEADLINE_S
        while self._in_flight:  # What is in flight uses all of it.
            self._look()
            time.sleep(POLL_S if time.monotonic() < close_by else LATE_POLL_S)
        with contextlib.suppress(CudaError):  # A broken context has nothing to give back.
            for slot in self._slots:
                slot.end.close()
                self._runtime.free(slot.table)
            self._runtime.end_stream(self._stream)
        self._over.set_result(None)
