"""Access to etcd: TLS, and a certificate or a password of the process's own.

Without them etcd is taken only on this machine, or where `KVBM_ETCD_OPEN` says that the network is
KVBM's alone. Files are read again for each connection.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvbm_common.access.addresses import is_loopback
from kvbm_common.access.secret_files import SecretFile
from kvbm_common.access.tls import NO_TLS, TlsFiles, tls_files
from kvbm_common.config.settings import Settings
from kvbm_common.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdAccess:
    """The credentials and files for a connection to etcd."""

    tls: TlsFiles = NO_TLS
    user: str = ""
    password: SecretFile | None = None

    @property
    def guarded(self) -> bool:
        """Tell whether etcd knows who connects."""
        return self.tls.has_identity or self.password is not None


OPEN = EtcdAccess()
"""No credentials and no TLS: for an etcd on this machine."""


def etcd_access(settings: Settings) -> EtcdAccess:
    """Return how services reach etcd; raises ConfigError for one that they would not be safe at."""
    tls = tls_files("ETCD", settings.etcd_ca_file, settings.etcd_cert_file, settings.etcd_key_file)
    path, user = settings.etcd_password_file, settings.etcd_user
    if bool(user) != (path is not None):
        accepted = "a user together with KVBM_ETCD_PASSWORD_FILE"
        raise ConfigError("KVBM_ETCD_USER", user, accepted)
    if (settings.etcd_wants_tls and tls.ca is None) or (tls.has_identity and tls.ca is None):
        raise ConfigError("KVBM_ETCD_CA_FILE", "", "the certificates of etcd's authorities")
    password = SecretFile(path, "KVBM_ETCD_PASSWORD_FILE") if path is not None else None
    access = EtcdAccess(tls=tls, user=user, password=password)
    hosts = [server.rpartition(":")[0] for server in settings.etcd_servers]
    if not (all(map(is_loopback, hosts)) or settings.etcd_open):
        _check_closed(access, settings)
    return access


def _check_closed(access: EtcdAccess, settings: Settings) -> None:
    missing = [
        text
        for given, text in (
            (access.tls, "TLS (KVBM_ETCD_CA_FILE)"),
            (access.guarded, "a certificate (KVBM_ETCD_CERT_FILE) or a user (KVBM_ETCD_USER)"),
        )
        if not given
    ]
    if missing:
        accepted = (
            f"an etcd on another machine only with {' and '.join(missing)}; or set "
            "KVBM_ETCD_OPEN=true where the network is KVBM's alone"
        )
        raise ConfigError("KVBM_REGISTRY_URL", ",".join(settings.etcd_servers), accepted)
