"""A client of the admin API, for the command line: one request after the other, with a deadline."""

from __future__ import annotations

import getpass
import http.client
import json
import socket
from typing import Any
from urllib import error as url_error
from urllib import request as url_request
from urllib.parse import quote, urlencode, urlsplit

from kvbm_common.access.addresses import StrangerAtPort, is_held_by_a_stranger
from kvbm_common.access.http_access import admin_token_of
from kvbm_common.access.secret_files import SecretFile
from kvbm_common.config.settings import Settings
from kvbm_common.errors import ConfigError, KvbmError

WRONG_QUESTION = (400, 413, 422)
DEADLINE_S = 15.0
"""Longer than the API takes to say that an instance does not answer."""
SHOWN = 200
"""Characters of a redirect's target that an error repeats."""
ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Addresses that mean "every address", and the one by which such a server is asked here."""


class ApiError(KvbmError):
    """The API refused; `code` is its own."""

    def __init__(self, code: str, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.code = code
        self.is_callers = status in WRONG_QUESTION
        """True if the question itself is wrong, so that another try would end the same."""


class ApiAway(KvbmError):
    """No metrics service answers there."""

    code = "api_away"


class NotKvbm(KvbmError):
    """Something else than a metrics service answers there."""

    code = "not_kvbm"

    def __init__(self, url: str) -> None:
        super().__init__(f"{url} did not answer as KVBM does")


class _NoRedirect(url_request.HTTPRedirectHandler):
    """Follows no redirect: the token is for the server that was named."""

    def redirect_request(self, *_: Any) -> None:
        """Leave the answer to urllib, which raises HTTPError for it."""


class Client:
    """The admin API at a URL."""

    def __init__(self, url: str, token: str = "", *, deadline_s: float = DEADLINE_S) -> None:
        self.url = _checked(url).rstrip("/")
        self._token = token
        self._deadline_s = deadline_s
        # A proxy of the environment has no business between an operator and this machine.
        self._opener = url_request.build_opener(url_request.ProxyHandler({}), _NoRedirect())

    @classmethod
    def of(cls, settings: Settings, url: str = "", *, deadline_s: float = DEADLINE_S) -> Client:
        """Return a client of the API that the configuration describes, or of the one at `url`."""
        address = ANY_ADDRESS.get(settings.metrics_bind, settings.metrics_bind)
        shown = f"[{address}]" if ":" in address else address
        return cls(
            url or f"http://{shown}:{settings.metrics_port}",
            token_of(settings, asks_here=not url),
            deadline_s=deadline_s,
        )

    def get(self, path: str, **query: object) -> Any:
        """Ask; raises ApiError, ApiAway, NotKvbm, and ConfigError for a redirect."""
        given = {name: value for name, value in query.items() if value is not None}
        asked = "?" + urlencode(given, quote_via=quote) if given else ""
        return self._send("GET", path + asked, None)

    def post(self, path: str, body: object) -> Any:
        """Change, or ask with a body; raises what `get` raises."""
        return self._send("POST", path, json.dumps(body).encode())

    def _send(self, method: str, path: str, body: bytes | None) -> Any:
        request = url_request.Request(
            self.url + quote(path, safe="/?&=%"), data=body, method=method, headers=self._headers()
        )
        try:
            status, location, payload = self._exchange(request)
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = getattr(error, "reason", None) or error
            raise ApiAway(f"no answer from {self.url}: {reason}") from error
        if 300 <= status < 400:
            accepted = f"the URL of the API itself: this one redirects to {location[:SHOWN]}"
            raise ConfigError("--url", self.url, accepted)
        if status >= 400:
            raise _api_error(status, payload)
        try:
            return json.loads(payload)
        except (ValueError, RecursionError):
            raise NotKvbm(self.url) from None

    def _exchange(self, request: url_request.Request) -> tuple[int, str, bytes]:
        """Return status, `Location` and body of an answer."""
        try:
            with self._opener.open(request, timeout=self._deadline_s) as response:
                return response.status, "", response.read()
        except url_error.HTTPError as refused:
            with refused:
                return refused.code, refused.headers.get("location", ""), refused.read()

    def _headers(self) -> dict[str, str]:
        headers = {"content-type": "application/json", "kvbm-actor": _actor()}
        if self._token:
            headers["authorization"] = f"Bearer {self._token}"
        return headers


def token_of(settings: Settings, *, asks_here: bool) -> str:
    """Return the token that an operator's command shows, or an empty text.

    The one that this machine's metrics service has made is for this machine: where another user
    listens at its port it is not sent. Raises SecretUnreadable, StrangerAtPort.
    """
    if text := settings.admin_token or settings.admin_read_token:
        return text
    named = settings.admin_token_file or settings.admin_read_token_file
    if named is not None:
        return SecretFile(named, "KVBM_ADMIN_TOKEN_FILE").text()
    made = admin_token_of(settings)
    if made is None or not asks_here:
        return ""
    if is_held_by_a_stranger(settings.metrics_port, made.owner):
        text = f"another user listens at port {settings.metrics_port}: no token is sent there"
        raise StrangerAtPort(text)
    return made.text()


def _actor() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # A user without a name.
        user = "somebody"
    return f"{user}@{socket.gethostname()}".encode("ascii", "replace").decode()


def _api_error(status: int, payload: bytes) -> ApiError:
    try:
        problem = json.loads(payload)
        return ApiError(str(problem["code"]), str(problem["detail"]), status)
    except (ValueError, KeyError, TypeError, RecursionError):
        return ApiError("http", f"HTTP {status}", status)


def _checked(url: str) -> str:
    """Return a URL that can be asked; raises ConfigError for anything else."""
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        valid = False
    if not valid or not url.isprintable() or " " in url or not url.isascii():
        raise ConfigError("--url", url, "http://HOST:PORT")
    return url
