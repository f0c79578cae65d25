"""TLS: the files of a client, and a context made from them for each connection."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from kvbm_common.access.secret_files import SecretUnreadable
from kvbm_common.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """The files of a TLS client; without an authority those of the system are trusted."""

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None

    def __bool__(self) -> bool:
        return any((self.ca, self.certificate, self.key))

    @property
    def has_identity(self) -> bool:
        """Tell whether the client has a certificate of its own."""
        return self.certificate is not None

    def context(self) -> ssl.SSLContext:
        """Make a context from what is in the files now; raises SecretUnreadable."""
        try:
            context = ssl.create_default_context(cafile=self.ca)
            if self.certificate is not None:
                context.load_cert_chain(self.certificate, self.key)
        except (OSError, ssl.SSLError) as error:
            named = ", ".join(str(path) for path in (self.ca, self.certificate, self.key) if path)
            why = getattr(error, "strerror", None) or type(error).__name__
            raise SecretUnreadable(f"TLS with {named}: {why}") from error
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        return context


NO_TLS = TlsFiles()


def tls_files(name: str, ca: Path | None, certificate: Path | None, key: Path | None) -> TlsFiles:
    """Return the files of one peer; raises ConfigError for a certificate without its key."""
    if (certificate is None) != (key is None):
        missing, given = ("KEY", certificate) if key is None else ("CERT", key)
        accepted = f"a certificate and its key: KVBM_{name}_{missing}_FILE is not set"
        raise ConfigError(f"KVBM_{name}_{'CERT' if key is None else 'KEY'}_FILE", given, accepted)
    return TlsFiles(ca, certificate, key)
