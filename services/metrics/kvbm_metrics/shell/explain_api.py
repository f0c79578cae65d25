"""Explain API: routes that say why requests missed, by asking every host tier."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query
from kvbm_common.errors import DeadlineExceeded, KvbmError
from kvbm_common.registry.records import ServiceRecord
from kvbm_common.tier.reasons import MEANINGS
from kvbm_common.wire.explain import (
    LIST_MAX,
    REQUEST_CHARS_MAX,
    ExplainListRequest,
    ExplainRequest,
    Explanation,
    explain_list_reply,
    explain_reply,
)

from kvbm_metrics.core.admin_models import InstanceView
from kvbm_metrics.core.explain_models import (
    ExplainedView,
    ExplainListView,
    ExplainView,
    explained_view,
    explanation_view,
)
from kvbm_metrics.shell import operations
from kvbm_metrics.shell.access import may_read
from kvbm_metrics.shell.admin_api import ASKS
from kvbm_metrics.shell.fleet import OPERATOR_DEADLINE_S, Fleet
from kvbm_metrics.shell.problems import BadQuery
from kvbm_metrics.shell.state import Api, ApiOf

STEPS_MAX = 32
"""A tier looks through 4,096 kept requests per question; so many questions see them all."""

router = APIRouter(prefix="/v1", dependencies=[Depends(may_read)], responses=ASKS)

Token = Annotated[str, Query(pattern="^[A-Za-z0-9_-]{1,64}$")]
HOST_TIERS = ("host-tier",)
"""The kind of service that keeps explanations."""


class UnknownRequest(KvbmError):
    """No host tier has kept it."""

    code = "unknown_request"


@router.get("/explain", tags=["explain"])
async def explain_list(
    api: ApiOf,
    reason: Token | None = None,
    engine: Token | None = None,
    missed: bool = False,
    limit: Annotated[int, Query(ge=1, le=LIST_MAX)] = 100,
) -> ExplainListView:
    """Return the latest lookups of all engines, newest first.

    `reason` is that of the first miss. One that this release does not know must be in an answer.
    """
    request = ExplainListRequest(
        limit=limit, reason=reason or "", engine=engine or "", missed=missed
    )
    tiers, lost = await api.fleet.to_ask(HOST_TIERS)
    silent: list[str] = []

    async def of(record: ServiceRecord) -> list[ExplainedView]:
        """Ask one tier; all of them have the same deadline, however many questions it takes."""
        try:
            async with asyncio.timeout(OPERATOR_DEADLINE_S):
                listed = await _listed(api.fleet, record, request)
        except (KvbmError, TimeoutError) as error:
            code = error.code if isinstance(error, KvbmError) else DeadlineExceeded.code
            silent.append(f"{record.key}: {code}")
            return []
        return [explained_view(one, _where(record)) for one in listed]

    views = await asyncio.gather(*map(of, tiers))
    found = [one for listed in views for one in listed]
    # A newer tier's own is found, unless that tier is silent. One may be lost for long.
    if reason and reason not in MEANINGS and not found and not silent:
        raise BadQuery("reason", f"no such reason: {reason}; there are {', '.join(MEANINGS)}")
    found.sort(key=lambda one: one.ts_ms, reverse=True)  # Stable: a tier's own order stays.
    return ExplainListView(requests=found[:limit], silent=sorted(silent + lost))


@router.get("/explanation", tags=["explain"])
async def explanation(api: ApiOf, request: Annotated[str, Query(min_length=1)]) -> ExplainView:
    """Return every kept lookup of a request: where blocks came from, and why others did not.

    `request` is any id that an engine takes, line ends and dots included.
    """
    return await _explained(api, request)


@router.get("/explain/{request_id:path}", tags=["explain"])
async def explain(api: ApiOf, request_id: Annotated[str, Path(min_length=1)]) -> ExplainView:
    """Return what `/v1/explanation` does, for ids that can be part of an address."""
    return await _explained(api, request_id)


async def _explained(api: Api, request_id: str) -> ExplainView:
    request_id = request_id[:REQUEST_CHARS_MAX]  # As it is kept.
    tiers, lost = await api.fleet.to_ask(HOST_TIERS)
    asked = ExplainRequest(request=request_id)
    answers, silent = await operations.ask_all(api.fleet, tiers, "explain", asked, explain_reply)
    silent += lost
    lookups = [
        explanation_view(one, _where(record))
        for record, reply in answers
        for one in reply.requests
    ]  # fmt: skip
    if not lookups and not silent:
        raise UnknownRequest(f"no host tier has kept request {request_id}")
    lookups.sort(key=lambda one: one.ts_ms, reverse=True)
    return ExplainView(request_id=request_id, lookups=lookups, silent=silent)


async def _listed(
    fleet: Fleet, record: ServiceRecord, request: ExplainListRequest
) -> list[Explanation]:
    """Return as many lookups of a host tier as are wanted, or all that there are."""
    found: list[Explanation] = []
    before = 0
    for _ in range(STEPS_MAX):
        step = ExplainListRequest(
            limit=request.limit - len(found),
            reason=request.reason,
            engine=request.engine,
            missed=request.missed,
            before=before,
        )
        reply = await fleet.ask_instance(record, "explain_list", step, explain_list_reply)
        found += reply.requests
        before = reply.next
        if not before or len(found) >= request.limit:
            break
    return found


def _where(record: ServiceRecord) -> InstanceView:
    return InstanceView(kind=record.kind, host=record.host, instance=record.instance)
