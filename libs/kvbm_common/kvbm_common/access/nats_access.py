"""Access to NATS: the servers, a process's credentials, TLS, and the inboxes of its role.

Without credentials or TLS a server is taken only on this machine, or where `KVBM_NATS_OPEN` says
that the network is KVBM's alone. Files are read again for each connection.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from urllib.parse import SplitResult, unquote, urlsplit

from kvbm_common.access.addresses import StrangerAtPort, is_held_by_a_stranger, is_loopback
from kvbm_common.access.grants import INBOX, inbox_of
from kvbm_common.access.nats_credentials import Credentials, parse
from kvbm_common.access.roles import ADMIN, BY_NAME
from kvbm_common.access.secret_files import SecretFile
from kvbm_common.access.tls import NO_TLS, TlsFiles, tls_files
from kvbm_common.config.schema import HIDDEN, NATS_URL
from kvbm_common.config.settings import Settings
from kvbm_common.errors import ConfigError
from kvbm_common.nats.streams import AS_THEY_COME, StreamLimits

PORT = 4222
SUFFIX = ".creds"
ACCEPTED = "nats:// or tls://, a host, and perhaps USER:PASSWORD@ before it, percent-encoded"


@dataclass(frozen=True, slots=True, kw_only=True)
class NatsAccess:
    """The servers, credentials and files for a connection to NATS."""

    servers: tuple[str, ...]
    """URLs without user and password."""
    inbox: str = INBOX
    in_url: Credentials | None = None
    file: SecretFile | None = None
    tls: TlsFiles = NO_TLS
    wants_tls: bool = False
    streams: StreamLimits = AS_THEY_COME
    """For those that this connection makes."""

    @property
    def guarded(self) -> bool:
        """Tell whether the server knows who connects."""
        return self.in_url is not None or self.file is not None or self.tls.has_identity

    @property
    def shown(self) -> str:
        """The servers, for people."""
        return ",".join(self.servers)

    @property
    def is_local(self) -> bool:
        """Tell whether all servers are on this machine."""
        return all(is_loopback(urlsplit(server).hostname or "") for server in self.servers)

    def credentials(self) -> Credentials | None:
        """Return what is shown to a server now.

        Raises SecretUnreadable, BadCredentials and StrangerAtPort.
        """
        if self.file is None:
            return self.in_url
        found = parse(self.file.text())
        if found.password and self.is_local:
            self._check_listeners(self.file.owner)
        return found

    def _check_listeners(self, owner: int) -> None:
        for server in self.servers:
            port = urlsplit(server).port or PORT
            if is_held_by_a_stranger(port, owner):
                raise StrangerAtPort(
                    f"another user listens at port {port}: no password is sent there"
                )


def of_url(url: str) -> NatsAccess:
    """Return the access that a URL gives, or several with commas between; raises ConfigError."""
    try:
        NATS_URL.parse(url)
    except ValueError:
        raise ConfigError("KVBM_NATS_URL", HIDDEN, ACCEPTED) from None
    parts = [_split(one) for one in url.split(",")]
    named = [part for part in parts if part.username]
    found = Credentials(unquote(named[0].username or ""), unquote(named[0].password or "")) \
        if named else None  # fmt: skip
    return NatsAccess(
        servers=tuple(f"{part.scheme}://{part.netloc.rpartition('@')[2]}" for part in parts),
        inbox=INBOX,
        in_url=found,
        wants_tls=any(part.scheme == "tls" for part in parts),
    )


def _split(url: str) -> SplitResult:
    part = urlsplit(url)
    if bool(part.username) != bool(part.password):
        raise ConfigError("KVBM_NATS_URL", f"{part.scheme}://…@{part.hostname}", ACCEPTED)
    return part


def nats_access(settings: Settings, role: str) -> NatsAccess:
    """Return how a process of this role reaches NATS.

    Raises ConfigError for a server elsewhere that it would talk to in the open.
    """
    by_url = of_url(settings.nats_url)
    tls = tls_files(
        "NATS", settings.nats_ca_file, settings.nats_cert_file, settings.nats_key_file
    )  # fmt: skip
    file = None if by_url.in_url is not None else _file_of(settings, role)
    access = NatsAccess(
        servers=by_url.servers,
        inbox=inbox_of(_shown_role(file, role), settings.host),
        in_url=by_url.in_url,
        file=file,
        tls=tls,
        wants_tls=by_url.wants_tls or bool(tls),
        streams=stream_limits(settings),
    )
    if not (access.is_local or settings.nats_open):
        _check_closed(access, role)
    return access


def has_credentials(settings: Settings, role: str) -> bool:
    """Return whether this machine has something to show to NATS as a process of this role."""
    by_url = of_url(settings.nats_url)
    has_identity = settings.nats_cert_file is not None
    return by_url.in_url is not None or has_identity or _file_of(settings, role) is not None


def stream_limits(settings: Settings) -> StreamLimits:
    """Return what the settings say of the streams."""
    return StreamLimits(
        replicas=settings.stream_replicas,
        partitions=settings.index_partitions if "index_partitions" in settings.origins else 0,
        events_gb=settings.events_gb,
        events_age_s=settings.events_age_s,
        duplicate_window_s=settings.events_dedup_s,
        images_gb=settings.index_images_gb,
        zones=settings.zones,
    )


def _file_of(settings: Settings, role: str) -> SecretFile | None:
    """Return the file with the credentials of a role: the one that is named, or its own."""
    if settings.nats_creds_file is not None:
        return SecretFile(settings.nats_creds_file, "KVBM_NATS_CREDS_FILE")
    own = settings.creds_dir / f"{role}{SUFFIX}"
    return SecretFile(own, "KVBM_CREDS_DIR") if os.path.isfile(own) else None


def _shown_role(file: SecretFile | None, role: str) -> str:
    """Return whose inboxes a process uses: an operator may take the file of another role."""
    named = file.path.stem if file is not None else ""
    return named if role == ADMIN and named in BY_NAME else role


def _check_closed(access: NatsAccess, role: str) -> None:
    named = "KVBM_NATS_CREDS_FILE"
    missing = [
        text
        for given, text in (
            (access.guarded, f"credentials ({named}, or {role}{SUFFIX} in KVBM_CREDS_DIR)"),
            (access.wants_tls, "TLS (KVBM_NATS_CA_FILE, or tls:// for the system's authorities)"),
        )
        if not given
    ]
    if missing:
        accepted = (
            f"a server on another machine only with {' and '.join(missing)}; or set "
            "KVBM_NATS_OPEN=true where the network is KVBM's alone"
        )
        raise ConfigError("KVBM_NATS_URL", access.shown, accepted)
