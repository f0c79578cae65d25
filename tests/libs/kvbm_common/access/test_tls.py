"""TLS files: a context from what they hold now, or an error that names them."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest
from kvbm_cli.creds.certificates import Authority
from kvbm_common.access.secret_files import SecretUnreadable
from kvbm_common.access.tls import NO_TLS, TlsFiles, tls_files
from kvbm_common.errors import ConfigError


def test_a_context_verifies_names_and_wants_tls_1_2(tmp_path: Path) -> None:
    """Nothing weaker is ever made."""
    Authority(tmp_path).give(tmp_path, "client", "kvbm")
    files = TlsFiles(tmp_path / "ca.pem", tmp_path / "client.pem", tmp_path / "client.key")
    context = files.context()
    assert context.check_hostname
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.minimum_version >= ssl.TLSVersion.TLSv1_2
    assert files.has_identity
    assert not NO_TLS


def test_missing_and_wrong_files_are_named(tmp_path: Path) -> None:
    """A file that is no certificate is an error, not a connection without one."""
    with pytest.raises(SecretUnreadable, match=r"ca\.pem"):
        TlsFiles(tmp_path / "ca.pem").context()
    (tmp_path / "ca.pem").write_text("no certificate")
    with pytest.raises(SecretUnreadable, match=r"ca\.pem"):
        TlsFiles(tmp_path / "ca.pem").context()


def test_a_certificate_goes_with_its_key(tmp_path: Path) -> None:
    """The text names the variable that is missing."""
    with pytest.raises(ConfigError, match="KVBM_NATS_KEY_FILE"):
        tls_files("NATS", None, tmp_path, None)
    with pytest.raises(ConfigError, match="KVBM_ETCD_CERT_FILE"):
        tls_files("ETCD", None, None, tmp_path)
