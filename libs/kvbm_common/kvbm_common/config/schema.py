"""The schema of settings: variable, parser and text for the manual of each."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import pwd
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbm_common.errors import ConfigError
from kvbm_common.tier.tenants import SHARES_TEXT, shares_of


@dataclass(frozen=True, slots=True)
class Parser:
    """Turns the text of a variable into a value; raises ValueError when it cannot."""

    accepts: str
    """A description of the accepted texts, for the error and the manual."""
    parse: Callable[[str], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting, as declared on a field of Settings."""

    name: str
    variable: str
    section: str
    parser: Parser
    unit: str
    help: str
    default_text: str
    secret: bool
    """Never printed."""
    only_for: tuple[str, ...]
    """The kinds of services that get it from `kvbm up`; empty: all."""


def setting(
    variable: str,
    default: Any,
    parser: Parser,
    help: str,
    *,
    section: str,
    unit: str = "",
    default_text: str = "",
    secret: bool = False,
    only_for: tuple[str, ...] = (),
) -> Any:
    """Declare a field of Settings. A callable default is a factory; then give `default_text`."""
    assert help.endswith("."), f"{variable}: the description is a sentence"
    metadata = {
        "variable": variable,
        "section": section,
        "parser": parser,
        "unit": unit,
        "help": help,
        "default_text": default_text or text_of(default),
        "secret": secret,
        "only_for": only_for,
    }
    if callable(default):
        assert default_text, f"{variable}: a computed default needs a text"
        return dataclasses.field(default_factory=default, metadata=metadata, repr=not secret)
    return dataclasses.field(default=default, metadata=metadata, repr=not secret)


def text_of(value: object) -> str:
    """Return a value as the text that its parser accepts; empty for None."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value)


def redacted(text: str) -> str:
    """Return a text without the passwords of the URLs in it.

    >>> redacted("nats://admin:secret@h:4222,tls://token@h")
    'nats://***@h:4222,tls://***@h'
    >>> redacted("nats://admin:my secret, with @,@h:4222")
    'nats://***@h:4222'
    """
    # A comma ends a URL only before the next one: a password that is not escaped may have one.
    return re.sub(r"://(?:(?!,\s*\w+://).)*@", "://***@", text, flags=re.DOTALL)


HIDDEN = "(not shown)"
"""Stands for a value that is a secret, or may have one."""
ETCD_PORT = ":2379"

# ---- parsers ---------------------------------------------------------------------------------

_TOKEN = re.compile(r"[A-Za-z0-9_-]{1,64}")
_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off"}


def _boolean(text: str) -> bool:
    word = text.strip().lower()
    if word not in _TRUE | _FALSE:
        raise ValueError(text)
    return word in _TRUE


def _path(text: str) -> Path:
    try:
        path = Path(text).expanduser()
    except RuntimeError:  # No user has this name, or this one has no home.
        raise ValueError(text) from None
    if not path.is_absolute():
        raise ValueError(text)
    return path


def _paths(text: str) -> tuple[Path, ...]:
    paths = tuple(_path(part.strip()) for part in text.split(","))
    if len(set(paths)) < len(paths):
        raise ValueError(text)
    return paths


def _tokens(text: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(","))
    if len(set(names)) < len(names) or not all(map(_TOKEN.fullmatch, names)):
        raise ValueError(text)
    return names


def etcd_servers(text: str) -> tuple[str, ...]:
    """Parse `[etcd://|http[s]://]HOST[:PORT],…` into servers as `HOST:PORT`; raises ValueError."""
    servers = []
    for part in text.split(","):
        found = re.fullmatch(
            r"(?:etcd://|https?://)?([\w.-]+|\[[\da-fA-F:]+\])(:[1-9]\d*)?/?", part
        )
        if found is None:
            raise ValueError(text)
        servers.append(f"{found[1]}{found[2] or ETCD_PORT}")
    return tuple(servers)


def _registry_url(text: str) -> str:
    if text.startswith("etcd://"):
        etcd_servers(text)
    elif text not in ("nats", "etcd"):
        raise ValueError(text)
    return text


def matching(accepted: str, pattern: str) -> Parser:
    """Make a parser of a text of this pattern."""

    def parse(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(text)
        return text

    return Parser(accepted, parse)


def _http_url(text: str) -> str:
    if not re.fullmatch(r"https?://[^\s/]+/?", text):
        raise ValueError(text)
    return text.rstrip("/")


_NATS_SERVER = re.compile(
    r"(nats|tls)://([^\s/?#@]*@)?([^\s/?#@:\[\]]+|\[[\da-fA-F:.]+\])(:\d{1,5})?([/?#][^\s@]*)?"
)


def _nats_url(text: str) -> str:
    """Refuse a URL whose password ends early: what is behind `/`, `?` or `#` is no host."""
    if not all(_NATS_SERVER.fullmatch(part) for part in text.split(",")):
        raise ValueError(text)
    return text


def _object_url(text: str) -> str:
    if not re.fullmatch(r"file:///[^?#]+|s3://[A-Za-z0-9._-]{1,255}", text):
        raise ValueError(text)
    return text.rstrip("/")


def _tenant_shares(text: str) -> str:
    shares_of(text)
    return text


def _secret_token(text: str) -> str:
    if not re.fullmatch(r"[!-~]{8,256}", text):
        raise ValueError
    return text


def integer(minimum: int, maximum: int | None = None) -> Parser:
    """Make a parser of a whole number in a closed range."""

    def parse(text: str) -> int:
        value = int(text)
        if value < minimum or (maximum is not None and value > maximum):
            raise ValueError(text)
        return value

    upper = f"≥ {minimum}" if maximum is None else f"from {minimum} to {maximum}"
    return Parser(f"a whole number {upper}", parse)


def number(minimum: float, *, inclusive: bool = True, maximum: float = math.inf) -> Parser:
    """Make a parser of a finite number: not below (or above) a minimum, at most the maximum."""

    def parse(text: str) -> float:
        value = float(text)
        if not math.isfinite(value) or value < minimum or (value == minimum and not inclusive):
            raise ValueError(text)
        if value > maximum:
            raise ValueError(text)
        return value

    if maximum < math.inf:
        return Parser(f"a number {minimum:g}…{maximum:g}", parse)
    return Parser(f"a number {'≥' if inclusive else '>'} {minimum:g}", parse)


def choice(*words: str) -> Parser:
    """Make a parser of one word of a few, in any case."""

    def parse(text: str) -> str:
        word = text.strip().lower()
        if word not in words:
            raise ValueError(text)
        return word

    return Parser(" or ".join(words) if len(words) < 3 else "one of " + ", ".join(words), parse)


BOOLEAN = Parser("true or false (also 1/0, yes/no, on/off)", _boolean)
PATH = Parser("an absolute path", _path)
PATHS = Parser("an absolute path, or several different ones with commas between", _paths)
NATS_URL = Parser("a URL such as nats://127.0.0.1:4222, a password percent-encoded", _nats_url)
REGISTRY_URL = Parser("nats, etcd, or etcd://HOST:PORT,HOST:PORT,…", _registry_url)
ETCD_SERVERS = "servers such as http://127.0.0.1:2379, with commas between"
HTTP_URL = Parser("a URL such as http://127.0.0.1:9000, without a path", _http_url)
OBJECT_URL = Parser("file:///DIRECTORY or s3://BUCKET", _object_url)
PREFIX = matching(
    "words of letters, digits, '.', '-' and '_' with slashes between",
    r"(?!.{257})[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)*",
)
ENDPOINT = matching("a ZMQ endpoint: ipc://PATH or tcp://ADDRESS:PORT", r"ipc://\S+|tcp://\S+:\d+")
PORT_OR_OFF = matching(
    "`off`, or a ZMQ endpoint: ipc://PATH or tcp://ADDRESS:PORT",
    r"off|ipc://\S+|tcp://\S+:[1-9]\d*",
)
TOKEN = matching("1 to 64 letters, digits, '-' or '_'", _TOKEN.pattern)
TOKENS = Parser("names of letters, digits, '-' or '_', with commas between", _tokens)
TENANT = matching("1 to 64 letters, digits, '-' or '_'", r"([A-Za-z0-9_-]{1,64})?")
TENANT_SHARES = Parser(SHARES_TEXT, _tenant_shares)
TEXT = Parser("text", str)
SECRET_TOKEN = Parser("8 to 256 printable ASCII characters without blanks", _secret_token)
PORT = integer(1, 65535)


# ---- computed defaults -----------------------------------------------------------------------

UNSET_DIR = Path()
"""Stands for a directory whose default follows from another setting."""


def host_of(name: str) -> str:
    """Return the name of a machine as one token of a NATS subject.

    >>> host_of("ip-10-0-0-1.internal")
    'ip-10-0-0-1-internal'
    """
    return re.sub(r"[^A-Za-z0-9_-]", "-", name)[:64]


def default_host() -> str:
    """Return this machine's name as one token of a NATS subject."""
    return host_of(socket.gethostname()) or "localhost"


def default_runtime_dir() -> Path:
    """Return the directory where sockets live; one directory per user."""
    return Path(f"/tmp/kvbm-{os.getuid()}")


def default_state_dir() -> Path:
    """Return the directory for what survives a restart; raises ConfigError without a home.

    A variable that is empty or relative counts as unset, as the XDG specification has it.
    """
    base = Path(os.environ.get("XDG_STATE_HOME", ""))
    return (base if base.is_absolute() else _home() / ".local" / "state") / "kvbm"


def _home() -> Path:
    """Return this user's home; where HOME does not say it, the user database's."""
    home = Path(os.environ.get("HOME", ""))
    if not home.is_absolute():
        with contextlib.suppress(KeyError):
            home = Path(pwd.getpwuid(os.getuid()).pw_dir)
    if not home.is_absolute():
        raise ConfigError("KVBM_STATE_DIR", "", "an absolute path; its default needs a HOME")
    return home


# ---- KVBM's other names ----------------------------------------------------------------------

NO_EFFECT = {
    "DYN_KVBM_TRANSFER_BATCH_SIZE": "use DYN_KVBM_MAX_TRANSFER_BATCH_SIZE",
    "DYN_KVBM_ENABLE_NUMA": "deprecated in KVBM too",
    "DYN_KVBM_DISABLE_WRITE_COMBINED": "the arena is ordinary shared memory",
    "DYN_KVBM_DISK_ALLOCATOR_TYPE": "O_DIRECT is used unless DYN_KVBM_DISK_DISABLE_O_DIRECT is set",
    "DYN_KVBM_CACHE_STATS_LOG_INTERVAL_SECS": "hit rates are metrics, and are not logged",
    "DYN_KVBM_LEADER_ZMQ_HOST": "ranks meet in the host tier",
    "DYN_KVBM_LEADER_ZMQ_PUB_PORT": "ranks meet in the host tier",
    "DYN_KVBM_LEADER_ZMQ_ACK_PORT": "ranks meet in the host tier",
    "DYN_KVBM_ENABLE_RECORD": "decisions are not recorded",
    "DYN_KVBM_NCCL_MLA_MODE": "there is no NCCL here",
    "DYN_KVBM_NCCL_MAX_CTAS": "there is no NCCL here",
    "DYN_KVBM_ENABLE": "the connector is enabled in the engine",
}
"""Names that KVBM knows and we accept with a warning that they change nothing."""
NO_EFFECT_PREFIXES = {
    "DYN_KVBM_NIXL_BACKEND_": "the mover is chosen per pair of places",
}
