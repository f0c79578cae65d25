"""Admin API: a route for each verb of the operators' table, for jobs, and the audit stream."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query
from kvbm_common.errors import KvbmError
from kvbm_common.nats.block_names import names_with
from kvbm_common.wire.codec import JsonCodec
from kvbm_common.wire.operator_verbs import OPERATOR_VERBS, OperatorVerb
from kvbm_common.wire.scores import WhereReply, WhereRequest
from msgspec.structs import asdict
from pydantic import BaseModel

from kvbm_metrics.core.admin_models import (
    AuditEntryView,
    AuditView,
    BlockStoryView,
    ChangeView,
    JobsView,
    JobView,
    NamesView,
    PinsView,
    PrefetchQuery,
)
from kvbm_metrics.core.bodies import BODIES, contradiction, request_of
from kvbm_metrics.core.collector import TIER_OF_KIND
from kvbm_metrics.core.query_models import Hash
from kvbm_metrics.shell import operations, problems
from kvbm_metrics.shell.access import may_change, may_read
from kvbm_metrics.shell.jobs import Job
from kvbm_metrics.shell.problems import BadQuery
from kvbm_metrics.shell.state import ApiOf

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
Endpoint = Callable[..., Awaitable[Any]]
HashPrefix = Annotated[str, Query(pattern="^[0-9a-f]{4,32}$", max_length=32)]
JobId = Annotated[str, Path(pattern="^[0-9a-f]{16}$")]

_where: JsonCodec[WhereReply] = JsonCodec(WhereReply)


class UnknownBlock(KvbmError):
    """No tier has the block, and none remembers it."""

    code = "unknown_block"


# --- questions ------------------------------------------------------------------------------


async def block(api: ApiOf, hash: Hash) -> BlockStoryView:
    """Return the story of one block: its tiers, its holders there, and what happened to it."""
    reply = await api.fleet.ask_index("where", WhereRequest(hashes=[hash]), _where)
    records = [one for one in await api.fleet.records() if one.kind in TIER_OF_KIND]
    story = await operations.block_story(api.fleet, records, reply.blocks[0].holders, hash)
    if story is None:
        raise UnknownBlock(f"no tier has block {hash}, or remembers it")
    return story


async def pins(api: ApiOf) -> PinsView:
    """Return every pin of every tier."""
    records, lost = await api.fleet.to_ask(TIER_OF_KIND)
    found = await operations.all_pins(api.fleet, records)
    return PinsView(pins=found.pins, silent=[*found.silent, *lost])


@questions.get("/jobs", tags=["jobs"])
async def jobs(api: ApiOf) -> JobsView:
    """Return the jobs of this metrics service."""
    return JobsView(jobs=[_job_view(job) for job in api.jobs.all()])


@questions.get("/jobs/{job}", tags=["jobs"])
async def job(api: ApiOf, job: JobId) -> JobView:
    """Return how far a job has come."""
    return _job_view(api.jobs.find(job))


@questions.get("/audit", tags=["changes"])
async def audit(api: ApiOf, last: Annotated[int, Query(ge=1, le=1000)] = 100) -> AuditView:
    """Return the newest changes that operators have asked for, over HTTP or NATS."""
    return AuditView(entries=[AuditEntryView(**asdict(one)) for one in api.audit.newest(last)])


@questions.get("/blocks", tags=["blocks"])
async def blocks(api: ApiOf, prefix: HashPrefix) -> NamesView:
    """Return the names of blocks that begin with these digits, the first 16 of them."""
    return NamesView(hashes=await names_with(api.fleet.ask_index_raw, prefix))


# --- changes --------------------------------------------------------------------------------


@changes.post("/jobs/{job}/cancel", tags=["jobs"])
async def cancel(api: ApiOf, _actor: Actor, job: JobId) -> JobView:
    """Stop a job when the step under way has its answer; what is done stays done."""
    return _job_view(await api.jobs.cancel(job))


async def prefetch(api: ApiOf, actor: Actor, query: PrefetchQuery) -> JobView:
    """Ask the host tiers step by step."""
    if (query.hashes is None) == (query.tokens is None):
        raise BadQuery("hashes", "give hashes, or tokens with a namespace")
    if query.tokens is not None and query.namespace is None:
        raise BadQuery("namespace", "tokens need the namespace that they are hashed in")
    records = operations.targets(
        await api.fleet.records(), kinds=["host-tier"], host=query.host, instance=query.instance
    )
    work = operations.prefetching(api.fleet, records, query, actor)
    return _job_view(api.jobs.start("prefetch", actor, work))


def _change(verb: OperatorVerb) -> Endpoint:
    """Return what answers the route of a verb: all instances that are meant are asked."""

    async def change(api: ApiOf, actor: Actor, query: BaseModel) -> ChangeView | JobView:
        given = dict(query)
        if wrong := contradiction(verb, given):
            raise BadQuery(*wrong)
        registered, silent = await api.fleet.records_and_lost()
        where = {"host": given.get("host"), "instance": given.get("instance")}
        kinds = operations.kinds_of(verb, given)
        may_return = (silent, api.fleet.restarting()) if verb.name == "reset" else ([], [])
        lost, left = (operations.meant(one, kinds=kinds, **where) for one in may_return)
        found = operations.meant if lost or left else operations.targets
        records = found(registered, kinds=kinds, **where)
        request = request_of(verb, given, actor)
        if verb.job:
            work = operations.WORK[verb.name](api.fleet, records, verb.name, request)
            work = operations.with_lost(work, lost, left)
            return _job_view(api.jobs.start(verb.name, actor, work))
        outcomes = await operations.change(api.fleet, records, verb.name, request)
        return ChangeView(outcomes=outcomes)

    annotations = {"query": BODIES[verb.request], "return": JobView if verb.job else ChangeView}
    change.__annotations__.update(annotations)
    return change


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


# --- the table ------------------------------------------------------------------------------

BY_HAND: Mapping[str, Endpoint] = {"block": block, "pins": pins, "prefetch": prefetch}
"""Routes that do more than to ask every instance that is meant."""


def _add_route(verb: OperatorVerb) -> None:
    endpoint = BY_HAND.get(verb.name) or _change(verb)
    (changes if verb.is_change else questions).add_api_route(
        verb.route.removeprefix("/v1"),
        endpoint,
        methods=[verb.method],
        name=verb.name,
        description=verb.description,
        tags=[verb.tag],
        status_code=HTTPStatus.ACCEPTED if verb.job else HTTPStatus.OK,
    )


for _verb in OPERATOR_VERBS:
    _add_route(_verb)
