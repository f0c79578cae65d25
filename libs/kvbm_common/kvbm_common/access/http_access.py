"""Access over HTTP: three roles by bearer token, and the routes that need none.

    scrape    `/metrics`, and why a service is not ready
    read      also every question of the admin API
    admin     also every change

Whether a process lives, and whether it is ready, needs no token: probes have none. On loopback
figures need none either, but for a name that another site's page may have. A token is in a file,
which is read again when it changes.
"""

from __future__ import annotations

import hmac
import logging
import re
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, cast

from kvbm_common.access.addresses import is_loopback, may_be_rebound
from kvbm_common.access.secret_files import (
    SecretFile,
    SecretUnreadable,
    is_kept_private,
    write_secret,
)
from kvbm_common.config.schema import SECRET_TOKEN
from kvbm_common.config.settings import Settings
from kvbm_common.errors import ConfigError
from kvbm_common.runtime.logs import OncePerKind

Role = Literal["none", "scrape", "read", "admin"]
RANKS: tuple[Role, ...] = ("none", "scrape", "read", "admin")
TOKEN_BYTES = 32
HIDDEN = "the reasons need a token (KVBM_SCRAPE_TOKEN_FILE)"
"""Stands for the reasons of `/readyz`, which name hosts and addresses."""
ADMIN_TOKEN = "admin.token"
"""The file in the directory of credentials that the metrics service makes."""

_log = OncePerKind(logging.getLogger(__name__))


@dataclass(frozen=True, slots=True)
class Token:
    """The token of one role: a text, or what is in a file now."""

    role: Role
    text: str = field(default="", repr=False)
    file: SecretFile | None = None

    def is_same(self, given: str) -> bool:
        """Tell whether this token was given; a file that cannot be read has none."""
        known = self.text
        if self.file is not None:
            try:
                known = _checked(self.file)
            except SecretUnreadable as error:
                _log.warning("token", f"{error}: the role {self.role} has no token")
                return False
        return hmac.compare_digest(known.encode(), given.encode())


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """The tokens, and the role of each."""

    tokens: tuple[Token, ...] = ()
    without_token: Role = "none"
    scraped_by_any_name: bool = False
    """True: figures without a token are for names that can be rebound, too."""

    def role_of(self, token: str | None) -> Role | None:
        """Return what a token may do; None: it is not ours."""
        if token is None:
            return self.without_token
        found = [one.role for one in self.tokens if one.is_same(token)]
        return max(found, key=RANKS.index) if found else None

    def may(self, role: Role, token: str | None) -> bool:
        """Tell whether a token, or none, is good for a role."""
        has = self.role_of(token)
        return has is not None and RANKS.index(has) >= RANKS.index(role)

    def may_by(self, role: Role, token: str | None, name: str) -> bool:
        """Tell likewise of a request that is addressed to a name.

        Without a token a page of another site could ask, whose name is pointed at this port.
        """
        is_declared = role == "scrape" and self.scraped_by_any_name
        is_ours = token is not None or is_declared or not may_be_rebound(name)
        return is_ours and self.may(role, token)


def bearer_of(header: str) -> str | None:
    """Return the token of an Authorization header; None: it has no other one than ours could be.

    >>> bearer_of("Bearer abc"), bearer_of(""), bearer_of("Basic YTpi")
    ('abc', None, '')
    """
    if not header:
        return None
    found = re.fullmatch(r"bearer +(\S+)", header.strip(), re.IGNORECASE)
    return found[1] if found else ""


def service_access(settings: Settings) -> Access:
    """Return the access to a service's own port; raises ConfigError for one that would be open."""
    bind = settings.service_bind
    is_open = is_loopback(bind) or settings.metrics_open
    if not (is_open or settings.scrape_token_file):
        accepted = (
            "an address of loopback; another one with KVBM_SCRAPE_TOKEN_FILE, or with "
            "KVBM_METRICS_OPEN=true where the network is KVBM's alone"
        )
        raise ConfigError("KVBM_SERVICE_BIND", bind, accepted)
    return Access(
        tokens=_scrape(settings),
        without_token="scrape" if is_open else "none",
        scraped_by_any_name=settings.metrics_open and not is_loopback(bind),
    )


def refuse_open_api(settings: Settings) -> None:
    """Raise ConfigError for an HTTP API on another address than loopback without a token."""
    if is_loopback(settings.metrics_bind) or settings.admin_open or _configured(settings):
        return
    accepted = (
        "an address of loopback; another one with KVBM_ADMIN_TOKEN_FILE, or with "
        "KVBM_ADMIN_OPEN, which says what needs no token"
    )
    raise ConfigError("KVBM_METRICS_BIND", settings.metrics_bind, accepted)


def api_access(settings: Settings) -> Access:
    """Return the access to the HTTP API; raises ConfigError for one that would be open.

    Where no token is configured, one is made in the directory of credentials.
    """
    refuse_open_api(settings)
    bind = settings.metrics_bind
    tokens = _configured(settings)
    chosen = settings.admin_open
    if not tokens and not chosen:
        tokens = (Token("admin", file=_made(settings.creds_dir / ADMIN_TOKEN)),)
    for token in tokens:
        _check(token)
    health = "scrape" if is_loopback(bind) or settings.metrics_open else "none"
    open_role = max(cast(Role, chosen or "none"), cast(Role, health), key=RANKS.index)
    return Access(
        tokens=(*tokens, *_scrape(settings)),
        without_token=open_role,
        scraped_by_any_name=settings.metrics_open and not is_loopback(bind),
    )


def admin_token_of(settings: Settings) -> SecretFile | None:
    """Return the file with the admin token that this machine's metrics service has made, if any."""
    made = settings.creds_dir / ADMIN_TOKEN
    return SecretFile(made, "KVBM_CREDS_DIR") if made.is_file() else None


def _configured(settings: Settings) -> tuple[Token, ...]:
    given = (
        ("admin", settings.admin_token, settings.admin_token_file, "KVBM_ADMIN_TOKEN_FILE"),
        ("read", settings.admin_read_token, settings.admin_read_token_file,
         "KVBM_ADMIN_READ_TOKEN_FILE"),
    )  # fmt: skip
    return tuple(
        Token(cast(Role, role), text=text, file=SecretFile(path, variable) if path else None)
        for role, text, path, variable in given
        if text or path
    )


def _scrape(settings: Settings) -> tuple[Token, ...]:
    path = settings.scrape_token_file
    if path is None:
        return ()
    token = Token("scrape", file=SecretFile(path, "KVBM_SCRAPE_TOKEN_FILE"))
    _check(token)
    return (token,)


def _made(path: Path) -> SecretFile:
    """Return the file of a token, which is made if it is not there; raises ConfigError."""
    try:
        if not is_kept_private(path):
            write_secret(path, secrets.token_urlsafe(TOKEN_BYTES) + "\n")
    except OSError as error:
        accepted = f"a directory in which a token can be made ({error.strerror})"
        raise ConfigError("KVBM_CREDS_DIR", path.parent, accepted) from error
    return SecretFile(path, "KVBM_CREDS_DIR")


def _check(token: Token) -> None:
    """Raise ConfigError for a file without a token."""
    if token.file is None:
        return
    try:
        _checked(token.file)
    except SecretUnreadable as error:
        raise ConfigError("a token's file", token.file.path, str(error)) from error


def _checked(file: SecretFile) -> str:
    text = file.text()
    try:
        SECRET_TOKEN.parse(text)
    except ValueError:
        raise SecretUnreadable(f"{file.path} has no token: {SECRET_TOKEN.accepts}") from None
    return text
