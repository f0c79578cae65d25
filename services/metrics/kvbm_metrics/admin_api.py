"""The routes of operators: a block's story, pins, changes, jobs and the audit stream."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query
from kvbm_common.errors import KvbmError
from kvbm_common.registry import ServiceRecord
from kvbm_common.wire.admin import (
    DrainRequest,
    FilterRequest,
    LogLevelRequest,
    PinRequest,
    PolicyRequest,
    UnpinRequest,
)
from kvbm_common.wire.codec import JsonCodec
from kvbm_common.wire.scores import WhereReply, WhereRequest

from kvbm_metrics import operations, problems
from kvbm_metrics.access import may_change, may_read
from kvbm_metrics.admin_models import (
    AuditEntryView,
    AuditView,
    BlockStoryView,
    ChangeView,
    DrainQuery,
    FilterQuery,
    JobsView,
    JobView,
    LogLevelQuery,
    PinQuery,
    PinsView,
    PolicyQuery,
    PrefetchQuery,
    RemoveQuery,
    ResizeQuery,
    UnpinQuery,
)
from kvbm_metrics.collector import TIER_OF_KIND
from kvbm_metrics.jobs import Job
from kvbm_metrics.models import Hash
from kvbm_metrics.problems import BadQuery
from kvbm_metrics.state import ApiOf

KINDS = ("index", *TIER_OF_KIND, "metrics", "consolidator")

ASKS = problems.described(
    HTTPStatus.UNAUTHORIZED,
    HTTPStatus.NOT_FOUND,
    HTTPStatus.UNPROCESSABLE_ENTITY,
    HTTPStatus.BAD_GATEWAY,
    HTTPStatus.SERVICE_UNAVAILABLE,
    HTTPStatus.GATEWAY_TIMEOUT,
)
CHANGES = problems.described(
    HTTPStatus.BAD_REQUEST,
    HTTPStatus.FORBIDDEN,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    HTTPStatus.TOO_MANY_REQUESTS,
)

questions = APIRouter(prefix="/v1", dependencies=[Depends(may_read)], responses=ASKS)
changes = APIRouter(prefix="/v1", responses=ASKS | CHANGES)
Actor = Annotated[str, Depends(may_change)]
JobId = Annotated[str, Path(pattern="^[0-9a-f]{16}$")]

_where: JsonCodec[WhereReply] = JsonCodec(WhereReply)


class UnknownBlock(KvbmError):
    """Nobody has it, and nobody remembers it."""

    code = "unknown_block"


# --- questions ------------------------------------------------------------------------------


@questions.get("/blocks/{hash}", tags=["blocks"])
async def block(api: ApiOf, hash: Hash) -> BlockStoryView:
    """One block: who has it, who holds it there, and what has happened to it."""
    reply = await api.fleet.ask_index("where", WhereRequest(hashes=[hash]), _where)
    records = [one for one in await api.fleet.records() if one.kind in TIER_OF_KIND]
    story = await operations.block_story(api.fleet, records, reply.blocks[0].holders, hash)
    if story is None:
        raise UnknownBlock(f"nobody has block {hash}, or remembers it")
    return story


@questions.get("/pins", tags=["changes"])
async def pins(api: ApiOf) -> PinsView:
    """Every pin of every tier."""
    records = [one for one in await api.fleet.records() if one.kind in TIER_OF_KIND]
    return await operations.all_pins(api.fleet, records)


@questions.get("/jobs", tags=["jobs"])
async def jobs(api: ApiOf) -> JobsView:
    """The jobs of this metrics service."""
    return JobsView(jobs=[_job_view(job) for job in api.jobs.all()])


@questions.get("/jobs/{job}", tags=["jobs"])
async def job(api: ApiOf, job: JobId) -> JobView:
    """How far a job has come."""
    return _job_view(api.jobs.find(job))


@questions.get("/audit", tags=["changes"])
async def audit(api: ApiOf, last: Annotated[int, Query(ge=1, le=1000)] = 100) -> AuditView:
    """The newest changes that operators have asked for, over HTTP or NATS."""
    entries = [
        AuditEntryView(
            **{name: getattr(one, name) for name in one.__struct_fields__ if name != "v"}
        )
        for one in api.audit.newest(last)
    ]
    return AuditView(entries=entries)


# --- changes --------------------------------------------------------------------------------


@changes.post("/evict", tags=["changes"], status_code=HTTPStatus.ACCEPTED)
async def evict(api: ApiOf, actor: Actor, query: RemoveQuery) -> JobView:
    """Remove blocks that nobody is reading. A job."""
    return await _remove(api, "evict", actor, query)


@changes.post("/reset", tags=["changes"], status_code=HTTPStatus.ACCEPTED)
async def reset(api: ApiOf, actor: Actor, query: RemoveQuery) -> JobView:
    """Remove blocks, also those that are being read: nobody finds them again. A job."""
    return await _remove(api, "reset", actor, query)


async def _remove(api: ApiOf, verb: str, actor: str, query: RemoveQuery) -> JobView:
    given = (query.hashes, query.prefix, query.namespace, query.everything or None)
    if sum(one is not None for one in given) != 1:
        raise BadQuery("hashes", "give exactly one of hashes, prefix, namespace and everything")
    records = await _tiers(api, query.tier, query.host, query.instance)
    work = operations.removing(api.fleet, records, verb, query, actor)
    return _job_view(api.jobs.start(verb, actor, work))


@changes.post("/prefetch", tags=["changes"], status_code=HTTPStatus.ACCEPTED)
async def prefetch(api: ApiOf, actor: Actor, query: PrefetchQuery) -> JobView:
    """Bring a run from disk or bucket into host memory. A job."""
    if (query.hashes is None) == (query.tokens is None):
        raise BadQuery("hashes", "give hashes, or tokens with a namespace")
    if query.tokens is not None and query.namespace is None:
        raise BadQuery("namespace", "tokens need the namespace that they are hashed in")
    records = await _tiers(api, "host", query.host, query.instance)
    work = operations.prefetching(api.fleet, records, query, actor)
    return _job_view(api.jobs.start("prefetch", actor, work))


@changes.post("/pin", tags=["changes"])
async def pin(api: ApiOf, actor: Actor, query: PinQuery) -> ChangeView:
    """Keep blocks from eviction for a while, wherever they are."""
    request = PinRequest(
        hashes=list(dict.fromkeys(query.hashes)), ttl_ms=max(1, round(query.ttl_s * 1000)),
        actor=actor,
    )  # fmt: skip
    records = await _tiers(api, query.tier, query.host, query.instance)
    return ChangeView(outcomes=await operations.change(api.fleet, records, "pin", request))


@changes.post("/unpin", tags=["changes"])
async def unpin(api: ApiOf, actor: Actor, query: UnpinQuery) -> ChangeView:
    """End a pin."""
    records = await _tiers(api, query.tier, query.host, query.instance)
    request = UnpinRequest(pin=query.pin, actor=actor)
    return ChangeView(outcomes=await operations.change(api.fleet, records, "unpin", request))


@changes.post("/drain", tags=["changes"])
async def drain(api: ApiOf, actor: Actor, query: DrainQuery) -> ChangeView:
    """Take no new blocks; what is there is still read."""
    return await _drain(api, "drain", actor, query)


@changes.post("/undrain", tags=["changes"])
async def undrain(api: ApiOf, actor: Actor, query: DrainQuery) -> ChangeView:
    """Take new blocks again."""
    return await _drain(api, "undrain", actor, query)


async def _drain(api: ApiOf, verb: str, actor: str, query: DrainQuery) -> ChangeView:
    records = await _tiers(api, query.tier, query.host, query.instance)
    request = DrainRequest(actor=actor)
    return ChangeView(outcomes=await operations.change(api.fleet, records, verb, request))


@changes.post("/resize", tags=["changes"], status_code=HTTPStatus.ACCEPTED)
async def resize(api: ApiOf, actor: Actor, query: ResizeQuery) -> JobView:
    """Use fewer or more slots of a medium; fewer evicts, in steps. A job."""
    records = await _tiers(api, query.tier, query.host, query.instance)
    work = operations.resizing(api.fleet, records, query, actor)
    return _job_view(api.jobs.start("resize", actor, work))


@changes.post("/policy", tags=["changes"])
async def policy(api: ApiOf, actor: Actor, query: PolicyQuery) -> ChangeView:
    """Change the eviction policy; the contents stay."""
    records = await _tiers(api, query.tier, query.host, query.instance)
    request = PolicyRequest(policy=query.policy, actor=actor)
    return ChangeView(outcomes=await operations.change(api.fleet, records, "policy", request))


@changes.post("/filter", tags=["changes"])
async def set_filter(api: ApiOf, actor: Actor, query: FilterQuery) -> ChangeView:
    """Change the frequency filter of disk and object tiers."""
    if query.enabled is None and query.pass_count is None and query.decay_s is None:
        raise BadQuery("enabled", "give at least one of enabled, pass_count and decay_s")
    kinds = [kind for kind in operations.kinds_of(query.tier) if kind != "host-tier"]
    records = operations.targets(
        await api.fleet.records(), kinds=kinds, host=query.host, instance=query.instance
    )
    request = FilterRequest(
        enabled=query.enabled,
        pass_count=query.pass_count,
        decay_ms=None if query.decay_s is None else round(query.decay_s * 1000),
        actor=actor,
    )
    return ChangeView(outcomes=await operations.change(api.fleet, records, "filter", request))


@changes.post("/log_level", tags=["changes"])
async def log_level(api: ApiOf, actor: Actor, query: LogLevelQuery) -> ChangeView:
    """Change the log level of services, until they end."""
    kinds = KINDS if query.kind is None else (query.kind,)
    records = operations.targets(
        await api.fleet.records(), kinds=kinds, host=query.host, instance=query.instance
    )
    request = LogLevelRequest(level=query.level, actor=actor)
    return ChangeView(outcomes=await operations.change(api.fleet, records, "log_level", request))


@changes.post("/jobs/{job}/cancel", tags=["jobs"])
async def cancel(api: ApiOf, _actor: Actor, job: JobId) -> JobView:
    """Stop a job between two steps; what is done stays done."""
    return _job_view(await api.jobs.cancel(job))


async def _tiers(
    api: ApiOf, tier: str, host: str | None, instance: str | None
) -> list[ServiceRecord]:
    return operations.targets(
        await api.fleet.records(), kinds=operations.kinds_of(tier), host=host, instance=instance
    )


def _job_view(job: Job) -> JobView:
    return JobView(
        id=job.id,
        verb=job.verb,
        actor=job.actor,
        state=job.state,
        started_ms=job.started_ms,
        ended_ms=job.ended_ms,
        progress=job.progress,
        errors=job.errors,
    )
