"""The steps of jobs, against instances that answer oddly."""

from __future__ import annotations

import asyncio
from typing import cast

import msgspec
import pytest
from kvbm_common.errors import DeadlineExceeded, KvbmError, RequestFailed
from kvbm_common.registry.records import ServiceRecord
from kvbm_common.wire.admin import (
    STEP_BLOCKS_MAX,
    RemoveReply,
    RemoveRequest,
    ResizeReply,
    ResizeRequest,
)
from kvbm_common.wire.codec import JsonCodec
from kvbm_metrics.core.admin_models import PrefetchQuery
from kvbm_metrics.shell.fleet import Fleet, Reply
from kvbm_metrics.shell.jobs import Jobs, Work
from kvbm_metrics.shell.operations import prefetching, removing, resizing

from tests.services.metrics.samples import record
from tests.waiting import wait_until

TIER = record("host-tier", host="h")


class Stuck:
    """A fleet of one tier, which wants to be asked again and does nothing."""

    def __init__(self, reply: msgspec.Struct) -> None:
        self.asked = 0
        self._payload = msgspec.json.encode(reply)

    async def ask_instance(
        self, _record: ServiceRecord, verb: str, request: msgspec.Struct, codec: JsonCodec[Reply]
    ) -> Reply:
        """Answer the same each time."""
        self.asked += 1
        await asyncio.sleep(0)
        return codec.decode(self._payload)


async def ended(work: Work) -> dict[str, str]:
    """Return the errors of a job that has come to its end."""
    jobs = Jobs()
    job = jobs.start("x", "ada", work)
    try:
        await wait_until(lambda: jobs.find(job.id).state != "running", deadline_s=2.0)
    finally:
        await jobs.close()
    return jobs.find(job.id).errors


class Dead:
    """A fleet whose tiers do not answer before the job is stopped."""

    def __init__(self, jobs: Jobs) -> None:
        self.asked = 0
        self._jobs = jobs

    async def ask_instance(self, *_: object) -> Reply:
        """Fail when the job is being stopped."""
        self.asked += 1
        (job,) = self._jobs.all()
        await wait_until(lambda: job.is_stopping)
        raise DeadlineExceeded("no answer")


async def test_a_resize_that_is_stopped_asks_no_other_tier() -> None:
    """Goal: nothing changes after the stop, also where the tier under way is dead."""
    jobs = Jobs()
    fleet = Dead(jobs)
    request = ResizeRequest(slots=3, actor="ada")
    job = jobs.start("x", "ada", resizing(cast(Fleet, fleet), [TIER, TIER], "resize", request))
    await wait_until(lambda: fleet.asked == 1)
    assert (await jobs.cancel(job.id)).state == "cancelled"
    assert fleet.asked == 1


async def test_a_resize_without_progress_ends() -> None:
    """Goal: a tier of another release that says `more` and evicts nothing is not asked again."""
    fleet = Stuck(ResizeReply(slots=5, was=5, capacity=8, more=True))
    work = resizing(cast(Fleet, fleet), [TIER], "resize", ResizeRequest(slots=3, actor="ada"))
    assert await ended(work) == {"host-tier.h.0": "in_use: 2 slots more are in use; ask again"}
    assert fleet.asked == 1


class Growing(Stuck):
    """A fleet whose tier uses two slots more with each request, up to 8."""

    async def ask_instance(
        self, _record: ServiceRecord, verb: str, request: msgspec.Struct, codec: JsonCodec[Reply]
    ) -> Reply:
        """Answer that two more are in use."""
        self.asked += 1
        await asyncio.sleep(0)
        slots = 2 * self.asked
        reply = ResizeReply(slots=slots, was=slots - 2, capacity=8, more=slots < 8)
        return codec.decode(msgspec.json.encode(reply))


async def test_a_resize_that_only_moves_empty_slots_is_asked_for_until_it_has_ended() -> None:
    fleet = Growing(ResizeReply(slots=0, was=0, capacity=8))
    work = resizing(cast(Fleet, fleet), [TIER], "resize", ResizeRequest(slots=8, actor="ada"))
    assert not await ended(work)
    assert fleet.asked == 4


async def test_a_removal_without_progress_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: the same of `evict`, but a tier may look through many blocks before it removes one."""
    monkeypatch.setattr("kvbm_metrics.shell.operations.IDLE_TURNS_MAX", 5)
    fleet = Stuck(RemoveReply(removed=0, kept=4, missing=[], more=True))
    request = RemoveRequest(everything=True, actor="ada")
    errors = await ended(removing(cast(Fleet, fleet), [TIER], "evict", request))
    assert "no_progress" in errors[TIER.key]
    assert fleet.asked == 5


class Silent(Stuck):
    """A fleet whose tiers do not answer."""

    async def ask_instance(
        self, _record: ServiceRecord, verb: str, request: msgspec.Struct, codec: JsonCodec[Reply]
    ) -> Reply:
        self.asked += 1
        raise DeadlineExceeded("no answer")


async def test_a_tier_that_does_not_answer_is_asked_for_no_further_part() -> None:
    """Goal: a long list of blocks does not wait for it once for each part."""
    fleet = Silent(RemoveReply(removed=0, kept=0, missing=[], more=False))
    hashes = [f"{number:032x}" for number in range(3 * STEP_BLOCKS_MAX)]
    request = RemoveRequest(hashes=hashes, actor="ada")
    other = record("disk-tier", host="h")
    errors = await ended(removing(cast(Fleet, fleet), [TIER, other], "evict", request))
    assert errors.keys() == {"host-tier.h.0", "disk-tier.h.0"}
    assert fleet.asked == 2


class Failing(Stuck):
    """A fleet whose tiers answer nothing but this."""

    def __init__(self, error: KvbmError) -> None:
        super().__init__(msgspec.Struct())
        self._error = error

    async def ask_instance(
        self, _record: ServiceRecord, verb: str, request: msgspec.Struct, codec: JsonCodec[Reply]
    ) -> Reply:
        """Fail each time."""
        raise self._error


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (RequestFailed("not_cut", "the medium is not cut yet"),
         "not_cut: the medium is not cut yet"),
        (DeadlineExceeded("no answer"), "deadline_exceeded: no answer"),
    ],
    ids=["a refusal of the tier", "a failure on the way"],
)  # fmt: skip
@pytest.mark.parametrize("verb", ["evict", "resize", "prefetch"])
async def test_a_job_shows_the_code_of_a_failure_once(
    verb: str, error: KvbmError, line: str
) -> None:
    fleet, tiers = cast(Fleet, Failing(error)), [TIER]
    work = {
        "evict": removing(fleet, tiers, verb, RemoveRequest(everything=True)),
        "resize": resizing(fleet, tiers, verb, ResizeRequest(slots=3)),
        "prefetch": prefetching(fleet, tiers, PrefetchQuery(hashes=["0" * 31 + "1"]), "ada"),
    }[verb]
    assert await ended(work) == {TIER.key: line}
