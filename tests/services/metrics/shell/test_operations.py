"""The steps of jobs, against instances that answer oddly."""

from __future__ import annotations

import asyncio
from typing import cast

import msgspec
import pytest
from kvbm_common.errors import DeadlineExceeded, KvbmError, RequestFailed
from kvbm_common.registry.records import ServiceRecord
from kvbm_common.tier.admin import MOVED_MAX
from kvbm_common.wire.admin import (
    STEP_BLOCKS_MAX,
    PrefetchRequest,
    RemoveReply,
    RemoveRequest,
    ResizeReply,
    ResizeRequest,
)
from kvbm_common.wire.codec import JsonCodec
from kvbm_common.wire.verbs import ErrorBody
from kvbm_host_tier.core.messages import AdminAsked, Answer, AskFill
from kvbm_metrics.core.admin_models import PrefetchQuery
from kvbm_metrics.shell.fleet import Fleet, Reply
from kvbm_metrics.shell.jobs import Job, Jobs, Work
from kvbm_metrics.shell.operations import prefetching, removing, resizing, with_lost

from tests.libs.kvbm_common.tier.test_admin import Tier
from tests.services.host_tier.helpers import Host, name, of
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


async def ended_job(work: Work) -> Job:
    """Return a job that has come to its end."""
    jobs = Jobs()
    job = jobs.start("x", "ada", work)
    try:
        await wait_until(lambda: jobs.find(job.id).state != "running")
    finally:
        await jobs.close()
    return jobs.find(job.id)


async def ended(work: Work) -> dict[str, str]:
    """Return the errors of a job that has come to its end."""
    return (await ended_job(work)).errors


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
        assert isinstance(request, ResizeRequest)
        assert request.goes_on == (self.asked > 0), "only the first request is a new resize"
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


class Contended(Stuck):
    """A fleet of one tier with a real table, which two operators resize at the same time."""

    def __init__(self, slots: int) -> None:
        super().__init__(ResizeReply(slots=slots, was=slots, capacity=slots))
        self.tier = Tier(slots)

    async def ask_instance(
        self, _record: ServiceRecord, verb: str, request: msgspec.Struct, codec: JsonCodec[Reply]
    ) -> Reply:
        """Let the tier take one step; fail after more requests than both need."""
        self.asked += 1
        assert self.asked < 100, "both go on without end"
        await asyncio.sleep(0)
        assert isinstance(request, ResizeRequest)
        reply = self.tier.admin.answer(verb, request, 0)
        if isinstance(reply, ErrorBody):
            raise RequestFailed(reply.code, reply.message, reply.field)
        return codec.decode(msgspec.json.encode(reply))


async def test_two_resizes_in_opposite_directions_end() -> None:
    """Goal: the newest resize is carried out, and the older one says why it was not."""
    slots = 8 * MOVED_MAX
    fleet = Contended(slots)
    fleet.tier.admin.answer("resize", ResizeRequest(slots=7 * MOVED_MAX), 0)

    def work(goal: int) -> Work:
        return resizing(cast(Fleet, fleet), [TIER], "resize", ResizeRequest(slots=goal))

    older, newer = await asyncio.gather(ended(work(100)), ended(work(slots)))
    assert older == {TIER.key: f"superseded: a newer resize wants {slots} slots"}
    assert newer == {}
    assert fleet.tier.table.usable_count == slots


async def test_a_removal_without_progress_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: the same of `evict`, but a tier may look through many blocks before it removes one."""
    monkeypatch.setattr("kvbm_metrics.shell.operations.IDLE_TURNS_MAX", 5)
    fleet = Stuck(RemoveReply(removed=0, kept=4, missing=[], more=True))
    request = RemoveRequest(everything=True, actor="ada")
    errors = await ended(removing(cast(Fleet, fleet), [TIER], "evict", request))
    assert "no_progress" in errors[TIER.key]
    assert fleet.asked == 5


class Feeding(Stuck):
    """A fleet of a host tier, and of a disk tier that is writing the blocks of the host tier."""

    def __init__(self) -> None:
        super().__init__(RemoveReply(removed=0))
        self.host, self.disk, self.in_flight = 3, 0, 0

    async def ask_instance(
        self, record: ServiceRecord, verb: str, request: msgspec.Struct, codec: JsonCodec[Reply]
    ) -> Reply:
        """Empty a tier; what the disk tier was writing is there after its turn."""
        await asyncio.sleep(0)
        if record.kind == "host-tier":
            removed, self.host, self.in_flight = self.host, 0, self.in_flight + self.host
        else:
            self.in_flight += self.host
            removed, self.disk, self.in_flight = self.disk, self.in_flight, 0
        return codec.decode(msgspec.json.encode(RemoveReply(removed=removed)))


async def test_a_reset_empties_a_tier_before_those_below_and_removes_what_arrives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Goal: no block is left that was on its way to the disk when the disk tier was emptied."""
    monkeypatch.setattr("kvbm_metrics.shell.operations.ROUND_PAUSE_S", 0.0)
    fleet = Feeding()
    tiers = [record("disk-tier", host="h"), TIER]
    everything = RemoveRequest(everything=True, actor="ada")
    job = await ended_job(removing(cast(Fleet, fleet), tiers, "reset", everything))
    assert (fleet.host, fleet.disk, fleet.in_flight) == (0, 0, 0)
    assert job.state == "done"
    assert job.progress == {"removed": 6, "arrived": 3, "kept": 0, "missing": 0}


async def test_a_reset_fails_where_a_tier_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: what a tier holds that hangs is not taken for removed. The others are emptied."""
    monkeypatch.setattr("kvbm_metrics.shell.operations.ROUND_PAUSE_S", 0.0)
    fleet = Feeding()
    everything = RemoveRequest(everything=True, actor="ada")
    lost = [record("disk-tier", host="h")]
    work = with_lost(removing(cast(Fleet, fleet), [TIER], "reset", everything), lost)
    job = await ended_job(work)
    assert job.state == "failed"
    assert job.progress["removed"] == 3
    [(key, said)] = job.errors.items()
    assert key == lost[0].key
    assert said.startswith("lost: it went silent, and what it holds is not removed")
    assert "tiers that answer are reset" in said
    assert "`kvbm forget h` leaves it out" in said


async def test_a_reset_under_traffic_ends_and_counts_what_arrives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvbm_metrics.shell.operations.ROUND_PAUSE_S", 0.0)
    monkeypatch.setattr("kvbm_metrics.shell.operations.SETTLE_S", 0.02)
    fleet = Stuck(RemoveReply(removed=1))
    everything = RemoveRequest(everything=True, actor="ada")
    job = await ended_job(removing(cast(Fleet, fleet), [TIER], "reset", everything))
    assert job.state == "done"
    assert job.progress["arrived"] == job.progress["removed"] - 1 > 0


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


class Refusing(Stuck):
    """A fleet of a tier that holds blocks, and refuses a request that finds none of its own."""

    def __init__(self, held: list[str], code: str, times: int, why: str = "SlowDown") -> None:
        super().__init__(RemoveReply(removed=0))
        self.held, self._code, self._times, self._why = set(held), code, times, why

    async def ask_instance(
        self, _record: ServiceRecord, verb: str, request: msgspec.Struct, codec: JsonCodec[Reply]
    ) -> Reply:
        """Remove the blocks; refuse so many times where none is here."""
        await asyncio.sleep(0)
        assert isinstance(request, RemoveRequest)
        found = self.held.intersection(request.hashes or self.held)
        self.held -= found
        if not found and self._times:
            self._times -= 1
            why = self._why.format(self._times)
            raise RequestFailed(self._code, f"blocks may come back: {why}")
        return codec.decode(msgspec.json.encode(RemoveReply(removed=len(found))))


async def test_a_reset_goes_on_with_the_other_parts_where_one_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Goal: of a long list, blocks are left neither here nor in the bucket.

    An earlier reset has removed those of the first part, whose objects wait to be deleted.
    """
    monkeypatch.setattr("kvbm_metrics.shell.operations.ROUND_PAUSE_S", 0.0)
    hashes = [f"{number:032x}" for number in range(3 * STEP_BLOCKS_MAX)]
    fleet = Refusing(hashes[STEP_BLOCKS_MAX:], "store", 1_000)
    request = RemoveRequest(hashes=hashes, actor="ada")
    job = await ended_job(removing(cast(Fleet, fleet), [TIER], "reset", request))
    assert fleet.held == set()
    assert job.progress["removed"] == 2 * STEP_BLOCKS_MAX
    assert job.state == "failed", "the first part may come back"


async def test_a_reset_goes_on_until_the_bucket_has_deleted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Goal: a bucket that says SlowDown now and then is reset; one that goes on so is not."""
    monkeypatch.setattr("kvbm_metrics.shell.operations.ROUND_PAUSE_S", 0.0)
    everything = RemoveRequest(everything=True, actor="ada")
    fleet = Refusing(["a", "b"], "undeleted", 3)
    job = await ended_job(removing(cast(Fleet, fleet), [TIER], "reset", everything))
    assert (job.state, job.errors) == ("done", {})
    assert job.progress["removed"] == 2
    monkeypatch.setattr("kvbm_metrics.shell.operations.SETTLE_S", 0.02)
    fleet = Refusing(["a", "b"], "undeleted", 1_000_000)
    job = await ended_job(removing(cast(Fleet, fleet), [TIER], "reset", everything))
    assert job.state == "failed"
    assert job.errors == {TIER.key: "undeleted: blocks may come back: SlowDown"}


async def test_a_reset_waits_while_a_bucket_deletes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: a bucket of many objects is reset, though it takes longer than one wait."""
    monkeypatch.setattr("kvbm_metrics.shell.operations.ROUND_PAUSE_S", 0.005)
    monkeypatch.setattr("kvbm_metrics.shell.operations.SETTLE_S", 0.1)
    fleet = Refusing(["a", "b"], "undeleted", 60, "{} objects wait")
    everything = RemoveRequest(everything=True, actor="ada")
    job = await ended_job(removing(cast(Fleet, fleet), [TIER], "reset", everything))
    assert (job.state, job.errors) == ("done", {})


class Small(Stuck):
    """A fleet of a host tier with few slots, whose disk has a long run."""

    def __init__(self, slots: int, on_disk: int) -> None:
        super().__init__(RemoveReply(removed=0))
        self.host = Host(slots=slots)
        self.host.disk_stored(*range(1, on_disk + 1))

    async def ask_instance(
        self, _record: ServiceRecord, verb: str, request: msgspec.Struct, codec: JsonCodec[Reply]
    ) -> Reply:
        """Answer as the host tier does."""
        await asyncio.sleep(0)
        assert isinstance(request, PrefetchRequest)
        effects = self.host.step(AdminAsked(1, verb, request))
        answers = of(effects, Answer)
        for fill in of(effects, AskFill):
            answers += of(self.host.filled(fill), Answer)
        return codec.decode(msgspec.json.encode(answers[-1].reply))


@pytest.mark.parametrize(
    ("on_disk", "progress", "errors"),
    [
        (20, {"blocks": 10, "filled": 10},
         {TIER.key: "no_room: 10 of 20 blocks are in host memory"}),
        (8, {"blocks": 8, "filled": 8}, {}),
    ],
    ids=["longer than host memory", "partly on disk"],
)  # fmt: skip
async def test_a_prefetch_keeps_the_beginning_of_its_run(
    on_disk: int,
    progress: dict[str, int],
    errors: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Goal: what the job reports can be used, from the first block of the run on."""
    monkeypatch.setattr("kvbm_metrics.shell.operations.PREFETCH_STEP_BLOCKS", 4)
    fleet = Small(10, on_disk)
    query = PrefetchQuery(hashes=[name(number).hex() for number in range(1, 21)])
    job = await ended_job(prefetching(cast(Fleet, fleet), [TIER], query, "ada"))
    assert (job.progress, job.errors) == (progress, errors)
    assert fleet.host.announced == set(range(1, progress["blocks"] + 1))


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
