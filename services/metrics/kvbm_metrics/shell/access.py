"""Access to the routes: by a bearer token of a role (`kvbm_common.access.http_access`).

A page in a browser on this machine can reach loopback, too. So where a change needs no token it is
taken only if this machine is asked for by a name of it, and not from another site's page. A
question without a token is answered unless the name may be one of another site, which is pointed
here: such a page could read the answer.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import Request, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from kvbm_common.access.addresses import host_of, is_loopback
from kvbm_common.access.http_access import Access, Role
from kvbm_common.errors import KvbmError

ACTOR_MAX = 64
"""Characters of the name that a client gives itself."""


class Unauthorized(KvbmError):
    """No token, or one that is not ours."""

    code = "unauthorized"


class Forbidden(KvbmError):
    """A token that may read only; or what another site's page may have asked for."""

    code = "forbidden"


_bearer = HTTPBearer(
    auto_error=False,
    description="The token of a role: admin, read, scrape. `kvbm creds admin-token` names a file.",
)
Credentials = Annotated[HTTPAuthorizationCredentials | None, Security(_bearer)]


def may_scrape(request: Request, credentials: Credentials) -> None:
    """Let a question for figures in; raises as `may_read`."""
    _require("scrape", request, credentials)
    _check_name("scrape", request, credentials)


def may_know_why(request: Request, credentials: Credentials) -> bool:
    """Tell whether a request may be told more than that the system is not ready."""
    token = credentials.credentials if credentials is not None else None
    return _access_of(request).may_by("scrape", token, _asked(request))


def may_read(request: Request, credentials: Credentials) -> None:
    """Let a question in; raises Unauthorized, Forbidden."""
    _require("read", request, credentials)
    _check_name("read", request, credentials)


def may_change(request: Request, credentials: Credentials) -> str:
    """Let a change in; returns who wants it, for the audit stream. Raises as `may_read`."""
    _require("admin", request, credentials)
    if credentials is None:
        _check_same_site(request)
    name = request.headers.get("kvbm-actor", "")[:ACTOR_MAX] or "admin"
    printable = "".join(letter if letter.isprintable() else "?" for letter in name)
    client = request.client.host if request.client is not None else "unknown"
    return f"{printable} over HTTP from {client}"


def _access_of(request: Request) -> Access:
    access = request.app.state.api.access
    assert isinstance(access, Access)
    return access


def _require(
    role: Role, request: Request, credentials: HTTPAuthorizationCredentials | None
) -> None:
    access = _access_of(request)
    if credentials is None and request.headers.get("authorization"):
        raise Unauthorized("the scheme is Bearer")
    token = credentials.credentials if credentials is not None else None
    if access.may(role, token):
        return
    if token is None:
        raise Unauthorized(
            f"this needs a bearer token of the role {role}: KVBM_ADMIN_TOKEN_FILE names one, or "
            "`kvbm creds admin-token`"
        )
    if access.role_of(token) is None:
        raise Unauthorized("this token is not known here")
    raise Forbidden(f"this token may {access.role_of(token)} only")


def _asked(request: Request) -> str:
    """Return the name by which this port was asked for."""
    return host_of(f"//{request.headers.get('host', '')}")


def _check_name(
    role: Role, request: Request, credentials: HTTPAuthorizationCredentials | None
) -> None:
    token = credentials.credentials if credentials is not None else None
    if not _access_of(request).may_by(role, token, _asked(request)):
        raise Forbidden(
            f"without a token ask by an address, or by a name within this network: "
            f"{_asked(request)} may be another site's"
        )


def _check_same_site(request: Request) -> None:
    host = _asked(request)
    if not is_loopback(host):
        raise Forbidden(f"a change without a token is for localhost, not for {host or 'no host'}")
    origin = request.headers.get("origin")
    if origin is not None and not is_loopback(host_of(origin)):
        raise Forbidden("a page of another site has asked for this")
