"""Jobs: changes that take long, with an id, progress and a way to stop them.

A job is a plan of steps for instances of services. It requests one step after the other, of one
instance at a time, and can stop between two; finished steps are not undone. Ended jobs are
remembered for a while.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from kvbm_common.errors import KvbmError
from kvbm_common.wire.bounds import Usage

from kvbm_metrics.shell.fleet import OPERATOR_DEADLINE_S

JOBS_MAX = 256
"""Jobs that are remembered; the oldest ended ones are forgotten."""
RUNNING_MAX = 16
"""Jobs that run at the same time. More come from a script in error."""

JobState = Literal["running", "done", "failed", "cancelled"]

_log = logging.getLogger(__name__)


class TooManyJobs(KvbmError):
    """Too many jobs are running: others have to end first."""

    code = "too_many_jobs"


class UnknownJob(KvbmError):
    """There is no job of this id, or it was forgotten."""

    code = "unknown_job"


@dataclass(slots=True, kw_only=True)
class Job:
    """One job and its progress."""

    id: str
    verb: str
    actor: str
    started_ms: int
    """The start by the wall clock."""
    state: JobState = "running"
    ended_ms: int = 0
    progress: dict[str, int] = field(default_factory=dict)
    """Name of a figure → its count so far."""
    errors: dict[str, str] = field(default_factory=dict)
    """`kind.host.instance` → why that instance did not do its part."""
    is_stopping: bool = False
    """True: it ends after the step that is under way."""
    task: asyncio.Task[None] | None = field(default=None, repr=False)


Progress = Mapping[str, int]
Work = Callable[[Job], AsyncGenerator[Progress, None]]
"""The steps of a job: yields the counts after each, and notes failed instances in `errors`."""


class Jobs:
    """All jobs of this process; they end with it."""

    def __init__(self, clock_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000) -> None:
        self._jobs: dict[str, Job] = {}
        self._clock_ms = clock_ms

    def start(self, verb: str, actor: str, work: Work) -> Job:
        """Begin a job; raises TooManyJobs."""
        running = sum(job.state == "running" for job in self._jobs.values())
        if running >= RUNNING_MAX:
            raise TooManyJobs(f"{running} jobs are running")
        self._forget()
        job = Job(id=secrets.token_hex(8), verb=verb, actor=actor, started_ms=self._clock_ms())
        self._jobs[job.id] = job
        job.task = asyncio.create_task(self._run(job, work), name=f"job {verb} {job.id}")
        return job

    def find(self, job_id: str) -> Job:
        """Return the job of that id; raises UnknownJob."""
        job = self._jobs.get(job_id)
        if job is None:
            raise UnknownJob(f"no job {job_id!r}")
        return job

    def usage(self) -> Usage:
        """Return how full the history of jobs is."""
        return Usage(len(self._jobs), JOBS_MAX)

    def all(self) -> list[Job]:
        """Return the jobs that are remembered, newest first."""
        return list(self._jobs.values())[::-1]

    async def cancel(self, job_id: str) -> Job:
        """Stop a job between two steps; one that has ended stays as it is. Raises UnknownJob.

        A step that takes too long is broken off: its instance may carry it out all the same.
        """
        job = self.find(job_id)
        if job.state == "running" and job.task is not None:
            job.is_stopping = True
            _, late = await asyncio.wait({job.task}, timeout=OPERATOR_DEADLINE_S)
            if late:
                job.errors["metrics"] = "a step was broken off: what it did is not counted"
                await self._break_off(job)
        return job

    async def close(self) -> None:
        """Stop all jobs that run, at once."""
        for job in self.all():
            await self._break_off(job)

    async def _break_off(self, job: Job) -> None:
        if job.state == "running" and job.task is not None:
            job.task.cancel()
            await asyncio.wait({job.task})
            if job.state == "running":  # Its task had not begun yet.
                job.state, job.ended_ms, job.task = "cancelled", self._clock_ms(), None

    async def _run(self, job: Job, work: Work) -> None:
        try:
            if job.is_stopping or not await _take_steps(job, work):
                job.state = "cancelled"
            else:
                job.state = "failed" if job.errors else "done"
        except asyncio.CancelledError:
            job.state = "cancelled"  # Swallowed: the task is ours, and its canceller waits for it.
        except Exception as error:
            job.state = "failed"
            job.errors["metrics"] = f"{type(error).__name__}, see the log of the metrics service"
            _log.exception("job %s (%s) failed", job.id, job.verb)
        finally:
            job.ended_ms = self._clock_ms()
            job.task = None

    def _forget(self) -> None:
        ended = [job.id for job in self._jobs.values() if job.state != "running"]
        for job_id in ended[: max(0, len(self._jobs) - JOBS_MAX + 1)]:
            del self._jobs[job_id]


async def _take_steps(job: Job, work: Work) -> bool:
    """Take one step after the other; False: the job was stopped before the last."""
    async with contextlib.aclosing(work(job)) as steps:
        async for progress in steps:
            job.progress = dict(progress)
            if job.is_stopping:
                return False
    return True
