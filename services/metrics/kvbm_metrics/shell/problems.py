"""Errors over HTTP: application/problem+json (RFC 9457), with our stable codes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from kvbm_common.errors import KvbmError, RequestFailed
from starlette.exceptions import HTTPException

from kvbm_metrics.core.models import Problem

MEDIA_TYPE = "application/problem+json"
JSON = "application/json"
ERRORS_MAX = 10
"""Fields named in one answer; a body can have a million wrong ones."""

_STATUS_BY_CODE: Mapping[str, HTTPStatus] = {
    "bad_query": HTTPStatus.UNPROCESSABLE_ENTITY,
    "bus_unavailable": HTTPStatus.SERVICE_UNAVAILABLE,
    "no_responder": HTTPStatus.SERVICE_UNAVAILABLE,
    "registry_unavailable": HTTPStatus.SERVICE_UNAVAILABLE,
    "not_ready": HTTPStatus.SERVICE_UNAVAILABLE,
    "busy": HTTPStatus.SERVICE_UNAVAILABLE,
    "deadline_exceeded": HTTPStatus.GATEWAY_TIMEOUT,
    "unauthorized": HTTPStatus.UNAUTHORIZED,
    "forbidden": HTTPStatus.FORBIDDEN,
    "unknown_block": HTTPStatus.NOT_FOUND,
    "unknown_instance": HTTPStatus.NOT_FOUND,
    "unknown_request": HTTPStatus.NOT_FOUND,
    "unknown_job": HTTPStatus.NOT_FOUND,
    "too_many_jobs": HTTPStatus.TOO_MANY_REQUESTS,
    "too_many_feeds": HTTPStatus.SERVICE_UNAVAILABLE,
    "message_too_large": HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    # A peer's answer does not follow the wire. (Its refusal of *our* message is a RequestFailed.)
    "bad_message": HTTPStatus.BAD_GATEWAY,
    "internal": HTTPStatus.BAD_GATEWAY,
}


class BadQuery(KvbmError):
    """A question that contradicts itself; `field` names the part at fault."""

    code = "bad_query"

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


def problem_response(
    status: HTTPStatus, code: str, detail: str, *, errors: Mapping[str, str] | None = None
) -> Response:
    """Return an error as a response; the first key of `errors` is the field at fault."""
    problem = Problem(
        type=f"urn:kvbm:{code}",
        title=status.phrase,
        status=status,
        detail=detail,
        code=code,
        field=next(iter(errors or {}), ""),
        errors=dict(errors or {}),
    )
    return Response(orjson.dumps(problem.model_dump()), status, media_type=MEDIA_TYPE)


def described(*statuses: HTTPStatus) -> dict[int | str, dict[str, Any]]:
    """Return the `responses` of a route for OpenAPI."""
    content = {MEDIA_TYPE: {"schema": Problem.model_json_schema()}}
    return {int(one): {"description": one.phrase, "content": content} for one in statuses}


def install(app: FastAPI) -> None:
    """Make every error of the application a problem."""
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(KvbmError, _on_kvbm)
    app.add_exception_handler(Exception, _on_mistake)


def status_of(error: KvbmError) -> HTTPStatus:
    """Return the status that tells whose fault an error is."""
    if isinstance(error, RequestFailed) and error.code.startswith("bad_"):
        return HTTPStatus.BAD_REQUEST
    return _STATUS_BY_CODE.get(error.code, HTTPStatus.BAD_GATEWAY)


async def _on_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    found: Sequence[dict[str, Any]] = error.errors()[:ERRORS_MAX]
    if any(one["type"] == "json_invalid" for one in found):
        return problem_response(HTTPStatus.BAD_REQUEST, "bad_json", "the body is not JSON")
    errors = {_field_of(one["loc"]): str(one["msg"]) for one in found}
    if any(one["loc"] == ("body",) and one["type"] != "missing" for one in found):
        errors["body"] = _body_fault(request, errors["body"])
    detail = "; ".join(f"{field}: {text}" for field, text in errors.items())
    return problem_response(HTTPStatus.UNPROCESSABLE_ENTITY, "bad_query", detail, errors=errors)


def _body_fault(request: Request, text: str) -> str:
    """Return what is wrong with a whole body: with another type it was not read as JSON at all."""
    sent = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if sent == JSON or (sent.startswith("application/") and sent.endswith("+json")):
        return text
    return f"send JSON with the header Content-Type: {JSON}"


def _field_of(location: Sequence[str | int]) -> str:
    """Format `("body", "tokens", 3)` as `tokens.3`; the body as a whole is `body`."""
    return ".".join(str(part) for part in location[1:]) or str(location[0])


async def _on_http(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    status = HTTPStatus(error.status_code)
    code = status.phrase.lower().replace(" ", "_")
    response = problem_response(status, code, str(error.detail))
    response.headers.update(error.headers or {})
    return response


async def _on_kvbm(_request: Request, error: Exception) -> Response:
    assert isinstance(error, KvbmError)
    status = status_of(error)
    theirs = (
        status < HTTPStatus.INTERNAL_SERVER_ERROR
    )  # A service's bad reply is no field of theirs.
    errors = {error.field: error.text} if error.field and theirs else None
    response = problem_response(status, error.code, error.text, errors=errors)
    if status is HTTPStatus.UNAUTHORIZED:
        response.headers["www-authenticate"] = "Bearer"
    return response


async def _on_mistake(_request: Request, error: Exception) -> Response:
    """Answer an error of our own: the traceback goes to the log, not to a stranger."""
    text = f"{type(error).__name__}, see the log of the metrics service"
    return problem_response(HTTPStatus.INTERNAL_SERVER_ERROR, "internal", text)
