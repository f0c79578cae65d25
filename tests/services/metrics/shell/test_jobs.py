"""Jobs: progress, an end, a stop between two steps, and limits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest
from kvbm_metrics.shell import jobs as module
from kvbm_metrics.shell.jobs import Job, Jobs, Progress, TooManyJobs, UnknownJob

from tests.waiting import wait_until


async def three_steps(_job: Job) -> AsyncGenerator[Progress, None]:
    """Ends by itself."""
    for done in (1, 2, 3):
        yield {"removed": done}


async def for_ever(_job: Job) -> AsyncGenerator[Progress, None]:
    """Says once what it has done, then waits."""
    yield {"removed": 1}
    await asyncio.Event().wait()


async def crashing(_job: Job) -> AsyncGenerator[Progress, None]:
    """A mistake of ours."""
    yield {"removed": 1}
    raise ZeroDivisionError("secret")


async def ended(jobs: Jobs, job: Job) -> Job:
    """The job, when it runs no more."""
    await wait_until(lambda: jobs.find(job.id).state != "running")
    return jobs.find(job.id)


async def test_a_job_ends() -> None:
    jobs = Jobs(clock_ms=lambda: 7)
    job = await ended(jobs, jobs.start("evict", "ada", three_steps))
    assert (job.state, job.progress, job.ended_ms, job.errors) == ("done", {"removed": 3}, 7, {})


async def test_a_job_is_stopped_when_the_step_under_way_has_its_answer() -> None:
    """What that step has done is counted; a second cancel changes nothing."""
    answered, asked = asyncio.Event(), 0

    async def steps(_job: Job) -> AsyncGenerator[Progress, None]:
        nonlocal asked
        while True:
            asked += 1
            await answered.wait()
            yield {"removed": asked}

    jobs = Jobs()
    job = jobs.start("evict", "ada", steps)
    await wait_until(lambda: asked == 1)
    stopping = asyncio.create_task(jobs.cancel(job.id))
    await wait_until(lambda: job.is_stopping)
    assert job.state == "running"
    answered.set()
    assert (await stopping).state == "cancelled"
    assert ((await jobs.cancel(job.id)).progress, job.errors, asked) == ({"removed": 1}, {}, 1)


async def test_a_step_that_takes_too_long_is_broken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was done before is still said, and that this step may have done something."""
    monkeypatch.setattr(module, "OPERATOR_DEADLINE_S", 0.05)
    jobs = Jobs()
    job = jobs.start("evict", "ada", for_ever)
    await wait_until(lambda: job.progress)
    assert (await jobs.cancel(job.id)).state == "cancelled"
    assert job.progress == {"removed": 1}
    assert "broken off" in job.errors["metrics"]


async def test_a_job_that_never_began_is_stopped() -> None:
    """Cancelled before its first step: its state says so as well."""
    jobs = Jobs()
    job = jobs.start("evict", "ada", for_ever)
    assert (await jobs.cancel(job.id)).state == "cancelled"


async def test_a_crash_fails_the_job_only() -> None:
    """The text stays in the log."""
    jobs = Jobs()
    job = await ended(jobs, jobs.start("evict", "ada", crashing))
    assert job.state == "failed"
    assert "secret" not in job.errors["metrics"]


async def test_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """So many at the same time, so many remembered; an unknown one is an error."""
    monkeypatch.setattr(module, "RUNNING_MAX", 2)
    monkeypatch.setattr(module, "JOBS_MAX", 3)
    jobs = Jobs()
    first = jobs.start("evict", "ada", for_ever)
    jobs.start("evict", "ada", for_ever)
    with pytest.raises(TooManyJobs):
        jobs.start("evict", "ada", three_steps)
    assert (await jobs.cancel(first.id)).state == "cancelled"
    for _ in range(3):
        await ended(jobs, jobs.start("evict", "ada", three_steps))
    assert len(jobs.all()) == 3
    with pytest.raises(UnknownJob):
        jobs.find(first.id)
    await jobs.close()
    assert all(job.state != "running" for job in jobs.all())
