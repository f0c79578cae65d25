"""The HTTP API: routes, and nothing behind them that decides."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Annotated, Any

import msgspec
import orjson
from fastapi import APIRouter, Depends, FastAPI, Query, Response
from kvbm_common.access.http_access import HIDDEN
from kvbm_common.runtime.metrics import Metrics
from kvbm_common.wire.codec import JsonCodec
from kvbm_common.wire.index_verbs import DumpRequest, MatchReply
from kvbm_common.wire.routes import RouteReply
from kvbm_common.wire.scores import (
    HoldersReply,
    MatchBatchReply,
    ScoreReply,
    WhereReply,
    WhereRequest,
)
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from kvbm_metrics import pages
from kvbm_metrics.core import collector, kvbm_totals
from kvbm_metrics.core.bounds import BoundsOf, bounds_view
from kvbm_metrics.core.fleet_view import FleetView
from kvbm_metrics.core.history import POINTS, SPACING_S
from kvbm_metrics.core.models import (
    HealthView,
    HoldersView,
    MatchBatchView,
    MatchView,
    ReadyView,
    ScoreView,
    ServiceView,
    StatusView,
    TierView,
    WhereView,
    WorkerView,
)
from kvbm_metrics.core.query_models import MatchBatchQuery, MatchQuery, ScoreQuery, WhereQuery
from kvbm_metrics.core.rates import WINDOW_S
from kvbm_metrics.core.recent_models import HistoryView
from kvbm_metrics.core.route_models import RouteQuery, RouteView
from kvbm_metrics.shell import admin_api, event_feed, explain_api, exposition, problems
from kvbm_metrics.shell.access import may_know_why, may_read, may_scrape
from kvbm_metrics.shell.admission import Door
from kvbm_metrics.shell.problems import BadQuery
from kvbm_metrics.shell.state import Api, ApiOf

UNAVAILABLE = HTTPStatus.SERVICE_UNAVAILABLE
MAYBE_A_TOKEN: dict[str, Any] = {"security": [{}]}
"""Adds to the document that a token is not always needed."""


def create_app(api: Api, counters: Metrics) -> FastAPI:
    """Create the application; `counters` get a count of the requests."""
    app = FastAPI(
        title="KVBM",
        version=api.version,
        summary="Admin API and metrics of the KV-cache block manager.",
        docs_url=None,  # FastAPI's own page loads its scripts from elsewhere.
        redoc_url=None,
        default_response_class=OrjsonResponse,
    )
    app.state.api = api
    for part in (
        health,
        router,
        admin_api.questions,
        admin_api.changes,
        explain_api.router,
        event_feed.router,
        pages.router,
    ):
        app.include_router(part)
    app.add_middleware(Door, counters=counters)
    problems.install(app)
    return app


async def _view(api: ApiOf) -> FleetView:
    return await api.fleet.view()


View = Annotated[FleetView, Depends(_view)]

Host = Annotated[str, Query(pattern="^[A-Za-z0-9_-]{0,64}$")]
OF_A_HOST = problems.described(HTTPStatus.UNPROCESSABLE_ENTITY)
"""The errors of routes that name a host."""

health = APIRouter()
"""Routes for probes, without a token also from afar, and for Prometheus, with one."""
router = APIRouter(
    dependencies=[Depends(may_read)], responses=problems.described(HTTPStatus.UNAUTHORIZED)
)

_match_reply: JsonCodec[MatchReply] = JsonCodec(MatchReply)
_batch_reply: JsonCodec[MatchBatchReply] = JsonCodec(MatchBatchReply)
_score_reply: JsonCodec[ScoreReply] = JsonCodec(ScoreReply)
_route_reply: JsonCodec[RouteReply] = JsonCodec(RouteReply)
_where_reply: JsonCodec[WhereReply] = JsonCodec(WhereReply)
_holders_reply: JsonCodec[HoldersReply] = JsonCodec(HoldersReply)


@health.get("/healthz", tags=["health"])
async def healthz() -> HealthView:
    """Answer that the process lives."""
    return HealthView()


@health.get(
    "/readyz",
    tags=["health"],
    responses={UNAVAILABLE: {"model": ReadyView, "description": "No."}},
    openapi_extra=MAYBE_A_TOKEN,
)
async def readyz(
    api: ApiOf, view: View, response: Response, told: Annotated[bool, Depends(may_know_why)]
) -> ReadyView:
    """Check that NATS, the registry and every expected service are there and ready; 503 if not."""
    reasons = collector.unready_reasons(view, api.expected)
    if reasons:
        response.status_code = UNAVAILABLE
    return ReadyView(ready=not reasons, reasons=reasons if told or not reasons else [HIDDEN])


@health.get(
    "/metrics",
    tags=["metrics"],
    dependencies=[Depends(may_scrape)],
    openapi_extra=MAYBE_A_TOKEN,
    response_class=Response,
    responses={
        200: {"description": "Prometheus text.", "content": {"text/plain": {}}},
        **problems.described(HTTPStatus.NOT_FOUND, HTTPStatus.UNAUTHORIZED),
    },
)
async def metrics(api: ApiOf, view: View) -> Response:
    """Return everything that all services count; 404 when DYN_KVBM_METRICS is false."""
    if not api.expose_metrics:
        raise HTTPException(HTTPStatus.NOT_FOUND, "DYN_KVBM_METRICS is false")
    values = kvbm_totals.kvbm_view(view, api.fleet.totals)
    text = await asyncio.to_thread(exposition.render, view, values, version=api.version)
    return Response(text, headers={"content-type": exposition.CONTENT_TYPE})


@router.get("/v1/status", tags=["status"], responses=OF_A_HOST)
async def status(api: ApiOf, view: View, host: Host = "") -> StatusView:
    """Return the state of the whole system at a glance, or of the tiers and engines of a host."""
    return collector.status_view(
        view,
        api.fleet.totals,
        api.fleet.rates,
        expected=api.expected,
        version=api.version,
        gone=api.fleet.gone(),
        host=host,
    )


@router.get("/v1/history", tags=["status"], responses=OF_A_HOST)
async def history(api: ApiOf, host: Host = "") -> HistoryView:
    """Return what engines asked for and found in the last hour, over all hosts or on one."""
    return HistoryView(
        host=host,
        spacing_s=SPACING_S,
        window_s=WINDOW_S,
        points_max=POINTS,
        points=api.fleet.history(host),
    )


@router.get("/v1/services", tags=["status"])
async def services(view: View) -> list[ServiceView]:
    """Return every registered instance; one that does not answer has `up` false."""
    return collector.service_views(view)


@router.get("/v1/bounds", tags=["status"])
async def bounds(view: View) -> list[BoundsOf]:
    """Return how full each queue, table and history of every instance is, and what it dropped."""
    return bounds_view(view)


@router.get("/v1/tiers", tags=["status"])
async def tiers(api: ApiOf, view: View) -> list[TierView]:
    """Return slots, bytes, occupancy, policy, rates and counters of every tier instance."""
    return collector.tier_views(view, api.fleet.rates)


@router.get("/v1/workers", tags=["status"])
async def workers(view: View) -> list[WorkerView]:
    """Return every engine worker that is attached to a host tier, and engines that pass through."""
    return collector.worker_views(view)


ASKS_INDEX = problems.described(
    HTTPStatus.BAD_REQUEST,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    HTTPStatus.UNPROCESSABLE_ENTITY,
    HTTPStatus.BAD_GATEWAY,
    UNAVAILABLE,
    HTTPStatus.GATEWAY_TIMEOUT,
)
"""The errors of routes that ask the index."""
OF_INDEX: dict[str, Any] = {"responses": ASKS_INDEX, "response_model_exclude_unset": True}
"""Options of routes that the index answers: fields that it leaves out are left out here, too."""


@router.post("/v1/match", tags=["blocks"], **OF_INDEX)
async def match(api: ApiOf, query: MatchQuery) -> MatchView:
    """Return the longest prefix that each holder has without a hole."""
    _check(query)
    reply = await api.fleet.ask_index("match", query.to_request(), _match_reply)
    return MatchView.model_validate(msgspec.to_builtins(reply))


@router.post(
    "/v1/match_batch", tags=["blocks"], responses=ASKS_INDEX, response_model_exclude_unset=True
)
async def match_batch(api: ApiOf, query: MatchBatchQuery) -> MatchBatchView:
    """Answer several matches in one request."""
    for question in query.questions:
        _check(question)
    reply = await api.fleet.ask_index("match_batch", query.to_request(), _batch_reply)
    return MatchBatchView.model_validate(msgspec.to_builtins(reply))


@router.post("/v1/score", tags=["blocks"], **OF_INDEX)
async def score(api: ApiOf, query: ScoreQuery) -> ScoreView:
    """Return what a prompt is worth on every rank of every engine, over all tiers it can reach."""
    _check(query)
    reply = await api.fleet.ask_index("score", query.to_score_request(), _score_reply)
    return ScoreView.model_validate(msgspec.to_builtins(reply))


@router.post("/v1/route", tags=["blocks"], **OF_INDEX)
async def route(api: ApiOf, query: RouteQuery) -> RouteView:
    """Return which engine should take a prompt, the best first, by overlap and load."""
    _check(query)
    reply = await api.fleet.ask_index("route", query.to_route_request(), _route_reply)
    return RouteView.model_validate(msgspec.to_builtins(reply))


@router.post("/v1/where", tags=["blocks"], **OF_INDEX)
async def where(api: ApiOf, query: WhereQuery) -> WhereView:
    """Return which holders have each of some blocks."""
    reply = await api.fleet.ask_index("where", WhereRequest(hashes=query.hashes), _where_reply)
    return WhereView.model_validate(msgspec.to_builtins(reply))


@router.get("/v1/holders", tags=["blocks"], **OF_INDEX)
async def holders(
    api: ApiOf, source: Annotated[str | None, Query(pattern="^[A-Za-z0-9_-]{1,64}$")] = None
) -> HoldersView:
    """Return how many blocks every holder has (of one source), and the position this stands for."""
    reply = await api.fleet.ask_index("holders", DumpRequest(source=source), _holders_reply)
    return HoldersView.model_validate(msgspec.to_builtins(reply))


def _check(query: MatchQuery) -> None:
    """Check what the types cannot express; raises BadQuery."""
    if query.hashes is None and query.tokens is None:
        raise BadQuery("hashes", "give hashes, or tokens with a namespace")
    if query.hashes is not None and query.tokens is not None:
        raise BadQuery("tokens", "give either hashes or tokens")
    if query.tokens is not None and query.namespace is None:
        raise BadQuery("namespace", "tokens need the namespace that they are hashed in")
    if query.tokens is None and (query.salt or query.lora):
        field = "salt" if query.salt else "lora"
        raise BadQuery(field, "hashes have the salt and the LoRA in them already")


class OrjsonResponse(JSONResponse):
    """The response of a route, checked by pydantic. FastAPI deprecates its own class for this."""

    def render(self, content: Any) -> bytes:
        """Return the body as JSON."""
        return orjson.dumps(content)
