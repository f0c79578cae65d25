"""Who may do what over HTTP: two roles by bearer token, and no token on loopback.

A page in a browser on this machine can reach loopback, too. So without tokens a change is taken
only from who asks for this machine by a name of it, and not from another site's page.
"""

from __future__ import annotations

import hmac
import ipaddress
from dataclasses import dataclass
from typing import Annotated, Literal
from urllib.parse import urlsplit

from fastapi import Request, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from kvbm_common.errors import KvbmError

Role = Literal["none", "read", "admin"]
RANKS: tuple[Role, ...] = ("none", "read", "admin")
ACTOR_MAX = 64
"""Characters of the name that a client gives itself."""


class Unauthorized(KvbmError):
    """No token, or one that is not ours."""

    code = "unauthorized"


class Forbidden(KvbmError):
    """A token that may read only; or a change that another site's page has asked for."""

    code = "forbidden"


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Which token has which role. An empty one does not exist."""

    read_token: str = ""
    admin_token: str = ""
    without_token: Role = "admin"

    def role_of(self, token: str | None) -> Role | None:
        """Return what a token may do; None: it is not ours."""
        if token is None:
            return self.without_token
        found: Role | None = None
        for role, known in (("read", self.read_token), ("admin", self.admin_token)):
            if known and hmac.compare_digest(known.encode(), token.encode()):
                found = role  # type: ignore[assignment]
        return found


def access_of(*, bind: str, read_token: str, admin_token: str, open_role: Role | None) -> Access:
    """Return the access that the configuration means; `open_role`: what needs no token."""
    role: Role = "admin" if is_loopback(bind) and not (read_token or admin_token) else "none"
    return Access(
        read_token=read_token,
        admin_token=admin_token,
        without_token=role if open_role is None else open_role,
    )


def is_loopback(address: str) -> bool:
    """Return whether only this machine reaches an address."""
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address.strip("[]")).is_loopback
    except ValueError:
        return False


_bearer = HTTPBearer(
    auto_error=False,
    description="KVBM_ADMIN_READ_TOKEN or KVBM_ADMIN_TOKEN; none is needed on loopback by default.",
)
Credentials = Annotated[HTTPAuthorizationCredentials | None, Security(_bearer)]


def may_read(request: Request, credentials: Credentials) -> None:
    """Let a question in; raises Unauthorized, Forbidden."""
    _require("read", request, credentials)


def may_change(request: Request, credentials: Credentials) -> str:
    """Let a change in; returns who wants it, for the audit stream. Raises as `may_read`."""
    _require("admin", request, credentials)
    if credentials is None:
        _check_same_site(request)
    name = request.headers.get("kvbm-actor", "")[:ACTOR_MAX] or "admin"
    printable = "".join(letter if letter.isprintable() else "?" for letter in name)
    client = request.client.host if request.client is not None else "unknown"
    return f"{printable} over HTTP from {client}"


def _require(
    role: Role, request: Request, credentials: HTTPAuthorizationCredentials | None
) -> None:
    access = request.app.state.api.access
    assert isinstance(access, Access)
    if credentials is None and request.headers.get("authorization"):
        raise Unauthorized("the scheme is Bearer")
    has = access.role_of(credentials.credentials if credentials is not None else None)
    if has is None:
        raise Unauthorized("this token is not known here")
    if RANKS.index(has) >= RANKS.index(role):
        return
    if credentials is None:
        raise Unauthorized(
            f"this needs a bearer token with the role {role}: KVBM_ADMIN_TOKEN, "
            "or KVBM_ADMIN_READ_TOKEN for questions"
        )
    raise Forbidden("this token may read only")


def _check_same_site(request: Request) -> None:
    host = _host_of(f"//{request.headers.get('host', '')}")
    if not is_loopback(host):
        raise Forbidden(f"a change without a token is for localhost, not for {host or 'no host'}")
    origin = request.headers.get("origin")
    if origin is not None and not is_loopback(_host_of(origin)):
        raise Forbidden("a page of another site has asked for this")


def _host_of(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""
